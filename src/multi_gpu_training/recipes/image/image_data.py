"""The images: scikit-learn's digits, or IDX files as MNIST and Fashion-MNIST come in; moved a
little and mirrored while training."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.user_data import contents, existing_folder, library

CLASSES = 10
SHIFT = 1  # pixels that an image may move and still be what it is
IMAGES, LABELS = 2051, 2049  # what the files of each kind begin with
MOST_IDX = 2**30  # bytes unpacked; EMNIST, the largest of its kind, has half of that
# Real images pack to a fifth of their size or more; what packs far better is there to fill memory.
MOST_PACKED, USUALLY_FINE = 200, 2**26

DatasetName = Literal["auto", "digits", "mnist", "fashion-mnist"]


@dataclass(frozen=True)
class Part:
    """Training or test images: uint8 of (count, height, width), and a label each."""

    images: Tensor
    labels: Tensor

    def as_dataset(self) -> TensorDataset:
        """As bytes: the model makes numbers of them, where the GPU is."""
        return TensorDataset(self.images, self.labels)


@dataclass(frozen=True)
class ImageData:
    """A dataset with what belongs to it: how to normalise it and how it may be augmented."""

    name: str
    train: Part
    test: Part

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.train.images.shape[1], self.train.images.shape[2]

    @cached_property
    def mean_and_spread(self) -> tuple[float, float]:
        """Mean and standard deviation of the training pixels."""
        # Counting is exact; a float32 sum would depend on the number of threads.
        pixels = self.train.images.flatten()
        share = torch.bincount(pixels, minlength=256).double() / len(pixels)
        levels = torch.arange(256, dtype=torch.float64)
        mean = share @ levels
        spread = (share @ (levels - mean).square()).sqrt()
        return float(mean), float(spread) or 1.0

    @property
    def flip(self) -> bool:
        """Whether a mirrored image keeps its label: clothes do, digits do not."""
        return self.name == "fashion-mnist"

    def describe(self, augment: bool, flip: bool) -> str:
        """One line that says what is trained on."""
        height, width = self.size
        text = (
            f"images: {self.name}, {len(self.train.labels):,} for training and "
            f"{len(self.test.labels):,} for testing, {height}x{width}"
        )
        if augment:
            text += f", shifted by up to {SHIFT} px" + (" and mirrored" if flip else "")
        return text


def load_images(name: DatasetName, folder: str | None) -> ImageData:
    """The images asked for. `auto`: digits without a folder, else what the folder is called."""
    if name == "auto":
        if folder is None:
            name = "digits"
        else:
            fashion = "fashion" in Path(folder).expanduser().resolve().name.lower()
            name = "fashion-mnist" if fashion else "mnist"
    if name == "digits":
        if folder is not None:
            raise ConfigError(
                f"dataset=digits comes with scikit-learn, but data_dir={folder!r} was given; drop "
                "one of them"
            )
        return load_digits()
    if folder is None:
        raise ConfigError(
            f"dataset={name} is read from IDX files; set data_dir to the folder that holds them"
        )
    return load_idx(name, Path(folder).expanduser())


def load_digits() -> ImageData:
    """1797 handwritten digits of 8x8; the same fifth of each class is always the test part."""
    library(
        "sklearn",
        "the default images come with scikit-learn",
        extra="image",
        otherwise=", or set data_dir to a folder with IDX files",
    )
    from sklearn import datasets, model_selection

    digits = datasets.load_digits()
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        digits.images.astype("uint8"),
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=0,  # not the run's seed: accuracies of two runs must be comparable
    )
    return ImageData(
        "digits",
        Part(torch.from_numpy(train_x), torch.from_numpy(train_y)),
        Part(torch.from_numpy(test_x), torch.from_numpy(test_y)),
    )


def load_idx(name: str, folder: Path) -> ImageData:
    """Images and labels from the four IDX files in `folder`, packed or not."""
    existing_folder(
        folder, "the one that holds train-images-idx3-ubyte.gz and its three companions"
    )
    stems = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images", "labels")]
    files = {stem: find_idx(folder, stem) for stem in stems}
    missing = [stem for stem, path in files.items() if path is None]
    if missing:
        raise DataError(
            [
                f"data_dir={str(folder)!r} has no {spellings(stem)[0]}, with or without .gz "
                f"(it holds {contents(folder)}); put the file there"
                for stem in missing
            ],
            code="MGT301",
        )
    train, test = (
        read_part(*(path for stem, path in files.items() if path and stem.startswith(part)))
        for part in ("train", "t10k")
    )
    sizes = ["x".join(map(str, part.images.shape[1:])) for part in (train, test)]
    if sizes[0] != sizes[1]:
        raise DataError(
            f"{folder}: training images are {sizes[0]} but test images {sizes[1]}; use files of "
            "one dataset"
        )
    return ImageData(name, train, test)


def spellings(stem: str) -> list[str]:
    """The names under which an IDX file is published."""
    kind = "idx3-ubyte" if stem.endswith("images") else "idx1-ubyte"
    return [f"{stem}{dash}{kind}{end}" for dash in "-." for end in ("", ".gz")]


def find_idx(folder: Path, stem: str) -> Path | None:
    """The file under any of its spellings; None where there is none."""
    paths = (folder / spelling for spelling in spellings(stem))
    return next((path for path in paths if path.is_file()), None)


def read_part(images_file: Path, labels_file: Path) -> Part:
    """Images and their labels, checked against each other."""
    images = read_idx(images_file, IMAGES)
    labels = read_idx(labels_file, LABELS).long()
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} holds {len(images)} images but {labels_file} {len(labels)} labels; "
            "use files that belong together"
        )
    if int(labels.max()) >= CLASSES:
        raise DataError(
            f"{labels_file} has the label {int(labels.max())}; labels must lie in 0 to "
            f"{CLASSES - 1}, as in MNIST and Fashion-MNIST"
        )
    return Part(images, labels)


def read_idx(path: Path, magic: int) -> Tensor:
    """The bytes of an IDX file, in the shape that its head gives."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read_idx(path, file, magic)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); fetch it again") from None


def _read_idx(path: Path, file: Any, magic: int) -> Tensor:
    sides = magic & 0xFF  # the last byte of the magic number counts the dimensions
    start = 4 + 4 * sides
    raw = file.read(start)
    found = int.from_bytes(raw[:4], "big")
    if found != magic:
        file.read(2**22)  # a damaged packed file says so at its end
        kind = "images" if magic == IMAGES else "labels"
        raise DataError(
            f"{path} begins with {found}, but an IDX file of {kind} with {magic}; "
            "check that it is the right file"
        )
    if len(raw) < start:
        raise DataError(f"{path} ends within its head, after {len(raw)} bytes; fetch it again")
    shape = struct.unpack(f">{sides}I", raw[4:start])
    expected = math.prod(shape)
    packed = path.stat().st_size
    if expected > max(USUALLY_FINE, MOST_PACKED * packed):
        raise DataError(
            f"{path} has {packed:,} bytes and announces {' x '.join(map(str, shape))} = "
            f"{expected:,} unpacked, which no real data comes to; fetch it again"
        )
    if expected > MOST_IDX:
        raise DataError(
            f"{path} announces {' x '.join(map(str, shape))} = {expected:,} bytes, {MOST_IDX:,} at "
            "most are read; use a folder of image files for larger data"
        )
    # The head alone must not make us allocate: what is there is unpacked piece by piece, and no
    # further than it announces. A tensor over immutable bytes must never be written to.
    body = bytearray()
    while len(body) <= expected and (piece := file.read(min(2**22, expected + 1 - len(body)))):
        body += piece
    if len(body) != expected or expected == 0:
        there = f"more than {expected:,}" if len(body) > expected else f"{len(body):,}"
        raise DataError(
            f"{path} holds {there} bytes after its head, which announces "
            f"{' x '.join(map(str, shape))} = {expected:,}; fetch it again"
        )
    return torch.frombuffer(body, dtype=torch.uint8).view(shape)


@dataclass(frozen=True)
class Moved:
    """Shifts every image by up to `shift` pixels and, with `flip`, mirrors half of them.

    What happens to an image depends on (seed, epoch, sample), not on the rank that holds it.
    """

    shift: int
    flip: bool

    def __call__(self, batch: list[Tensor], random: SampleRandom) -> list[Tensor]:
        images, labels = batch
        return [self.move(images, random), labels]

    def move(self, images: Tensor, random: SampleRandom) -> Tensor:
        """(batch, height, width) or (batch, channels, height, width), each image cut from itself
        with a border of background."""
        count, height, width = images.shape[0], *images.shape[-2:]
        planes = images.shape[1:-2].numel()  # colours move together
        padded = F.pad(images, [self.shift] * 4)
        draws = random.uniform(3)
        offsets = (draws[:, :2] * (2 * self.shift + 1)).long()
        rows = torch.arange(height, device=images.device) + offsets[:, :1]
        columns = torch.arange(width, device=images.device)
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, width - 1 - columns, columns)
        columns = columns + offsets[:, 1:]
        # One gather for the whole batch: a loop over images would cost a kernel each.
        places = rows.unsqueeze(2) * padded.shape[-1] + columns.unsqueeze(1)
        flat = padded.view(count, planes, -1)
        places = places.view(count, 1, -1).expand(-1, planes, -1)
        return flat.gather(2, places).view(images.shape)
