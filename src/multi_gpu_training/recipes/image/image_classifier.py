"""Classifiers from elsewhere: of Hugging Face (by architecture, or pretrained from a folder), of
timm, or what a function of yours returns."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.errors import ModelError
from multi_gpu_training.recipes.hugging_face import fetch, first_line, has_weights, transformers
from multi_gpu_training.recipes.image.image_decoding import Fit, Preprocessing
from multi_gpu_training.recipes.user_data import library

AUTO = "AutoModelForImageClassification"
# Sizes that train from scratch on thousands of images; model_args changes them.
SMALL_SIZES: dict[str, dict[str, Any]] = {
    "vit": {
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "intermediate_size": 768,
    },
    "resnet": {
        "embedding_size": 32,
        "hidden_sizes": [32, 64, 128, 256],
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
    },
    "convnext": {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 4, 2]},
}
PROCESSOR = "preprocessor_config.json"
PROCESSOR_FIELDS = (
    *("size", "crop_size", "do_center_crop", "crop_pct", "resample", "image_mean", "image_std"),
    *("do_normalize", "do_rescale", "rescale_factor", "do_flip_channel_order", "do_pad"),
    "rescale_offset",
)
NOT_DONE_HERE = ("do_flip_channel_order", "do_pad", "rescale_offset")


class ClassifierOf(nn.Module):
    """Normalises bytes, calls `body`, and returns its scores, one per class."""

    def __init__(self, normalise: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.normalise = normalise
        self.body = body

    def forward(self, images: Tensor) -> Tensor:
        output = self.body(self.normalise(images))
        scores: Tensor = getattr(output, "logits", output)
        return scores


@dataclass(frozen=True)
class Asked:
    """Which model: `name` and what goes with it."""

    name: str
    args: dict[str, Any]
    from_scratch: bool = False
    trust: bool = False  # run code that came with the model

    @property
    def folder(self) -> Path | None:
        """The folder of a model of Hugging Face; None for a name."""
        path = Path(self.name).expanduser()
        looks_so = self.name.startswith((".", "/", "~")) or "/" in self.name
        return path if path.exists() or looks_so else None

    @property
    def is_pretrained(self) -> bool:
        return self.folder is not None and not self.from_scratch and has_weights(self.name)

    def check(self) -> None:
        """Raise where a folder is named that does not exist."""
        if self.folder is not None and not self.folder.exists():
            raise ModelError(
                f"model={self.name!r} is not a folder here; fetch a model of the hub first (hf "
                f"download {self.name} --local-dir {self.folder.name}) and give the folder",
                code="MGT404",
            )
        if self.folder is None and self.from_scratch:
            raise ModelError(
                f"from_scratch=true is for a folder with weights; model={self.name} always is"
            )


def build_body(
    asked: Asked, classes: Sequence[str], size: tuple[int, int], channels: int
) -> tuple[nn.Module, list[str]]:
    """The model without its normalisation, and the classes in the order of its outputs."""
    names = list(classes)
    if asked.folder is not None:
        return from_folder(asked, names)
    if asked.name.startswith("timm:"):
        return from_timm(asked, len(names), channels), names
    if ":" in asked.name:
        return from_function(asked, len(names), size), names
    return from_architecture(asked, names, size, channels), names


# Hugging Face


def from_architecture(
    asked: Asked, classes: list[str], size: tuple[int, int], channels: int
) -> nn.Module:
    """A model of that type with fresh weights, from torch's generator as it stands."""
    settings = {**SMALL_SIZES.get(asked.name, {}), "num_channels": channels}
    known = transformers().CONFIG_MAPPING
    if asked.name not in known:
        raise ModelError(
            f"model={asked.name!r} is not an architecture of transformers, a folder, timm:NAME or "
            f"package.module:function; use one of those, such as {', '.join(SMALL_SIZES)}"
        )
    fields = vars(known[asked.name]())
    if "image_size" in fields:
        settings["image_size"] = size if size[0] != size[1] else size[0]
    if asked.name == "vit" and "patch_size" not in asked.args:
        settings["patch_size"] = patch_size(size)
    unknown = [name for name in asked.args if name not in fields]
    if unknown:
        raise ModelError(
            f"model_args has {', '.join(unknown)}, which {asked.name} does not know; it has "
            f"{', '.join(sorted(name for name in fields if not name.startswith('_')))}"
        )
    config = known[asked.name](**{**settings, **asked.args}, **labels_of(classes))
    try:
        return getattr(transformers(), AUTO).from_config(  # type: ignore[no-any-return]
            config, dtype=torch.float32, trust_remote_code=False
        )
    except ValueError as error:
        raise ModelError(
            f"model={asked.name!r} cannot be built to classify images: {first_line(error)}",
            code="MGT404",
        ) from None


def patch_size(size: tuple[int, int]) -> int:
    """The largest usual patch that divides the image into eight and more per side."""
    for patch in (16, 8, 4, 2):
        if size[0] % patch == 0 == size[1] % patch and min(size) // patch >= 8:
            return patch
    fits = [patch for patch in (4, 2, 1) if size[0] % patch == 0 == size[1] % patch]
    return fits[0]


def from_folder(asked: Asked, classes: list[str]) -> tuple[nn.Module, list[str]]:
    """The model in a folder. Its head is kept if it knows all of the classes; else it is learnt
    anew, with one output per class."""
    config = fetch("AutoConfig", "model", asked.name, asked.trust, **asked.args)
    own = [str(name) for _, name in sorted(config.id2label.items())]
    trained = any(name.endswith("ForImageClassification") for name in config.architectures or ())
    if trained and asked.is_pretrained and set(classes) <= set(own):
        return fetch(
            AUTO, "model", asked.name, asked.trust, config=config, dtype=torch.float32
        ), own
    same_size = len(own) == len(classes)
    for name, value in labels_of(classes).items():
        setattr(config, name, value)
    fresh: Any = None
    if same_size or not asked.is_pretrained:
        try:
            fresh = getattr(transformers(), AUTO).from_config(
                config, dtype=torch.float32, trust_remote_code=asked.trust
            )
        except ValueError as error:
            raise ModelError(
                f"model={asked.name!r} cannot classify images: {first_line(error)}",
                code="MGT404",
            ) from None
    if not asked.is_pretrained:
        return fresh, classes
    more = {"ignore_mismatched_sizes": True, "dtype": torch.float32}
    model = fetch(AUTO, "model", asked.name, asked.trust, config=config, **more)
    if fresh is not None and hasattr(model, "classifier"):
        # A head of the right size for other classes would start out sure of the wrong ones.
        model.classifier.load_state_dict(fresh.classifier.state_dict())
    return model, classes


def labels_of(classes: Sequence[str]) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def read_preprocessing(asked: Asked, image_size: int | None, fit: Fit | None) -> Preprocessing:
    """What a pretrained model was fed with: size, crop, mean and standard deviation."""
    assert asked.folder is not None
    facts = _processor_facts(asked)
    factor = facts.get("rescale_factor", 1 / 255) * 255 if facts.get("do_rescale", True) else 255.0
    plain = not facts.get("do_normalize", True)
    mean = [0.0] * 3 if plain else facts["image_mean"]
    std = [1.0] * 3 if plain else facts["image_std"]
    size = facts.get("size", 224)
    crop = facts.get("crop_size") if facts.get("do_center_crop") else None
    chosen: Fit = "stretch"
    if isinstance(size, dict) and "shortest_edge" in size:
        edge = int(size["shortest_edge"])
        height, width, resize, chosen = *_sides(crop or edge), edge, "crop"
        if facts.get("crop_pct"):  # ConvNeXt's way
            chosen = "crop" if edge < 384 else "stretch"
            resize = int(edge / facts["crop_pct"]) if edge < 384 else edge
    else:
        height, width = _sides(size)
        resize = max(height, width)
        if crop is not None:
            (height, width), chosen = _sides(crop), "crop"
    found = Preprocessing(
        height,
        width,
        resize,
        fit or facts.get("fit", chosen),  # written by this recipe: see image_run.py
        int(facts.get("resample", 2)),
        tuple(value / factor for value in mean),
        tuple(value / factor for value in std),
    )
    if image_size is None or (height, width) == (image_size, image_size):
        return found
    scaled = round(resize * image_size / min(height, width))
    return replace(found, height=image_size, width=image_size, resize=scaled)


def _processor_facts(asked: Asked) -> dict[str, Any]:
    assert asked.folder is not None
    folder = asked.folder if asked.folder.is_dir() else asked.folder.parent
    try:
        if (folder / PROCESSOR).is_file():
            facts = json.loads((folder / PROCESSOR).read_text())
        else:
            facts = json.loads((folder / "processor_config.json").read_text())["image_processor"]
        # What the file does not say is as its class has it: CLIP's images are scaled otherwise
        # than ViT's.
        kind = facts.get("image_processor_type") or facts.get("feature_extractor_type") or ""
        kind = kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
        usual = getattr(transformers(), kind, None) if kind else None
        facts = {name: getattr(usual, name, None) for name in PROCESSOR_FIELDS} | facts
        facts = {name: value for name, value in facts.items() if value is not None}
        if facts.get("do_normalize", True):
            _ = facts["image_mean"], facts["image_std"]
    except (OSError, ValueError, KeyError, AttributeError):
        raise ModelError(
            f"model={asked.name!r} has weights but no {PROCESSOR} that says how its images were "
            "prepared, and other pixels than it knows would make them worthless; add the file of "
            'the model, such as {"size": {"height": 224, "width": 224}, "image_mean": [0.5, 0.5, '
            '0.5], "image_std": [0.5, 0.5, 0.5]}, or set from_scratch=true'
        ) from None
    found: dict[str, Any] = facts
    strange = [name for name in NOT_DONE_HERE if facts.get(name)]
    if strange:
        raise ModelError(
            f"model={asked.name!r} was trained on images with {' and '.join(strange)}, which this "
            "recipe does not do; set from_scratch=true, or train with your own dataset"
        )
    return found


def _sides(size: Any) -> tuple[int, int]:
    """Height and width, as any of Hugging Face's files spells them."""
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    if isinstance(size, Sequence):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


# Others


def from_timm(asked: Asked, classes: int, channels: int) -> nn.Module:
    """A model of timm. Untested: timm needs torchvision, which the project is not tested with."""
    timm = library("timm", f"model={asked.name} needs timm", extra="timm")
    name = asked.name.removeprefix("timm:")
    try:
        return timm.create_model(  # type: ignore[no-any-return]
            name, **{"num_classes": classes, "in_chans": channels, **asked.args}
        )
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"model={asked.name!r}: {first_line(error)}", code="MGT404") from None


def from_function(asked: Asked, classes: int, size: tuple[int, int]) -> nn.Module:
    """`package.module:function(num_classes=..., **model_args)`; `image_size` is given as well where
    the function takes it."""
    module, _, name = asked.name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # `mgt` is a script elsewhere; the user's module is here
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"model={asked.name!r} cannot be imported ({first_line(error)}); give "
            "package.module:function, importable from this folder",
            code="MGT404",
        ) from None
    wanted = {"num_classes": classes, **asked.args}
    try:
        signature = inspect.signature(function)
        if "image_size" in signature.parameters:
            wanted.setdefault("image_size", size[0])
        signature.bind(**wanted)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"model={asked.name!r} cannot be called with {', '.join(wanted)} ({error}); it takes "
            "num_classes and what model_args gives",
            code="MGT404",
        ) from None
    model = function(**wanted)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model={asked.name!r} returned a {type(model).__name__}; it must return a "
            "torch.nn.Module that takes (batch, channels, height, width) and gives scores"
        )
    return model
