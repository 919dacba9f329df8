"""Image datasets of Hugging Face on disk: Arrow files of `save_to_disk`, Parquet of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.image.image_list import (
    LABEL_COLUMNS,
    PARTS,
    FoundImages,
    ImageList,
    ImageRef,
    in_order,
)
from multi_gpu_training.recipes.user_data import library, read_small_text, refuse

COLUMNAR = (".parquet", ".arrow")
MOST_UNPACKED, MOST_TIMES = 2**26, 20
IMAGE_COLUMNS = ("image", "img", "images", "picture")


def arrow(module: str = "pyarrow") -> Any:
    otherwise = ", or export the images into a folder per class"
    return library(module, "datasets of Hugging Face need pyarrow", "image-arrow", otherwise)


def read_columnar(root: Path, label_column: str | None) -> FoundImages:
    """Every split of the dataset; classes are named as its features say."""
    arrow()
    parts: dict[str, ImageList] = {}
    classes: list[str] | None = None
    problems: list[str] = []
    for part, file in data_files(root):
        table = open_table(str(file))
        features = features_of(table)
        image, label = choose_columns(str(file), table, features, label_column)
        names = features.get(label, {}).get("names")
        classes = classes or names
        images = parts.setdefault(part, ImageList())
        for row, value in enumerate(table.column(label).to_pylist()):
            known = not names or (isinstance(value, int) and 0 <= value < len(names))
            if value is None or not known:
                problems.append(f"{file}, row {row}: {label}={value!r} is not a class; correct it")
            else:
                name = str(names[value] if names else value)
                images.add(ImageRef(str(file), row, image), name)
    refuse(problems)
    train = parts.get("train", ImageList())
    used = set(train.labels)
    # In the dataset's own order, but without names that no image has.
    ordered = [name for name in classes or [] if name in used] or in_order(train.labels)
    return FoundImages(f"{root.name} (Hugging Face)", parts, ordered)


def data_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Each data file with its part: by its folder, or by its name (`train-00000-of-00001`)."""
    if root.is_file():
        yield "train", root
        return
    files = sorted(file for file in root.rglob("*") if file.suffix in COLUMNAR)
    # `datasets` leaves cache files beside the data; state.json names those that count.
    for file in files:
        state = file.parent / "state.json"
        if state.is_file():
            counted = _counted(state)
            if file.name not in counted:
                continue
        words = [*file.stem.lower().split("-"), file.parent.name.lower()]
        part = next((PARTS[word] for word in words if word in PARTS), "train")
        yield part, file


def _counted(state: Path) -> set[str]:
    """The names of the files that belong to a dataset."""
    try:
        return {str(one["filename"]) for one in json.loads(read_small_text(state))["_data_files"]}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{state} does not list the files of a dataset ({type(error).__name__}); fetch it "
            "again, or remove it if all .arrow files beside it count"
        ) from None


def open_table(file: str) -> Any:
    """The table of a file, mapped into memory where its format allows that; once per process,
    unless the file changes."""
    return _opened(file, Path(file).stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _opened(file: str, changed: int) -> Any:
    try:
        if file.endswith(".parquet"):
            parquet = arrow("pyarrow.parquet")
            _check_unpacked(file, parquet.read_metadata(file))
            return parquet.read_table(file)
        ipc = arrow("pyarrow.ipc")
        mapped = arrow().memory_map(file)
        try:
            return ipc.open_stream(mapped).read_all()  # what save_to_disk writes
        except arrow().ArrowInvalid:
            mapped.seek(0)
            return ipc.open_file(mapped).read_all()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{file} cannot be read ({error}); fetch it again") from None


def _check_unpacked(file: str, facts: Any) -> None:
    """Images are packed already: a file that unpacks to far more than its size is no dataset."""
    groups = range(facts.num_row_groups)
    unpacked = sum(facts.row_group(group).total_byte_size for group in groups)
    size = Path(file).stat().st_size
    if unpacked > max(MOST_UNPACKED, MOST_TIMES * size):
        raise ValueError(f"it has {size:,} bytes and unpacks to {unpacked:,}")


def features_of(table: Any) -> dict[str, dict[str, Any]]:
    """What the columns are, as `datasets` notes it in the file; nothing where it did not."""
    noted = (table.schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(noted).get("info", {}).get("features", {}) if noted else {}
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (ValueError, AttributeError, RecursionError):
        return {}  # nonsense: as if it noted nothing


def choose_columns(
    file: str, table: Any, features: dict[str, dict[str, Any]], label_column: str | None = None
) -> tuple[str, str]:
    """The names of the columns with images and labels."""
    have = table.column_names

    def first(kind: str, usual: tuple[str, ...]) -> str | None:
        typed = [name for name in have if features.get(name, {}).get("_type") == kind]
        return next(iter([*(name for name in usual if name in have), *typed]), None)

    image = first("Image", IMAGE_COLUMNS)
    label = first("ClassLabel", LABEL_COLUMNS)
    if label_column is not None:
        label = label_column if label_column in have else None
    if image is None or label is None:
        raise DataError(
            f"{file} has the columns {', '.join(have)}; it needs one with images "
            f"({', '.join(IMAGE_COLUMNS)}) and one with labels ({label_column or 'label'}); name "
            "the labels by label_column"
        )
    return image, label


def read_row(ref: ImageRef) -> bytes:
    """The encoded image in a row; a path beside the file where only that was stored."""
    value = open_table(ref.path).column(ref.column)[ref.row].as_py()
    if isinstance(value, dict):
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        value = value.get("path")
    if isinstance(value, bytes):
        return value
    # Only a file below the dataset: a table must not name any file of this machine.
    root = Path(ref.path).parent.resolve()
    named = (root / str(value)).resolve()
    if not named.is_relative_to(root) or not named.is_file():
        raise DataError(f"{ref}: {str(value)[:200]!r} is not an image file below {root}")
    return named.read_bytes()
