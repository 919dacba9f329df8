"""The manifest of a checkpoint, and whether every byte is as it was written.

A file of up to one chunk is recorded by its plain SHA-256, a larger one by the SHA-256 of its
chunks' hashes, which several threads compute at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

FORMATS = (1, 2)  # 2 records large files by the hash of their chunks' hashes
FORMAT = FORMATS[-1]
MANIFEST = "manifest.json"
CHUNK_BYTES = 16 * 2**20
Bytes = bytes | memoryview


# The manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself, without loading it."""
    facts: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return facts


def trusted_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest if it is as it was written, else nothing."""
    try:
        facts = read_manifest(path)
        return facts if facts["sha256"] == digest(facts) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def manifest_text(manifest: dict[str, Any]) -> str:
    """Format a manifest as it stands in its file."""
    return json.dumps(manifest, indent=1)


def digest(manifest: dict[str, Any]) -> str:
    """Hash a manifest, without the hash that it carries itself."""
    text = json.dumps({k: v for k, v in manifest.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# Hashing


class HashThreads:
    """Threads that hash chunks while the caller writes them. Use it as a context manager."""

    def __init__(self) -> None:
        # Half of this process's cores, four at most: training needs the others. And one, because
        # the caller waits for the disk or for these threads most of the time.
        spare = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
        self._pool = ThreadPoolExecutor(spare + 1, thread_name_prefix="checkpoint-hash")

    def __enter__(self) -> HashThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, read: Callable[[], Sequence[Bytes]]) -> Future[bytes]:
        """Hash what `read` returns."""
        try:
            return self._pool.submit(_sha256, read)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            done: Future[bytes] = Future()
            done.set_result(_sha256(read))
            return done


class FileHash:
    """The hash of one file that is written or read chunk by chunk."""

    def __init__(self, threads: HashThreads, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.threads = threads
        self.chunk_bytes = chunk_bytes
        self.bytes = 0
        self._digests: list[Future[bytes]] = []

    def add(self, size: int, read: Callable[[], Sequence[Bytes]]) -> None:
        """Add the next chunk; all but the last must have `chunk_bytes`."""
        self.bytes += size
        self._digests.append(self.threads.submit(read))

    def facts(self) -> dict[str, Any]:
        """Wait for the threads and return what a manifest records about the file."""
        digests = [future.result() for future in self._digests]
        if len(digests) <= 1:
            plain = digests[0] if digests else hashlib.sha256().digest()
            return {"bytes": self.bytes, "sha256": plain.hex()}
        whole = hashlib.sha256(b"".join(digests)).hexdigest()
        return {"bytes": self.bytes, "sha256_of_chunks": whole, "chunk_bytes": self.chunk_bytes}


def chunks(pieces: Sequence[Bytes], size: int = CHUNK_BYTES) -> Iterator[list[memoryview]]:
    """Cut consecutive pieces into chunks of `size` bytes, without copying."""
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


def _sha256(read: Callable[[], Sequence[Bytes]]) -> bytes:
    found = hashlib.sha256()
    for piece in read():
        found.update(piece)
    return found.digest()


def _has_hash(path: Path, facts: dict[str, Any]) -> bool:
    """Whether a file of the right size has the recorded hash."""
    if "sha256" in facts:  # format 1 recorded every file this way, whatever its size
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == str(facts["sha256"])
    size = int(facts["chunk_bytes"])
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with HashThreads() as threads:
            found = FileHash(threads, size)
            for at in range(0, facts["bytes"], size):
                found.add(size, lambda at=at: [os.pread(descriptor, size, at)])  # type: ignore[misc]
            whole = found.facts().get("sha256_of_chunks")
    finally:
        os.close(descriptor)
    return whole == str(facts["sha256_of_chunks"])


# Verifying


def damage(path: Path, on_hash: Callable[[Path], None] | None = None) -> str | None:
    """Return what is wrong with a checkpoint, or None if every byte is as written.

    `on_hash` is called with each file before it is read and hashed.
    """
    try:
        manifest = read_manifest(path)
        if manifest["sha256"] != digest(manifest):
            return f"{MANIFEST} was changed"
        # A change between the values, such as a space, leaves the digest as it was.
        if manifest["format"] >= 2 and (path / MANIFEST).read_text() != manifest_text(manifest):
            return f"{MANIFEST} was changed"
        if manifest["format"] not in FORMATS:
            return f"format {manifest['format']} is not known to this version"
        for name, facts in manifest["files"].items():
            file = path / name
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            if on_hash is not None:
                on_hash(file)
            if not _has_hash(file, facts):
                return f"{name} was changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable ({error})"
    return None


def fingerprint(path: Path) -> str:
    """Identify the files of a checkpoint by their inodes, sizes and times, without reading them.

    The time of the last change is the kernel's own and cannot be set back.
    """
    try:
        stats = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    except OSError as error:
        return str(error)
    seen = [(n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


class Verifier:
    """Checks each checkpoint once, as long as nobody touches its files.

    `hashed` counts how often this process has hashed each file to verify it.
    """

    def __init__(self) -> None:
        self.hashed: Counter[Path] = Counter()
        self._known: dict[Path, tuple[str, str | None]] = {}

    def damage(self, path: Path) -> str | None:
        """Return what `damage` found, reading the files only if they were touched since."""
        seen = fingerprint(path)
        known = self._known.get(path)
        if known is None or known[0] != seen:
            known = self._known[path] = (seen, damage(path, self._count))
        return known[1]

    def trust(self, path: Path) -> None:
        """Take a checkpoint as intact: it was just written, and hashed on the way."""
        self._known[path] = (fingerprint(path), None)

    def forget(self, path: Path) -> None:
        """Forget a checkpoint that is about to change or go."""
        self._known.pop(path, None)

    def _count(self, file: Path) -> None:
        self.hashed[file] += 1
