"""Small files that are on the disk when the call returns."""

from __future__ import annotations

import itertools
import os
import secrets
from pathlib import Path

_counter = itertools.count()
_process = ""


def _name_process() -> None:
    """A name of this process alone. Its number is none: in a container every start of a run may
    have the same one."""
    global _process
    _process = secrets.token_hex(8)


_name_process()
os.register_at_fork(after_in_child=_name_process)


def own_name() -> str:
    """A name that nobody else uses, also no earlier run, for what is being staged."""
    return f"{next(_counter)}-{_process}"


def is_own(name: str) -> bool:
    """Whether a file's name ends in an `own_name` of this process."""
    return name.endswith(f"-{_process}")


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
