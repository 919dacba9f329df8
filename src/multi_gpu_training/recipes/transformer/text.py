"""The text to learn from: files of a folder, or the documentation that comes with Python."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import contents, existing_folder

BUILT_IN = "pydoc_data"
TOPICS = 6  # of the built-in text, that a paragraph may come from
SUFFIXES = (".jsonl", ".csv", ".tsv")


@dataclass(frozen=True)
class Corpus:
    """Documents to learn from. Without `val`, a tenth of the samples is kept for validation."""

    name: str
    train: list[str]
    val: list[str] | None = None


@dataclass(frozen=True)
class Labelled:
    """Texts with a label each. Without `val`, a tenth of the samples is kept for validation."""

    name: str
    train: list[tuple[str, str]]
    val: list[tuple[str, str]] | None = None

    def labels(self) -> list[str]:
        """The labels of the training texts: numbers in their order, else by the alphabet."""
        found = {label for _, label in self.train}
        if all(label.isdecimal() for label in found):
            return sorted(found, key=int)
        return sorted(found)


def topics() -> dict[str, str]:
    """The text behind Python's `help()`: half a megabyte of English about Python."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError:
        raise DataError(
            "this Python comes without pydoc_data, the built-in text; set data_dir to a folder "
            "with your own"
        ) from None
    return dict(sorted(found.items()))  # in the same order whatever Python's version


# Running text


def read_corpus(folder: str | None) -> Corpus:
    """The documents of a folder: train.txt and val.txt, or all its .txt files for training."""
    if folder is None:
        return Corpus(f"{BUILT_IN} (Python's own documentation)", list(topics().values()))
    path = existing_folder(folder, "a folder with .txt files")
    train, val = path / "train.txt", path / "val.txt"
    if train.is_file():
        return Corpus(path.name, [read_text(train)], [read_text(val)] if val.is_file() else None)
    files = sorted(path.glob("*.txt"))
    if not files:
        raise DataError(
            f"data_dir={folder!r} holds no .txt file (it holds {contents(path)}); put train.txt "
            "there, and val.txt if you have one"
        )
    return Corpus(path.name, [read_text(file) for file in files if file != val], None)


def read_text(path: Path) -> str:
    """The text of a file that has some."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); "
            "convert it, as in iconv -f latin1 -t utf-8"
        ) from None
    if not text.strip():
        raise DataError(f"{path} is empty; put text into it or remove it")
    return text


# Texts with labels


def read_labelled(folder: str | None) -> Labelled:
    """Texts with labels: train and val as .jsonl, .csv or .tsv with `text` and `label`."""
    if folder is None:
        return topic_paragraphs()
    path = existing_folder(folder, "a folder with train.jsonl, train.csv or train.tsv")
    train = find(path, "train")
    if train is None:
        raise DataError(
            f"data_dir={folder!r} has no train{', train'.join(SUFFIXES)} (it holds "
            f"{contents(path)}); put one there, each line a text and its label"
        )
    val = find(path, "val")
    return Labelled(path.name, list(pairs(train)), list(pairs(val)) if val else None)


def topic_paragraphs() -> Labelled:
    """Paragraphs of the longest topics of Python's documentation, labelled with the topic."""
    longest = sorted(topics().items(), key=lambda item: -len(item[1]))[:TOPICS]
    found = [
        (" ".join(paragraph.split()), name)
        for name, text in longest
        for paragraph in text.split("\n\n")
        if len(paragraph.split()) >= 8
    ]
    return Labelled(f"paragraphs of {TOPICS} topics of {BUILT_IN}", found)


def pairs(path: Path) -> Iterator[tuple[str, str]]:
    """(text, label) of every line."""
    empty = True
    for number, row in rows(path):
        missing = [key for key in ("text", "label") if row.get(key) in (None, "")]
        if missing:
            raise DataError(
                f"{path}, line {number}: there is no {' and no '.join(missing)} (found "
                f"{', '.join(map(str, row)) or 'nothing'}); give every line a text and a label"
            )
        yield str(row["text"]), str(row["label"])
        empty = False
    if empty:
        raise DataError(f"{path} holds no sample; put lines with text and label into it")


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    text = read_text(path)
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: {error}; write one object a line"
                ) from None
            yield number, row if isinstance(row, dict) else {}
        return
    separator = "\t" if path.suffix == ".tsv" else ","
    yield from enumerate(csv.DictReader(text.splitlines(), delimiter=separator), 2)


def find(folder: Path, stem: str) -> Path | None:
    paths = (folder / f"{stem}{suffix}" for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)
