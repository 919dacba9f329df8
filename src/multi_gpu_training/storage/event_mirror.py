"""The events of a run in object storage, where others can watch them.

    events/2c26b46b68ffc68f    a piece of an event file, named by its hash
    events/index-0.json        which pieces make up which file; one index per writing rank

Object storage cannot append. A file is cut into pieces of 4 MiB that never change, and a last piece
that ends with a whole line and is replaced as it grows. The index is written last, so whoever reads
sees every file as it was at one moment, whatever was renamed or rotated meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from multi_gpu_training.checkpoint.integrity import is_plain_name
from multi_gpu_training.safe_files import SMALL, Count, open_regular, parse_json
from multi_gpu_training.storage.remote_folder import RemoteFolder

PIECE = 4 * 2**20
_INDEX = re.compile(r"events/index-[0-9]{1,7}\.json")
Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class EventIndex(BaseModel):
    """Event files by name, each with the hashes of its pieces and its size."""

    files: dict[str, list[Hash]] = {}
    bytes: dict[str, Count] = {}


class EventMirror:
    """Uploads the event files of one folder. One thread at a time."""

    def __init__(self, remote: RemoteFolder, folder: Path, writer: int) -> None:
        self._remote = remote
        self._folder = folder
        self._name = f"events/index-{writer}.json"
        # By inode and beginning: a file that is rotated gets another name and keeps its pieces,
        # and the inode of a deleted file is soon that of another.
        self._whole: dict[tuple[int, bytes], list[str]] = {}
        self._there: set[str] = set()
        self._ours: set[str] = set()
        self._sent: EventIndex | None = None

    def upload(self) -> None:
        """Bring the files there up to date."""
        if self._sent is None:
            self._there = {name.rpartition("/")[2] for name in self._remote.files("events")}
            with contextlib.suppress(FileNotFoundError, ValueError):
                before = parse_json(self._remote.read(self._name, SMALL), EventIndex, self._name)
                self._ours.update(piece for pieces in before.files.values() for piece in pieces)
        index = EventIndex()
        for path in sorted(self._folder.glob("*.jsonl")):
            with contextlib.suppress(OSError):  # renamed or merged just now: seen next time
                self._take(path, index)
        if index == self._sent:
            return
        self._remote.write(self._name, json.dumps(index.model_dump()).encode())
        self._sent = index
        needed = {piece for pieces in index.files.values() for piece in pieces}
        self._remote.delete(f"events/{piece}" for piece in sorted(self._ours - needed))
        self._there -= self._ours - needed
        self._ours &= needed

    def _take(self, path: Path, index: EventIndex) -> None:
        descriptor = open_regular(path)
        try:
            found = os.fstat(descriptor)
            key = found.st_ino, os.pread(descriptor, 4096, 0)
            pieces = self._whole.setdefault(key, []) if found.st_size >= PIECE else []
            while (len(pieces) + 1) * PIECE <= found.st_size:
                pieces.append(self._send(os.pread(descriptor, PIECE, len(pieces) * PIECE)))
            rest = os.pread(descriptor, found.st_size % PIECE, len(pieces) * PIECE)
        finally:
            os.close(descriptor)
        rest = rest[: rest.rfind(b"\n") + 1]
        if pieces or rest:
            index.files[path.name] = [*pieces, *([self._send(rest)] if rest else [])]
            index.bytes[path.name] = len(pieces) * PIECE + len(rest)

    def _send(self, piece: bytes) -> str:
        name = hashlib.sha256(piece).hexdigest()[:32]
        if name not in self._there:
            self._remote.write(f"events/{name}", piece)
            self._there.add(name)
            self._ours.add(name)
        return name


def fetch_events(remote: RemoteFolder, folder: Path, writer: int | None = None) -> None:
    """Write the event files of all writers, or of one, into `folder`."""
    for attempt in range(3):
        try:
            _fetch(remote, folder, writer)
            return
        except FileNotFoundError:  # a last piece was replaced after we had read the index
            if attempt == 2:
                raise


def _fetch(remote: RemoteFolder, folder: Path, writer: int | None) -> None:
    wanted: dict[str, tuple[int, list[str]]] = {}
    for name in remote.files("events"):
        if not _INDEX.fullmatch(name) or (writer is not None and f"-{writer}.json" not in name):
            continue
        index = parse_json(remote.read(name, SMALL), EventIndex, name)
        for file, pieces in index.files.items():
            size = index.bytes.get(file, 0)
            # Two writers know a file where ranks moved: the one who saw more of it counts.
            if is_plain_name(file) and size >= wanted.get(file, (0, []))[0]:
                wanted[file] = size, pieces
    folder.mkdir(parents=True, exist_ok=True)
    for file, (_, pieces) in wanted.items():
        draft = folder / f".{file}.fetched"
        with draft.open("wb") as out:
            for piece in pieces:
                data = remote.read(f"events/{piece}", PIECE)
                if hashlib.sha256(data).hexdigest()[:32] != piece:
                    raise ValueError(f"events/{piece} at {remote.url} was changed")
                out.write(data)
        draft.replace(folder / file)
