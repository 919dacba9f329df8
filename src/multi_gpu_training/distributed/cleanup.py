"""Nothing outlives its owner: child processes die with their parent, temporary folders are swept.

A killed process cannot tidy up. So its temporary folder holds a kernel lock, which is released
with the process, and whoever makes the next folder removes those that nobody holds any more.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from multi_gpu_training.python_internals import process_settings

PREFIX = "mgt-launch-"
_LOCK = ".lock"
_SOON_S = 60.0  # a new folder has its lock by then
_LONGEST = 85  # a socket's path has 107 bytes, of which its own name takes about 20
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Be killed when the parent is. `parent` is its process id, as it may be dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_workers(all_children: bool = False) -> None:
    """Kill the daemon processes of this one.

    Loader workers ignore SIGTERM, and multiprocessing would wait for them forever at exit.
    """
    # torch's handler would report a killed worker as an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        if worker.daemon or all_children:
            worker.kill()


@functools.cache
def spare_forked_children() -> None:
    """Keep a forked process, such as a loader worker, from collecting its parent's garbage.

    An old process group would wait in its destructor for threads that exist in the parent only,
    and the worker would never deliver a batch.
    """
    os.register_at_fork(after_in_child=gc.freeze)


class Scratch:
    """A folder for this process and its children; `with` removes it at the end."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._owner = os.getpid()
        draft = self.path / f"{_LOCK}.draft"
        self._descriptor = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # a file system without locks: its owner must remove it
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self.path / _LOCK)  # nobody ever sees it unlocked
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
    """Remove the folders of dead processes."""
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
    """Have loader workers, which pass tensors through sockets, create the sockets in `folder`.

    Their own temporary folders would stay behind when they are killed.
    """
    config = process_settings()
    if config.get("tempdir") is None and len(os.fsencode(folder)) <= _LONGEST:
        config["tempdir"] = str(folder)


def share_scratch(error_file: str | None) -> None:
    """Use the launcher's folder in a rank, if the error file shows that the launcher is ours."""
    parents = Path(error_file).parents if error_file else ()
    for path in parents:
        if path.name.startswith(PREFIX):
            keep_sockets_in(path)


def for_one_process() -> None:
    """Give a process without a launcher its own folder for its workers' sockets."""
    if process_settings().get("tempdir") is None:
        scratch = Scratch()
        atexit.register(scratch.remove)
        keep_sockets_in(scratch.path)
