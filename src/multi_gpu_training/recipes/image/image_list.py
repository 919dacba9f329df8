"""Images and their classes before anything is decoded, and how they are divided into parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.held_out import held_out
from multi_gpu_training.recipes.user_data import is_number, listed

PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
LABEL_COLUMNS = ("label", "class", "labels", "category", "target")


class ImageRef(NamedTuple):
    """Where an encoded image is: a file, or a row of an Arrow or Parquet file."""

    path: str
    row: int | None = None
    column: str | None = None

    def __str__(self) -> str:
        return self.path if self.row is None else f"{self.path}, row {self.row}"


@dataclass
class ImageList:
    """Images and the class of each, by its name."""

    refs: list[ImageRef] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.refs)

    def add(self, ref: ImageRef, label: str) -> None:
        self.refs.append(ref)
        self.labels.append(label)

    def select(self, keep: Sequence[bool]) -> ImageList:
        chosen = [index for index, kept in enumerate(keep) if kept]
        return ImageList([self.refs[i] for i in chosen], [self.labels[i] for i in chosen])


@dataclass
class FoundImages:
    """The parts of a dataset (`train`, and `val` and `test` where there are), its classes in their
    order, and what to tell about it."""

    layout: str
    parts: dict[str, ImageList]
    classes: list[str]
    notes: list[str] = field(default_factory=list)

    def divide(self, share: float, seed: int) -> None:
        """Make sure that there is a `val` part: `test`, or a share of the training images."""
        train = self.parts["train"]
        if "val" in self.parts:
            if "test" in self.parts:
                self.notes.append(f"{len(self.parts['test']):,} test images are left alone")
        elif "test" in self.parts:
            self.parts["val"] = self.parts.pop("test")
            self.notes.append("validation with the test images: there is no part for validation")
        else:
            held = held_out(len(train), share, seed, train.labels).tolist()
            self.parts["val"] = train.select(held)
            self.parts["train"] = train.select([not one for one in held])
            self.notes.append(f"validation with {share:g} of each class, drawn by seed={seed}")
        if not len(self.parts["val"]):
            raise DataError(
                f"{self.layout}: no class has two images, which leaves none for validation; add "
                "images, or a folder val",
                code="MGT302",
            )
        seen = set(self.parts["val"].labels)
        unseen = [name for name in self.classes if name not in seen]
        if unseen:
            self.notes.append(f"not among the validation images: {listed(unseen)}")


def in_order(labels: Sequence[str]) -> list[str]:
    """Classes: numbers in their order, else by the alphabet."""
    found = set(labels)
    if all(is_number(label) for label in found):
        return sorted(found, key=int)
    return sorted(found)


def class_counts_note(images: ImageList) -> str:
    """How uneven the classes are, in one line."""
    counts = sorted(Counter(images.labels).values())
    span = f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{span} training images per class"
