"""Small files that are on the disk when the call returns."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

_counter = itertools.count()


def own_name() -> str:
    """A name that nobody else uses for what is being staged; the process comes last."""
    return f"{next(_counter)}-{os.getpid()}"


def write_text(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
