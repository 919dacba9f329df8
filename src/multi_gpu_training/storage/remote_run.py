"""A run in object storage: its checkpoints, which of them count, and which may go.

    checkpoints/step-00000100.1f3a9c0d2b7e/    named by step and hash; complete with its manifest
    checkpoints/lineage-00000003.json          which attempt started from which step, per writer
    checkpoints/best.json                      the name of the best one

A name belongs to one content. So nothing is ever overwritten: an upload that was cut off, or a
writer that lost the run and does not know it yet, cannot spoil a checkpoint that is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint import retention
from multi_gpu_training.checkpoint.durable import flush
from multi_gpu_training.checkpoint.integrity import (
    MANIFEST,
    MOST_MANIFEST,
    read_manifest,
    trusted_manifest,
)
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.safe_files import SMALL, parse_json, signed
from multi_gpu_training.storage.lease import Lease
from multi_gpu_training.storage.remote_folder import RemoteFolder

History = list[dict[str, int]]
_NAME = re.compile(r"step-([0-9]{8,16})\.([0-9a-f]{12})")
_LINEAGE = re.compile(r"checkpoints/lineage-([0-9]{8})\.json")
_BEST = "checkpoints/best.json"


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint there. `problem` says why it cannot be used; None if nothing is known."""

    name: str
    step: int
    sizes: dict[str, int]
    problem: str | None = None
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return MANIFEST in self.sizes

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def age(self) -> tuple[int, int, str, str]:
        """Sorts by age: a step that was saved again is newer than before."""
        facts = self.manifest
        return self.step, int(facts.get("attempt", 0)), str(facts.get("created", "")), self.name


class RemoteRun:
    """The run below a URL, seen anew with every call; manifests are read once."""

    def __init__(self, place: str | RemoteFolder) -> None:
        self.folder = RemoteFolder(place) if isinstance(place, str) else place
        self._manifests: dict[str, tuple[dict[str, Any], str | None]] = {}

    # What is there

    def checkpoints(self) -> list[RemoteCheckpoint]:
        """All checkpoints, complete or not, newest first."""
        files: dict[str, dict[str, int]] = {}
        for path, size in self.folder.files("checkpoints").items():
            _, name, file = (path.split("/", 2) + ["", ""])[:3]
            if _NAME.fullmatch(name) and file:
                files.setdefault(name, {})[file] = size
        found = [self._look(name, sizes) for name, sizes in files.items()]
        return sorted(found, key=lambda one: one.age, reverse=True)

    def _look(self, name: str, sizes: dict[str, int]) -> RemoteCheckpoint:
        step = int(name.partition(".")[0].removeprefix("step-"))
        if MANIFEST not in sizes:
            return RemoteCheckpoint(name, step, sizes, "its upload was not finished")
        if name not in self._manifests:
            self._manifests[name] = self._read_manifest(name, step)
        manifest, problem = self._manifests[name]
        for file, facts in manifest.get("files", {}).items():
            if problem is None and sizes.get(file) != facts["bytes"]:
                had = f"has {sizes[file]} bytes" if file in sizes else "is missing"
                problem = f"{file} {had} instead of {facts['bytes']}"
        return RemoteCheckpoint(name, step, sizes, problem, manifest)

    def _read_manifest(self, name: str, step: int) -> tuple[dict[str, Any], str | None]:
        try:
            raw = self.folder.read(f"checkpoints/{name}/{MANIFEST}", MOST_MANIFEST)
            with tempfile.TemporaryDirectory(prefix="mgt-manifest-") as folder:
                (Path(folder) / MANIFEST).write_bytes(raw)
                manifest = read_manifest(Path(folder))
        except (FileNotFoundError, ValueError) as error:
            return {}, str(error) or f"{MANIFEST} is missing"
        if manifest["step"] != step or manifest["sha256"][:12] != name.partition(".")[2]:
            return {}, f"its {MANIFEST} belongs to another checkpoint"
        return manifest, None

    def lineage(self) -> History:
        """Which attempt started from which step, as the last writer recorded it."""
        named = [_LINEAGE.fullmatch(name) for name in self.folder.files("checkpoints")]
        for name in sorted((found[0] for found in named if found), reverse=True):
            with tempfile.TemporaryDirectory(prefix="mgt-lineage-") as folder:
                with contextlib.suppress(FileNotFoundError):
                    raw = self.folder.read(name, SMALL)
                    (Path(folder) / retention.LINEAGE).write_bytes(raw)
                lineage = retention.Lineage(Path(folder))
                entries = lineage.entries()
                if lineage.problem is None:
                    return entries
        return retention.derived([one.manifest for one in self.checkpoints() if one.manifest])

    def best(self) -> str | None:
        """The name of the best checkpoint."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = parse_json(self.folder.read(_BEST, SMALL), dict[str, str], _BEST)
            name = found.get("name", "")
            return name if _NAME.fullmatch(name) else None
        return None

    # Coming and going

    def upload(self, path: Path, lease: Lease) -> int | None:
        """Copy a checkpoint of this disk there, its manifest last; return its bytes.

        None if it is no longer on the disk, or damaged. The files stay open, so that what
        retention deletes meanwhile arrives whole.
        """
        opened: list[int] = []
        try:
            opened.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            place = Path(f"/dev/fd/{opened[0]}")
            manifest, text = read_manifest(place), (place / MANIFEST).read_bytes()
            files = {}
            for file in manifest["files"]:
                opened.append(os.open(file, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=opened[0]))
                files[file] = opened[-1]
        except (OSError, ValueError):
            for descriptor in opened:
                os.close(descriptor)
            return None
        try:
            name = name_of(manifest)
            there = self.folder.files(f"checkpoints/{name}")
            for file, descriptor in files.items():
                # What is there whole was sent by an upload that was cut off after it.
                if there.get(f"checkpoints/{name}/{file}") != manifest["files"][file]["bytes"]:
                    self.folder.upload(f"/dev/fd/{descriptor}", f"checkpoints/{name}/{file}")
            lease.check()
            self.folder.write(f"checkpoints/{name}/{MANIFEST}", text)
            return len(text) + sum(int(facts["bytes"]) for facts in manifest["files"].values())
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def download(self, found: RemoteCheckpoint, store: CheckpointStore) -> str | None:
        """Bring a checkpoint into a store and check every byte; return what is wrong, if any."""
        if found.problem is not None:
            return f"{found.name} at {self.folder.url}: {found.problem}"
        final = store.path_of(found.step)
        staged = store.staging(final)
        problem: str | None
        try:
            for file in (*found.manifest["files"], MANIFEST):
                self.folder.download(f"checkpoints/{found.name}/{file}", staged / file)
                flush(staged / file)
            flush(staged)
            problem = store.install(staged, final)
        except FileNotFoundError as error:
            problem = f"{found.name} at {self.folder.url} is gone: {error}"
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if problem is not None:
            shutil.rmtree(staged, ignore_errors=True)
        return problem

    def record_lineage(self, entries: History, lease: Lease) -> None:
        """Record the run's history under this writer's number."""
        text = json.dumps(signed({"entries": entries}))
        self.folder.write(f"checkpoints/lineage-{lease.generation:08d}.json", text.encode())

    def mark_best(self, name: str) -> None:
        self.folder.write(_BEST, json.dumps({"name": name}).encode())

    def prune(self, entries: History, keep_last: int, keep_best: int) -> list[str]:
        """Drop what retention does not keep, and what killed uploads left; return the names.

        The newest complete checkpoint of the current timeline always stays.
        """
        every = self.checkpoints()
        complete = [one for one in every if one.complete]
        usable = {Path(one.name): one.problem is None for one in complete}
        best = self.best()
        stored, steps = [], set()
        for one in complete:
            current = not one.manifest or on_timeline(one.manifest, entries)
            # An earlier save of the same step, which on a disk would have been replaced.
            again = one.step in steps and one.name != best
            if current and one.problem is None:
                steps.add(one.step)
            stored.append(
                retention.StoredCheckpoint(
                    Path(one.name), current and not again, retention.score_of(one.manifest)
                )
            )
        named = Path(best) if best is not None else None
        dropped = {
            str(path)
            for path in retention.to_drop(stored, usable.__getitem__, keep_last, keep_best, named)
        }
        dropped |= {one.name for one in every if not one.complete}
        for one in every:
            if one.name in dropped:
                # The manifest first: what is half deleted must not look complete.
                files = sorted(one.sizes, key=lambda file: file != MANIFEST)
                self.folder.delete(f"checkpoints/{one.name}/{file}" for file in files)
        return sorted(dropped)


def name_of(manifest: dict[str, Any]) -> str:
    """The name of a checkpoint in object storage."""
    return f"step-{manifest['step']:08d}.{manifest['sha256'][:12]}"


def uploaded_name(path: Path) -> str | None:
    """The name that a checkpoint of this disk has there; None if its manifest is damaged."""
    manifest = trusted_manifest(path)
    return name_of(manifest) if manifest else None


def on_timeline(manifest: dict[str, Any], entries: Sequence[dict[str, int]]) -> bool:
    """Whether a checkpoint is part of the history `entries`, and was not abandoned by it."""
    told = manifest.get("history")
    if told is not None:
        history = [{"attempt": a, "from_step": s} for a, s in told]
        if list(entries[: len(history)]) != history:
            return False
    attempt = int(manifest.get("attempt", 0))
    return all(manifest["step"] <= e["from_step"] for e in entries if e["attempt"] > attempt)
