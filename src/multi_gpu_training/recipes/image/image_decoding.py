"""From an encoded image to bytes of one size: decoded by Pillow, on the loader's workers.

Pixels stay bytes until the model normalises them on the device; augmentation happens there too.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from multi_gpu_training.errors import DataError
from multi_gpu_training.portability import usable_cores
from multi_gpu_training.recipes.image.arrow_images import read_row
from multi_gpu_training.recipes.image.image_list import ImageRef
from multi_gpu_training.recipes.user_data import library
from multi_gpu_training.safe_files import write_atomically

Fit = Literal["crop", "pad", "stretch"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOST_PIXELS = 50_000_000  # of a decoded image: 600 MB while transparency is taken out
MOST_ENCODED = 2**28
BILINEAR = 2  # Pillow's numbers, which Hugging Face's files use as well


class InvalidImage(Exception):
    """The image cannot be decoded; the message says why."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the model's input.

    fit: crop (the shorter side becomes `resize`, the middle is kept), pad (all of it, with black
    bars) or stretch. mean, std: of pixels between 0 and 1, one per channel: 3, or 1 for grey.
    """

    height: int
    width: int
    resize: int
    fit: Fit = "crop"
    resample: int = BILINEAR
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @property
    def channels(self) -> int:
        return len(self.mean)

    def describe(self) -> str:
        colour = "colour" if self.channels == 3 else "grey"
        return f"{self.height}x{self.width}, {colour}, {self.fit}"

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}


class DecodedImages(Dataset[tuple[Tensor, int]]):
    """Images as uint8 of (channels, height, width), each with the number of its class."""

    def __init__(
        self, refs: Sequence[ImageRef], labels: Sequence[int], preprocessing: Preprocessing
    ) -> None:
        self.refs, self.labels, self.preprocessing = refs, labels, preprocessing

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        ref = self.refs[index]
        try:
            return decode(ref, self.preprocessing), self.labels[index]
        except InvalidImage as error:
            raise DataError(
                f"{ref} {error}; replace or remove it, or set corrupt=skip to leave such images out"
            ) from None


def decode(ref: ImageRef, to: Preprocessing) -> Tensor:
    """The image in its size, upright, without transparency."""
    raw = read_encoded(ref)
    pillow = library("PIL.Image", "reading images needs Pillow", extra="image")
    try:
        with pillow.open(io.BytesIO(raw)) as image:
            # A JPEG can be decoded at half its size and less, which saves most of the time. Twice
            # the size is left for a careful reduction.
            image.draft(None, (2 * to.resize, 2 * to.resize))
            return prepared(image, to)
    # Pillow's formats fail in every way there is: OSError, SyntaxError, struct.error, ...
    except Exception as error:
        kind = type(error).__name__
        # What Pillow says of a file that is no image at all names only the buffer in memory.
        why = kind if kind == "UnidentifiedImageError" else f"{kind}: {error}"
        raise InvalidImage(f"cannot be decoded ({why})") from None


def prepared(image: Any, to: Preprocessing) -> Tensor:
    """An image of Pillow as uint8 of (channels, height, width)."""
    check_size(image, to)
    pixels = fitted(upright(image, to.channels), to)
    array = np.array(pixels, dtype=np.uint8).reshape(to.height, to.width, to.channels)
    return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))


def check_size(image: Any, to: Preprocessing) -> None:
    """Refuse an image before it is decoded if that would take gigabytes."""
    short, long = sorted(image.size)
    scaled = to.resize * long // max(1, short) * to.resize if to.fit == "crop" else 0
    if short * long > MOST_PIXELS or scaled > MOST_PIXELS:
        raise ValueError(
            f"{image.width:,} x {image.height:,} pixels are too many: {MOST_PIXELS:,} at most, "
            "also after scaling its shorter side"
        )


def read_encoded(ref: ImageRef) -> bytes:
    """An unreadable disk is not a corrupt image: it must not shrink the dataset."""
    try:
        if ref.row is None:
            facts = os.stat(ref.path)  # noqa: PTH116 - as below
            # Opening a FIFO would wait for whoever is at its other end.
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_ENCODED:
                raise InvalidImage(f"is not a regular file of at most {MOST_ENCODED:,} bytes")
        return Path(ref.path).read_bytes() if ref.row is None else read_row(ref)
    except OSError as error:
        raise DataError(
            f"{ref} cannot be read ({error.strerror or error}); check the disk and the rights"
        ) from None


def upright(image: Any, channels: int) -> Any:
    """As a viewer shows it, in colour or grey: turned as its camera says, on white where it is
    transparent."""
    from PIL import Image, ImageOps

    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        # Converting would cut 16 bits off at 255 and leave a white image.
        deep = np.asarray(image).astype(np.int64)
        image = Image.fromarray((deep.clip(0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("pixels are floating-point numbers of unknown range")
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB" if channels == 3 else "L")


def fitted(image: Any, to: Preprocessing) -> Any:
    """In the size that is asked for."""
    from PIL import Image

    size, way = (to.width, to.height), Image.Resampling(to.resample)
    if to.fit == "stretch":
        return image.resize(size, way)
    if to.fit == "pad":
        scale = min(to.width / image.width, to.height / image.height)
        inner = tuple(max(1, round(side * scale)) for side in image.size)
        whole = Image.new(image.mode, size)
        left, top = (to.width - inner[0]) // 2, (to.height - inner[1]) // 2
        whole.paste(image.resize(inner, way), (left, top))
        return whole
    # As torchvision and Hugging Face do it: the longer side is rounded down.
    short, long = sorted(image.size)
    longer = max(to.resize, int(to.resize * long / short))
    inner = (to.resize, longer) if image.width <= image.height else (longer, to.resize)
    left, top = (inner[0] - to.width) // 2, (inner[1] - to.height) // 2
    return image.resize(inner, way).crop((left, top, left + to.width, top + to.height))


# Which images cannot be decoded


@dataclass(frozen=True)
class Checked:
    """Why some images cannot be used, and what it took to know."""

    corrupt: dict[ImageRef, str]
    seconds: float
    known: bool


def check_images(refs: Sequence[ImageRef], to: Preprocessing, cache: Path) -> Checked:
    """Decode every image once, before training; the verdict is kept in the folder `cache`.

    Safe with several ranks at once: one of them looks, the others wait for what it found.
    """
    started = time.perf_counter()
    key = fingerprint(refs)
    kept = cache / ".image-check.json"
    with _alone(kept.with_suffix(".lock")):
        corrupt = _read_verdict(kept, key)
        known = corrupt is not None
        if corrupt is None:
            threads = len(usable_cores())
            with ThreadPoolExecutor(threads) as pool:  # Pillow decodes without the GIL
                reasons = list(pool.map(lambda ref: why_corrupt(ref, to), refs, chunksize=64))
            corrupt = {index: why for index, why in enumerate(reasons) if why is not None}
            _keep_verdict(kept, key, corrupt)
    found = {refs[index]: why for index, why in corrupt.items()}
    return Checked(found, time.perf_counter() - started, known)


def why_corrupt(ref: ImageRef, to: Preprocessing) -> str | None:
    try:
        decode(ref, to)
    except InvalidImage as error:
        return str(error)
    return None


def fingerprint(refs: Sequence[ImageRef]) -> str:
    """Changes with the list of images, and with every change of a file."""
    digest = hashlib.blake2b(digest_size=16)
    for ref in refs:
        facts = os.stat(ref.path)  # noqa: PTH116 - a Path for each of a million files is slow
        digest.update(f"{ref}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_verdict(kept: Path, key: str) -> dict[int, str] | None:
    try:
        found = json.loads(kept.read_text())
        if found["key"] != key:
            return None
        return {int(index): str(why) for index, why in found["corrupt"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keep_verdict(kept: Path, key: str, corrupt: dict[int, str]) -> None:
    with suppress(OSError):  # a folder that cannot be written: every rank looks for itself
        write_atomically(kept, json.dumps({"key": key, "corrupt": corrupt}), 0o644)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Among the processes that share the folder, where it can be written and locked."""
    try:
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back
