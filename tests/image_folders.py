"""Image folders as users have them: colour and grey, several formats and sizes, some corrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

COLOURS = {"blue": (20, 30, 220), "green": (20, 200, 40), "red": (230, 20, 10)}
FORMATS = (".png", ".jpg", ".webp")


def picture(label: str, number: int, size: tuple[int, int] | None = None) -> Any:
    """A noisy image in the colour of its class; every fifth is grey."""
    noise = np.random.default_rng([number, len(label)])
    width, height = size or (int(noise.integers(20, 60)), int(noise.integers(20, 60)))
    pixels = noise.normal(COLOURS[label], 25, (height, width, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    return image.convert("L") if number % 5 == 4 else image


def write_images(folder: Path, per_class: int = 8, start: int = 0) -> Path:
    """folder/CLASS/NUMBER.png, jpg and webp in turn."""
    for label in COLOURS:
        (folder / label).mkdir(parents=True)
        for number in range(start, start + per_class):
            ending = FORMATS[number % 3]
            picture(label, number).save(folder / label / f"{number:02d}{ending}")
    return folder


def corrupt(path: Path, keep: float = 0.5) -> Path:
    """Cut a file short."""
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    return path


def tiny_vit(folder: Path, classes: tuple[str, ...] = ("a", "b"), side: int = 16) -> Path:
    """A ViT with fresh weights and its preprocessing, as save_pretrained leaves it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    settings = transformers.ViTConfig(
        **TINY_VIT,
        image_size=side,
        id2label=dict(enumerate(classes)),
        label2id={name: number for number, name in enumerate(classes)},
    )
    torch.manual_seed(5)
    transformers.ViTForImageClassification(settings).save_pretrained(folder)
    facts = {
        "size": {"height": side, "width": side},
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.25, 0.3],
        "resample": 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return folder


TINY_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
}
