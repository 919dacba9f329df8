"""Files that are on the disk when the call returns, and names for what is being staged."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from multi_gpu_training.checkpoint.integrity import (
    CHUNK_BYTES,
    Bytes,
    FileHash,
    HashThreads,
    chunks,
)
from multi_gpu_training.portability import drop_from_page_cache

# Called with the path of each checkpoint file that was opened and is about to be filled, in the
# thread that writes it. Empty in production: fault injection and tests add themselves here.
observers: list[Callable[[Path], None]] = []

_counter = itertools.count()
_process = ""


def _name_process() -> None:
    """Name this process. Its number will not do: in a container every run may have the same."""
    global _process
    _process = secrets.token_hex(8)


_name_process()
os.register_at_fork(after_in_child=_name_process)


def own_name() -> str:
    """Return a name for something staged that nobody else uses, not even an earlier run."""
    return f"{next(_counter)}-{_process}"


def is_own(name: str) -> bool:
    """Whether a file's name ends in an `own_name` of this process."""
    return name.endswith(f"-{_process}")


def write_text(path: Path, text: str) -> None:
    """Write a small new file and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_pieces(
    path: Path, pieces: Sequence[Bytes], threads: HashThreads, chunk_bytes: int = CHUNK_BYTES
) -> tuple[int, FileHash]:
    """Write a new file, hashing it on the way; return it open, still to be flushed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    found, start = FileHash(threads, chunk_bytes), 0
    try:
        if observers:
            for observe in list(observers):
                observe(path)
        for chunk in chunks(pieces, chunk_bytes):
            size = sum(map(len, chunk))
            found.add(size, lambda chunk=chunk: chunk)  # type: ignore[misc]
            for part in chunk:
                while len(part):
                    part = part[os.write(descriptor, part) :]
            drop_from_page_cache(descriptor, start, size)
            start += size
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found
