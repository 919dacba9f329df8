"""The manifest of a checkpoint, and whether every byte is as it was written.

A file of up to one chunk is recorded by its plain SHA-256, a larger one by the SHA-256 of its
chunks' hashes, which several threads compute at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator

from multi_gpu_training.checkpoint.signature import ManifestSigner
from multi_gpu_training.portability import usable_cores
from multi_gpu_training.safe_files import (
    Count,
    Ranks,
    Sha256,
    Signed,
    UnreadableFile,
    digest,
    open_regular,
    parse_json,
    read_text,
)

# 2 records large files by the hash of their chunks' hashes; in 3 the state is split into shards
FORMATS = (1, 2, 3)
FORMAT, SHARDED = FORMATS[1:]
MANIFEST = "manifest.json"
DESCRIPTION = "model.json"  # beside those of FILES, where the run describes its model
MOST_DESCRIPTION = 2**27
FILES = ("model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json")
CHUNK_BYTES = 16 * 2**20
MOST_CHUNKS = 2**18  # of one file: 4 TiB
MOST_MANIFEST = 256 * 2**20  # it lists tensors that share memory, of which a model may have many
MOST_ATTEMPTS = 20_000  # a restart every two minutes for a month
Bytes = bytes | memoryview


# The manifest


class FileFacts(BaseModel):
    """What a manifest records about one file."""

    bytes: Count
    sha256: Sha256 | None = None
    sha256_of_chunks: Sha256 | None = None
    chunk_bytes: Annotated[int, Field(gt=0, le=2**30)] | None = None

    @model_validator(mode="after")
    def _one_hash(self) -> Self:
        if (self.sha256 is None) == (self.sha256_of_chunks is None):
            raise ValueError("a file has one hash")
        whole = self.sha256 is not None
        if not whole and self.bytes > (self.chunk_bytes or 0) * MOST_CHUNKS:
            raise ValueError("chunk_bytes does not fit the file")
        return self


class Score(BaseModel):
    metric: str
    value: float
    smaller_is_better: bool


class Manifest(Signed):
    """What is believed of a manifest; further facts may stand beside these."""

    format: Count
    step: Count
    epoch: Count
    attempt: Count = 0
    files: dict[Annotated[str, Field(max_length=255)], FileFacts]
    aliases: dict[str, str]
    created: Annotated[str, Field(max_length=64)] | None = None
    world_size: Ranks | None = None
    shards: Ranks | None = None
    split: dict[str, dict[str, list[Count]]] | None = None
    global_batch_size: Annotated[int, Field(gt=0, le=2**53)] | None = None
    metrics: dict[str, float] | None = None
    score: Score | None = None
    options: dict[str, Any] | None = None
    history: (
        Annotated[
            list[Annotated[list[Count], Field(min_length=2, max_length=2)]],
            Field(max_length=MOST_ATTEMPTS),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        strange = [name for name in self.files if not is_plain_name(name)]
        if strange:
            raise ValueError(f"{strange[0]!r:.80} is not the name of a file in a checkpoint")
        missing = [name for name in FILES if name not in self.files]
        if missing:
            raise ValueError(f"it lists no {missing[0]}")
        return self


def is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder: no slashes, no dot in front, nothing unprintable."""
    return name.isprintable() and not {"/", "\\"} & {*name} and name[:1] not in ("", ".")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself, without loading it.

    Raises an OSError or a ValueError that names the manifest if it is not as it was written.
    """
    text = read_text(path / MANIFEST, MOST_MANIFEST)
    facts = parse_json(text, dict[str, Any], MANIFEST)
    if facts.get("format") not in FORMATS and isinstance(facts.get("format"), int):
        raise UnreadableFile(
            f"{MANIFEST} has format {facts['format']}, which is not known to this version"
        )
    try:
        if facts.get("sha256") != digest(facts):
            raise UnreadableFile(f"{MANIFEST} was changed")
    except RecursionError:
        raise UnreadableFile(f"{MANIFEST} is nested too deeply") from None
    parse_json(text, Manifest, MANIFEST)
    # A change between the values, such as a space, leaves the digest as it was.
    if facts["format"] >= 2 and text != manifest_text(facts):
        raise UnreadableFile(f"{MANIFEST} was changed")
    return facts


# Checkpoints whose manifest was found as it was written, and which file that was.
_trusted: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}
_MOST_TRUSTED = 256


def trusted_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest if it is as it was written, else nothing.

    Every save lists all checkpoints several times, beside training: a file that did not change
    since the last look is not read and hashed again.
    """
    try:
        found = (path / MANIFEST).lstat()
        file = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        known = _trusted.get(path)
        if known is None or known[0] != file:
            if len(_trusted) >= _MOST_TRUSTED:
                _trusted.clear()
            known = _trusted[path] = file, read_manifest(path)
        return dict(known[1])
    except (OSError, ValueError):
        return {}


def manifest_text(manifest: dict[str, Any]) -> str:
    """Format a manifest as it stands in its file."""
    return json.dumps(manifest, indent=1)


# Hashing

_SMALL = 2**18  # bytes: starting a thread takes longer than hashing these


class HashThreads:
    """Threads that hash chunks while the caller writes them. Use it as a context manager."""

    def __init__(self) -> None:
        # Half of this process's cores, four at most: training needs the others. And one, because
        # the caller waits for the disk or for these threads most of the time.
        spare = max(1, min(4, len(usable_cores()) // 2))
        self._pool = ThreadPoolExecutor(spare + 1, thread_name_prefix="checkpoint-hash")

    def __enter__(self) -> HashThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, read: Callable[[], Sequence[Bytes]], size: int) -> Future[bytes]:
        """Hash what `read` returns, about `size` bytes."""
        if size > _SMALL:
            with contextlib.suppress(RuntimeError):  # at the interpreter's end none is started
                return self._pool.submit(_sha256, read)
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
        self._digests.append(self.threads.submit(read, size))

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


def _has_hash(descriptor: int, facts: dict[str, Any]) -> bool:
    """Whether an open file of the right size has the recorded hash."""
    if "sha256" in facts:  # format 1 recorded every file this way, whatever its size
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == str(facts["sha256"])
    size = facts["chunk_bytes"]
    with HashThreads() as threads:
        found = FileHash(threads, size)
        for at in range(0, facts["bytes"], size):
            found.add(size, lambda at=at: [os.pread(descriptor, size, at)])  # type: ignore[misc]
        whole = found.facts().get("sha256_of_chunks")
    return bool(whole == facts["sha256_of_chunks"])


# Verifying


def damage(path: Path, on_hash: Callable[[Path], None] | None = None) -> str | None:
    """Return what is wrong with a checkpoint, or None if every byte is as written.

    `on_hash` is called with each file before it is read and hashed.
    """
    try:
        if not path.is_dir():
            return "it is not a folder"
        manifest = read_manifest(path)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        text = _reason(error)
        return text if text.startswith(MANIFEST) else f"{MANIFEST} cannot be read: {text}"
    named = re.fullmatch("step-([0-9]{1,16})", path.name)
    if named and path.is_symlink():
        return "it is a symbolic link, not a folder"
    if named and int(named[1]) != manifest["step"]:
        # An old checkpoint under a newer one's name would win over all others.
        return f"it is the checkpoint of step {manifest['step']}, under another name"
    for name, facts in manifest["files"].items():
        try:
            problem = _file_damage(path / name, facts, on_hash)
        except FileNotFoundError:
            problem = "is missing"
        except OSError as error:
            problem = f"cannot be read: {_reason(error)}"
        if problem is not None:
            return f"{name} {problem}"
    return None


def _file_damage(
    file: Path, facts: dict[str, Any], on_hash: Callable[[Path], None] | None
) -> str | None:
    descriptor = open_regular(file)
    try:
        size = os.fstat(descriptor).st_size
        if size != facts["bytes"]:  # cheaper to find than a wrong hash
            return f"has {size} bytes instead of {facts['bytes']}"
        if on_hash is not None:
            on_hash(file)
        return None if _has_hash(descriptor, facts) else "was changed"
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def fingerprint(path: Path) -> str:
    """Identify the files of a checkpoint by their inodes, sizes and times, without reading them.

    The time of the last change is the kernel's own and cannot be set back.
    """
    try:
        stats = [(file.name, file.lstat()) for file in sorted(path.iterdir())]
    except OSError as error:
        return str(error)
    seen = [(n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


class Verifier:
    """Checks each checkpoint once, as long as nobody touches its files.

    With a `signer` those that it did not sign count as damaged. `hashed` counts how often this
    process has hashed each file to verify it.
    """

    def __init__(self, signer: ManifestSigner | None = None) -> None:
        self.hashed: Counter[Path] = Counter()
        self._signer = signer
        self._known: dict[Path, tuple[str, str | None]] = {}

    def damage(self, path: Path) -> str | None:
        """Return what `damage` found, reading the files only if they were touched since."""
        seen = fingerprint(path)
        known = self._known.get(path)
        if known is None or known[0] != seen:
            known = self._known[path] = (seen, self._look(path))
        return known[1]

    def _look(self, path: Path) -> str | None:
        found = damage(path, self._count)
        if found is None and self._signer is not None:
            return self._signer.problem(read_manifest(path))
        return found

    def trust(self, path: Path) -> None:
        """Take a checkpoint as intact: it was just written, and hashed on the way."""
        self._known[path] = (fingerprint(path), None)

    def forget(self, path: Path) -> None:
        """Forget a checkpoint that is about to change or go."""
        self._known.pop(path, None)

    def _count(self, file: Path) -> None:
        self.hashed[file] += 1
