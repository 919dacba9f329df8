"""The text to learn from: files of a folder, or the documentation that comes with Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.tables import TABLES, read_rows, read_text
from multi_gpu_training.recipes.user_data import contents, existing_folder, is_number, refuse

BUILT_IN = "pydoc_data"
TOPICS = 6  # of the built-in text, that a paragraph may come from
STEMS = ("train", "val")


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
        if all(is_number(label) for label in found):
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


def read_corpus(data_dir: str | None) -> Corpus:
    """The documents of a file or a folder: train and val, or all its files but val."""
    if data_dir is None:
        return Corpus(f"{BUILT_IN} (Python's own documentation)", list(topics().values()))
    path = Path(data_dir).expanduser()
    if path.is_file():
        return Corpus(path.name, documents(path))
    path = existing_folder(data_dir, "a folder with .txt files, or a file")
    # Plain text comes before tables, which may be there for task=classification.
    train, val = (find(path, stem, (".txt",)) or find(path, stem, TABLES) for stem in STEMS)
    files = [train] if train else sorted(file for file in path.glob("*.txt") if file != val)
    if not files:
        raise DataError(
            f"data_dir={data_dir!r} holds no .txt file (it holds {contents(path)}); put train.txt "
            "there, and val.txt if you have one",
            code="MGT301",
        )
    found = [document for file in files for document in documents(file)]
    return Corpus(path.name, found, documents(val) if val else None)


def documents(path: Path) -> list[str]:
    """A table has one per row, in its column `text`; any other file is one."""
    if path.suffix not in TABLES:
        return [read_text(path)]
    return [text for (text,) in fields(path, ("text",))]


# Texts with labels


def read_labelled(data_dir: str | None) -> Labelled:
    """Texts with labels: train and val as .jsonl, .csv or .tsv with `text` and `label`, or one
    such file."""
    if data_dir is None:
        return topic_paragraphs()
    path = Path(data_dir).expanduser()
    if path.is_file():
        if path.suffix not in TABLES:
            raise DataError(
                f"data_dir={data_dir!r} is not a table; give a file with text and label that ends "
                f"in {', '.join(TABLES)}, or a folder with such files",
                code="MGT301",
            )
        return Labelled(path.name, pairs(path))
    path = existing_folder(data_dir, "a folder with train.jsonl, train.csv or train.tsv")
    train = find(path, "train", TABLES)
    if train is None:
        raise DataError(
            f"data_dir={data_dir!r} has no train{', train'.join(TABLES)} (it holds "
            f"{contents(path)}); put one there, each line a text and its label",
            code="MGT301",
        )
    val = find(path, "val", TABLES)
    return Labelled(path.name, pairs(train), pairs(val) if val else None)


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


def pairs(path: Path) -> list[tuple[str, str]]:
    """(text, label) of every row."""
    return [(text, label) for text, label in fields(path, ("text", "label"))]


def fields(path: Path, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Those columns of every row; all rows that lack one are named at once."""
    found, problems = [], []
    for number, row in read_rows(path):
        missing = [name for name in names if row.get(name) in (None, "")]
        if missing:
            problems.append(
                f"{path}, line {number}: there is no {' and no '.join(missing)} (found "
                f"{', '.join(map(str, row)) or 'nothing'}); give every line a "
                f"{' and a '.join(names)}"
            )
        found.append(tuple(str(row.get(name)) for name in names))
    refuse(problems)
    if not found:
        raise DataError(f"{path} holds no sample; put lines with {' and '.join(names)} into it")
    return found


def find(folder: Path, stem: str, suffixes: tuple[str, ...]) -> Path | None:
    """The one file of that name; several would leave open which is meant."""
    paths = [folder / f"{stem}{suffix}" for suffix in suffixes]
    found = [path for path in paths if path.is_file()]
    if len(found) > 1:
        raise DataError(
            f"{folder} has {' and '.join(path.name for path in found)}; keep one of them, or give "
            "the file itself as data_dir"
        )
    return found[0] if found else None
