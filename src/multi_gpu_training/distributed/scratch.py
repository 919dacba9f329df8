"""Temporary folders that do not outlive their owners for long, not even killed ones.

A process that is killed cannot tidy up. So its folder holds a lock of the kernel's, which goes with
the process, and whoever makes the next folder removes those that nobody holds any more.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "mgt-launch-"
_LOCK = ".lock"
_SOON_S = 60.0  # within it a new folder has its lock
_LONGEST = 85  # a socket's path has 107 bytes, of which its own name takes about 20


class Scratch:
    """A folder for this process and its children; `with` removes it at the end."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._owner = os.getpid()
        draft = self.path / f"{_LOCK}.draft"
        self._descriptor = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # a file system without locks: the folder is left to its owner
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self.path / _LOCK)  # from now on it is held: nobody sees it before
        sweep(self.path.parent)

    def remove(self) -> None:
        if os.getpid() == self._owner:  # not in a forked child
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):
                os.close(self._descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def sweep(parent: Path) -> None:
    """Remove the folders of the dead."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not (folder / _LOCK).exists():
                if time.time() - folder.stat().st_mtime > _SOON_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def keep_sockets_in(folder: Path) -> None:
    """Let loader workers, which hand over tensors through sockets, make them there: their own
    folders would stay behind when they are killed."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(os.fsencode(folder)) <= _LONGEST:
        config["tempdir"] = str(folder)


def join(error_file: str | None) -> None:
    """A rank shares the folder of its launcher, in which its error file lies; another launcher's
    is none of ours."""
    parents = Path(error_file).parents if error_file else ()
    for path in parents:
        if path.name.startswith(PREFIX):
            keep_sockets_in(path)


def for_one_process() -> None:
    """A process without a launcher keeps its workers' sockets in a folder of its own."""
    if multiprocessing.current_process()._config.get("tempdir") is None:  # type: ignore[attr-defined]
        scratch = Scratch()
        atexit.register(scratch.remove)
        keep_sockets_in(scratch.path)
