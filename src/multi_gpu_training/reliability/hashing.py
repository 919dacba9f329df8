"""SHA-256 of large files in threads: beside the writing, and again when they are read.

A file of up to one chunk is recorded by its plain SHA-256, a larger one by the SHA-256 of its
chunks' hashes, which several threads compute at once.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CHUNK_BYTES = 16 * 2**20
Bytes = bytes | memoryview


class HashThreads:
    """Hashes what is submitted while the caller goes on; `finish` helps, then waits.

    Where no thread can be started, as when the interpreter is shutting down, the caller hashes
    everything in `finish`.
    """

    def __init__(self, count: int | None = None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        for _ in range(count if count is not None else _spare_cores()):
            thread = threading.Thread(target=self._work, name="checkpoint-hash")
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    def submit(self, digests: list[bytes], place: int, read: Callable[[], Sequence[Bytes]]) -> None:
        """Put the SHA-256 of what `read` gives into `digests[place]`, some time before `finish`
        returns."""

        def job() -> None:
            digest = hashlib.sha256()
            for piece in read():
                digest.update(piece)
            digests[place] = digest.digest()

        self._jobs.put(job)

    def finish(self) -> None:
        self._drain(run=True)
        self._end()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop without the rest; harmless after `finish`."""
        self._drain(run=False)
        self._end()

    def _drain(self, run: bool) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if run and job is not None:
                job()

    def _end(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._error = error


class FileHash:
    """The hash of one file that is being written or read, chunk by chunk."""

    def __init__(self) -> None:
        self.bytes = 0
        self.digests: list[bytes] = []

    def add(self, threads: HashThreads, size: int, read: Callable[[], Sequence[Bytes]]) -> None:
        """The next chunk; all but the last must have CHUNK_BYTES."""
        self.bytes += size
        self.digests.append(b"")
        threads.submit(self.digests, len(self.digests) - 1, read)

    def facts(self) -> dict[str, Any]:
        """What a manifest records of the file. Only after the threads have finished."""
        if not self.digests:
            return {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
        if len(self.digests) == 1:
            return {"bytes": self.bytes, "sha256": self.digests[0].hex()}
        whole = hashlib.sha256(b"".join(self.digests)).hexdigest()
        return {"bytes": self.bytes, "sha256_of_chunks": whole, "chunk_bytes": CHUNK_BYTES}


def chunks(pieces: Sequence[Bytes], size: int = CHUNK_BYTES) -> Iterator[list[memoryview]]:
    """`pieces` one after the other, cut anew into lists of `size` bytes in all."""
    chunk: list[memoryview] = []
    free = size
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        while len(view):
            part, view = view[:free], view[free:]
            chunk.append(part)
            free -= len(part)
            if free == 0:
                yield chunk
                chunk, free = [], size
    if chunk:
        yield chunk


def matches(path: Path, facts: dict[str, Any]) -> bool:
    """Whether a file of the right size has the recorded hash."""
    if "sha256" in facts:  # as every file was recorded in format 1, whatever its size
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == str(facts["sha256"])
    size = int(facts["chunk_bytes"])
    found, threads = FileHash(), HashThreads()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for start in range(0, facts["bytes"], size):
            found.add(threads, size, lambda at=start: [os.pread(descriptor, size, at)])  # type: ignore[misc]
        threads.finish()
    finally:
        threads.abandon()
        os.close(descriptor)
    whole = hashlib.sha256(b"".join(found.digests)).hexdigest()
    return whole == str(facts["sha256_of_chunks"])


def _spare_cores() -> int:
    """Half of this process's cores, four at the most: training needs the others."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))
