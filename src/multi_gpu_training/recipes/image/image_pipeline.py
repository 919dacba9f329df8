"""Image classifiers after training: from a file, picture or array to a class."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.hugging_face import no_progress_bar, transformers
from multi_gpu_training.recipes.image.image_classifier import (
    AUTO,
    PROCESSOR,
    Asked,
    ClassifierOf,
    from_function,
    from_timm,
)
from multi_gpu_training.recipes.image.image_data import CLASSES, ImageData
from multi_gpu_training.recipes.image.image_decoding import (
    InvalidImage,
    Preprocessing,
    decode,
    prepared,
)
from multi_gpu_training.recipes.image.image_files import is_image
from multi_gpu_training.recipes.image.image_list import ImageRef
from multi_gpu_training.recipes.image.image_model import (
    WIDTHS,
    Normalise,
    NormaliseChannels,
    build_model,
)
from multi_gpu_training.recipes.image.image_run import processor_facts
from multi_gpu_training.recipes.pipeline import Pipeline, Result, TensorSpec, imported, likeliest
from multi_gpu_training.recipes.user_data import library
from multi_gpu_training.safe_output import brief

FASHION = [
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
]
DIGIT_LEVELS = 16  # scikit-learn's digits are as bright as this, image files as 255


def describe_grey(
    model: nn.Module, mode: str, asked: Asked | None, data: ImageData
) -> dict[str, Any]:
    """Of a model for grey images of one size: digits, MNIST and what has its form."""
    height, width = data.size
    names = FASHION if data.name == "fashion-mnist" else [str(n) for n in range(CLASSES)]
    kind = "flatten" if mode == "auto" else mode
    return {
        "recipe": "image",
        "labels": names,
        "model": _arguments(model, kind, asked, (height, width), 1),
        "preprocessing": {
            "colour": "grey",
            "height": height,
            "width": width,
            "fit": "pad",
            "levels": DIGIT_LEVELS if data.name == "digits" else 255,
        },
    }


def describe_files(
    model: nn.Module, mode: str, asked: Asked | None, classes: Sequence[str], to: Preprocessing
) -> dict[str, Any]:
    """Of a model for image files."""
    size = (to.height, to.width)
    return {
        "recipe": "image",
        "labels": list(classes),
        "model": _arguments(model, mode, asked, size, to.channels),
        "preprocessing": {"colour": "rgb" if to.channels == 3 else "L", **to.facts()},
    }


def _arguments(
    model: nn.Module, mode: str, asked: Asked | None, size: tuple[int, int], channels: int
) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": mode, "size": list(size), "channels": channels}
    if asked is None:
        return {**found, "width": WIDTHS["cnn" if mode == "cnn" else "flatten"]}
    body = model.body if isinstance(model, ClassifierOf) else model
    config: Any = getattr(body, "config", None)
    if hasattr(config, "to_dict"):
        return {**found, "kind": "huggingface", "config": config.to_dict()}
    kind = "timm" if asked.name.startswith("timm:") else "function"
    return {**found, "kind": kind, "name": asked.name, "args": asked.args}


class ImagePipeline(Pipeline):
    """Raw input: a file, the bytes of one, a Pillow image, or an array as the model takes it."""

    recipe = "image"
    batch_size = 256

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        levels = self.preprocessing.get("levels", 255)
        if not isinstance(levels, int) or not 1 <= levels <= 255:
            raise ValueError(f"levels={brief(levels, 80)} of grey; 1 to 255 can be")

    @property
    def grey(self) -> bool:
        """Whether the model takes (height, width) without channels."""
        return bool(self.preprocessing["colour"] == "grey")

    def build_model(self) -> nn.Module:
        given, classes = self.arguments, len(self.labels or ())
        channels, size = int(given["channels"]), (int(given["size"][0]), int(given["size"][1]))
        # Mean and spread are buffers: their values come with the weights.
        normalise: nn.Module = Normalise(0.0, 1.0)
        if not self.grey:
            normalise = NormaliseChannels([0.0] * channels, [1.0] * channels)
        kind = given["kind"]
        if kind in WIDTHS:
            return build_model(kind, size, classes, normalise, channels, int(given["width"]))
        return ClassifierOf(normalise, self._body(kind, given, classes, size, channels))

    def _body(
        self, kind: str, given: dict[str, Any], classes: int, size: tuple[int, int], channels: int
    ) -> nn.Module:
        if kind == "huggingface":
            settings = dict(given["config"])
            config = transformers().CONFIG_MAPPING[settings.pop("model_type")](**settings)
            body: nn.Module = getattr(transformers(), AUTO).from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
            return body
        asked = Asked(given["name"], given["args"])
        if kind == "timm":
            return from_timm(asked, classes, channels)
        imported(asked.name, self.trust)
        return from_function(asked, classes, size)

    def save_pretrained(self, model: nn.Module, folder: Path) -> nn.Module | None:
        body: Any = model.body if isinstance(model, ClassifierOf) else None
        if self.arguments["kind"] != "huggingface" or self.grey:
            return None
        with no_progress_bar():
            body.save_pretrained(folder)
            read = getattr(transformers(), AUTO).from_pretrained(folder, dtype=torch.float32)
        (folder / PROCESSOR).write_text(json.dumps(processor_facts(self.fitting()), indent=1))
        return ClassifierOf(copy.deepcopy(model.normalise), read)  # type: ignore[arg-type]

    @classmethod
    def code_in(cls, options: Mapping[str, Any]) -> str | None:
        named = str(options.get("model") or "")
        if ":" in named and not named.startswith("timm:"):
            return f"model={named}"
        return super().code_in(options)

    def inputs(self) -> list[TensorSpec]:
        height, width = self.arguments["size"]
        inner = (height, width) if self.grey else (self.arguments["channels"], height, width)
        top = self.preprocessing.get("levels", 255)
        return [TensorSpec("images", "uint8", ("batch", *inner), f"pixels from 0 to {top}")]

    def outputs(self) -> list[TensorSpec]:
        count = len(self.labels or ())
        return [TensorSpec("scores", "float32", ("batch", count), "one per class, before softmax")]

    def sample(self, raw: Any) -> Tensor:
        if isinstance(raw, (Tensor, np.ndarray)):
            return self._array(torch.as_tensor(raw))
        to = self.fitting()
        try:
            if isinstance(raw, (str, Path)):
                return self._scaled(decode(ImageRef(str(raw), None), to))
            pillow = library("PIL.Image", "reading images needs Pillow", extra="image")
            image = pillow.open(io.BytesIO(raw)) if isinstance(raw, bytes) else raw
            if not isinstance(image, pillow.Image):
                raise InvalidImage(f"is a {type(raw).__name__}: give a file, a picture or an array")
            return self._scaled(prepared(image, to))
        except InvalidImage as error:
            named = raw if isinstance(raw, (str, Path)) else "the image"
            raise DataError(f"{named} {error}; give an image file such as a PNG or JPEG") from None
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"the image cannot be decoded ({error})") from None

    def takes(self, path: Path) -> bool:
        return is_image(path)

    def fitting(self) -> Preprocessing:
        """How image files become the model's input."""
        facts = dict(self.preprocessing)
        facts.pop("colour")
        if facts.pop("levels", None) is not None:
            side = max(facts["height"], facts["width"])
            return Preprocessing(**facts, resize=side, mean=(0.0,), std=(1.0,))
        return Preprocessing(**{**facts, "mean": tuple(facts["mean"]), "std": tuple(facts["std"])})

    def _scaled(self, pixels: Tensor) -> Tensor:
        if not self.grey:
            return pixels
        levels = int(self.preprocessing["levels"])
        return (pixels[0].float() * (levels / 255)).round().to(torch.uint8)

    def _array(self, pixels: Tensor) -> Tensor:
        wanted = self.inputs()[0].shape[1:]
        if tuple(pixels.shape) != wanted or pixels.dtype != torch.uint8:
            raise DataError(
                f"an array of {pixels.dtype} and shape {tuple(pixels.shape)} was given; arrays go "
                f"to the model as they are, so give uint8 of {wanted}, or a picture"
            )
        return pixels

    def read(self, outputs: tuple[Tensor, ...], samples: Sequence[Any]) -> list[Result]:
        return [likeliest(row, self.labels or ()) for row in outputs[0]]

    def synthetic(self, count: int) -> list[Any]:
        noise = torch.Generator().manual_seed(0)
        top = int(self.preprocessing.get("levels", 255)) + 1
        inner = self.inputs()[0].shape[1:]
        shape = (count, *(int(side) for side in inner))
        return list(torch.randint(top, shape, dtype=torch.uint8, generator=noise))


PIPELINE = ImagePipeline
