"""Labelled images as users have them: a folder per class, a table of paths, or a dataset of Hugging
Face on disk. Nothing is decoded here; everything wrong with names and labels is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.image.arrow_images import COLUMNAR, read_columnar
from multi_gpu_training.recipes.image.image_list import (
    LABEL_COLUMNS,
    PARTS,
    FoundImages,
    ImageList,
    ImageRef,
    in_order,
)
from multi_gpu_training.recipes.tables import TABLES, Row, read_rows
from multi_gpu_training.recipes.user_data import contents, listed, refuse
from multi_gpu_training.run_places import path_problem
from multi_gpu_training.safe_output import brief

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PATH_COLUMNS = ("file_name", "filename", "path", "file", "image", "image_path", "filepath")
WANTED = (
    "a folder of images (one folder per class, or train/CLASS and val/CLASS), a table of paths and "
    "labels, a dataset of Hugging Face, or a folder with train-images-idx3-ubyte.gz and its three "
    "companions"
)


def is_idx(folder: Path) -> bool:
    """Whether a folder holds IDX files, as MNIST and Fashion-MNIST come in."""
    return any(folder.glob("*-idx[13]-ubyte*")) or any(folder.glob("*.idx[13]-ubyte*"))


def find_images(data_dir: str, label_column: str | None = None) -> FoundImages:
    """The images of a folder or a table, whatever its layout, all with their labels."""
    path = Path(data_dir).expanduser()
    if not path.exists():
        raise DataError(f"data_dir={data_dir!r} is not a folder; set it to {WANTED}", code="MGT301")
    if is_columnar(path):
        found = read_columnar(path, label_column)
    elif tables := find_tables(path, label_column):
        found = from_tables(path, tables, label_column)
    else:
        if label_column is not None:
            raise DataError(
                f"label_column={label_column!r} is for tables and datasets of Hugging Face, and "
                f"data_dir={data_dir!r} is neither; drop it"
            )
        found = from_folders(path)
    _check_classes(found)
    return found


def is_columnar(path: Path) -> bool:
    """Whether this is a dataset of Hugging Face, as `save_to_disk` or the hub give it."""
    if path.is_file():
        return path.suffix in COLUMNAR
    names = ("dataset_dict.json", "state.json", "*.arrow", "*.parquet", "data/*.parquet")
    return any(any(path.glob(name)) for name in names)


def _check_classes(found: FoundImages) -> None:
    train = found.parts.get("train")
    if not train:
        raise DataError(
            f"{found.layout} has no image to train with; set data_dir to {WANTED}", code="MGT301"
        )
    problems = []
    seen = set(train.labels)
    if len(seen) < 2:
        problems.append(
            f"{found.layout}: all training images are of the class {train.labels[0]!r}; a "
            "classifier needs two classes at least"
        )
    for part, images in found.parts.items():
        unknown = sorted(set(images.labels) - seen)
        if unknown:
            problems.append(
                f"{found.layout}: the part {part} has the class {listed(unknown)}, which no "
                "training image has; correct the name, or add training images"
            )
    refuse(problems)


# A folder per class


def from_folders(root: Path) -> FoundImages:
    """CLASS/*.png, or train/CLASS/*.png with val and test beside it; classes may be nested."""
    if root.is_file():
        raise DataError(f"data_dir={str(root)!r} is not a table; set it to {WANTED}", code="MGT301")
    folders = subfolders(root)
    # A class may be called `train` as well: then its folder holds images, not folders.
    parts = {
        PARTS[f.name.lower()]: f for f in folders if f.name.lower() in PARTS and holds_folders(f)
    }
    notes = []
    if "train" in parts:
        left = [folder.name for folder in folders if folder not in parts.values()]
        if left:
            notes.append(f"not read, beside train: {listed(left)}")
    elif parts:
        raise DataError(
            f"data_dir={str(root)!r} has {listed([f.name for f in parts.values()])} but no folder "
            "train; put the training images there"
        )
    else:
        parts = {"train": root}
    problems: list[str] = []
    found = {part: _read_classes(folder, problems) for part, folder in parts.items()}
    refuse(problems)
    return FoundImages(root.name, found, in_order(found["train"].labels), notes)


def _read_classes(root: Path, problems: list[str]) -> ImageList:
    images = ImageList()
    loose = [file.name for file in sorted(root.iterdir()) if is_image(file)]
    folders = subfolders(root)
    if loose and folders:
        problems.append(
            f"{root} has images outside of its class folders ({listed(loose, 3)}); move them into "
            "one each, or away"
        )
    if not folders:
        problems.append(
            f"{root} has no folder per class and no table (it holds {contents(root)}); set "
            f"data_dir to {WANTED}"
        )
    for folder in folders:
        files = list(walk(folder))
        problem = path_problem(folder.name)
        if problem is not None:  # it would be the name of a class in every file of the run
            problems.append(f"{brief(os.fspath(folder))}: {problem}")
        if not files:
            problems.append(
                f"{folder} has no image ({', '.join(ENDINGS)}); put some there, or remove it"
            )
        for file in files:
            images.add(ImageRef(file), folder.name)
    return images


def subfolders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def holds_folders(folder: Path) -> bool:
    return bool(subfolders(folder)) and not any(map(is_image, folder.iterdir()))


def is_image(path: Path | str) -> bool:
    """By its name; hidden files are none, such as the `._` files of macOS."""
    name = os.path.basename(path)  # noqa: PTH119 - a Path for each of a million files is slow
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def walk(folder: Path) -> Iterator[str]:
    """Images below a folder, in the same order on every machine. Links are followed, once."""
    above: dict[str, tuple[tuple[int, int], ...]] = {os.fspath(folder): ()}
    for place, names, files in os.walk(folder, followlinks=True, onerror=_unreadable):
        facts, upper = Path(place).stat(), above.pop(place)
        if (facts.st_dev, facts.st_ino) in upper:  # each image would count 40 times, or for ever
            raise DataError(
                f"{place} is a link that leads back to a folder above it; remove it", code="MGT301"
            )
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in names:
            inner = os.path.join(place, name)  # noqa: PTH118
            above[inner] = (*upper, (facts.st_dev, facts.st_ino))
        for name in sorted(files):
            if is_image(name):
                yield os.path.join(place, name)  # noqa: PTH118


def _unreadable(error: OSError) -> NoReturn:
    """What is left out in silence would be missing in the training."""
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}; make it readable, or remove it",
        code="MGT301",
    )


# Tables


def find_tables(path: Path, label_column: str | None = None) -> dict[str, Path]:
    """Tables by part: `metadata` or `labels` anywhere, train/val/test, or the only one there is."""
    if path.is_file():
        return {"train": path} if path.suffix in TABLES else {}
    files = sorted(file for file in path.iterdir() if file.suffix in TABLES and file.is_file())
    for stem in ("metadata", "labels"):
        named = [file for file in files if file.stem.lower() == stem]
        if named:
            return {"train": _only(named)}
    parts: dict[str, Path] = {}
    for folder in subfolders(path):
        within = sorted(file for file in folder.glob("metadata.*") if file.suffix in TABLES)
        if within and folder.name.lower() in PARTS:
            parts[PARTS[folder.name.lower()]] = _only(within)
    for file in files:
        if file.stem.lower() in PARTS:
            part = PARTS[file.stem.lower()]
            parts[part] = _only([*([parts[part]] if part in parts else []), file])
    if "train" in parts:
        return parts
    # Any other table counts only if it names images: a folder of classes may hold notes.
    if len(files) == 1 and None not in find_columns(read_rows(files[0]), label_column):
        return {"train": files[0]}
    return {}


def _only(tables: list[Path]) -> Path:
    if len(tables) > 1:
        raise DataError(
            f"{' and '.join(map(str, tables))} both could be meant; keep one, or give the file "
            "itself as data_dir"
        )
    return tables[0]


def find_columns(rows: Sequence[Row], label_column: str | None) -> tuple[str | None, str | None]:
    """The columns with paths and with labels; None for one that does not exist."""
    names = {name.lower(): name for _, row in rows for name in row}
    labels = (label_column.lower(),) if label_column else LABEL_COLUMNS
    return (
        next((names[name] for name in PATH_COLUMNS if name in names), None),
        next((names[name] for name in labels if name in names), None),
    )


def from_tables(root: Path, tables: dict[str, Path], label_column: str | None) -> FoundImages:
    """Images that tables name; paths are relative to the table. A column `split` makes parts."""
    parts: dict[str, ImageList] = {}
    problems: list[str] = []
    lines: dict[str, str] = {}
    for part, table in tables.items():
        rows = read_rows(table)
        paths, labels = find_columns(rows, label_column)
        if paths is None or labels is None:
            have = ", ".join(rows[0][1]) if rows else "nothing"
            wanted = [label_column] if label_column else LABEL_COLUMNS
            problems.append(
                f"{table} has the columns {have}; it needs one with paths "
                f"({', '.join(PATH_COLUMNS)}) and one with labels ({', '.join(wanted)}; another is "
                "named by label_column)"
            )
            continue
        for line, row in rows:
            place = f"{table}, line {line}"
            name, label = (str(row.get(key) or "").strip() for key in (paths, labels))
            label = "0" if row.get(labels) == 0 else label  # a number of a JSON line
            into = str(row.get("split") or part).strip().lower()
            if not name or not label:
                problems.append(f"{place}: there is no {labels if name else paths}; add it")
            elif into not in PARTS:
                problems.append(f"{place}: split={into!r} is unknown; use train, val or test")
            else:
                file = os.path.join(table.parent, name)  # noqa: PTH118 - an absolute one stays
                if file in lines:
                    problems.append(f"{place}: {name} is in {lines[file]} already; keep one")
                elif not os.path.isfile(file):  # noqa: PTH113
                    problems.append(f"{place}: {file} does not exist; correct the path")
                lines[file] = place
                parts.setdefault(PARTS[into], ImageList()).add(ImageRef(file), label)
    refuse(problems)
    names = " and ".join(table.name for table in tables.values())
    train = parts.get("train", ImageList())
    layout = root.name if root.is_file() else f"{root.name} by {names}"
    return FoundImages(layout, parts, in_order(train.labels))
