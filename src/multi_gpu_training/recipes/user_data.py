"""What recipes ask of the user's data and machine, with errors in the same words."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import DataError
from multi_gpu_training.extras import install, installed

MOST_SMALL_TEXT = 2**26


def library(module: str, needed: str, extra: str, otherwise: str = "") -> Any:
    """A module that only some recipe needs. `needed` says what for: `reading videos needs PyAV`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if installed(module.partition(".")[0]):  # installed, and broken or short of memory
            raise DataError(
                f"{needed}, which is installed but cannot be imported ({error}); try a fresh "
                f"{install(extra)}",
                code="MGT105",
            ) from None
        raise DataError(
            f"{needed}, which is not installed; run {install(extra)}{otherwise}",
            code="MGT105",
        ) from None


def existing_folder(data_dir: str | Path, wanted: str) -> Path:
    """`data_dir` as a path; an error that says what to set it to where it is not a folder."""
    path = Path(data_dir).expanduser()
    if not path.is_dir():
        raise DataError(
            f"data_dir={str(data_dir)!r} is not a folder; set it to {wanted}", code="MGT301"
        )
    return path


def read_small_text(path: Path) -> str:
    """A text file that a person or a small program wrote, such as a list of labels."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a regular file; put a text file there")
        size = path.stat().st_size
        if size > MOST_SMALL_TEXT:
            raise DataError(
                f"{path} has {size:,} bytes; such a file has {MOST_SMALL_TEXT:,} at most: check "
                "that it is the right one"
            )
        return path.read_text(encoding="utf-8-sig")  # Excel begins with a byte-order mark
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} cannot be read as text in UTF-8 (byte {error.start}); write it as text"
        ) from None


def is_number(text: str) -> bool:
    """Whether it is a whole number from 0 on, of a length that numbers have."""
    return text.isdecimal() and len(text) <= 18


def contents(folder: Path) -> str:
    """The first names in a folder, for errors about what is missing."""
    return ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"


def listed(items: Sequence[str], most: int = 8) -> str:
    """As in `a, b and 7 more`."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def shortened(lines: Sequence[str], most: int = 10) -> list[str]:
    """The first lines, and how many more there are."""
    left = len(lines) - most
    return [*lines[:most], *([f"and {left} more like these"] if left > 0 else [])]


def refuse(problems: Sequence[str]) -> None:
    """Raise one DataError with everything that is wrong; nothing where nothing is."""
    if problems:
        raise DataError(shortened(problems))
