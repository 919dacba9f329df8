"""The checkpoint store: written so that a crash at any instant leaves an intact one behind.

    checkpoints/
      step-00000100/
        model.safetensors      plain names, loadable anywhere
        optimizer.safetensors
        state.safetensors
        state.json
        manifest.json          sizes and hashes of the others, and of itself; written last
      best -> step-00000100
      lineage.json             which attempts went on from which step

A checkpoint is staged in a temporary folder, flushed to the disk, and renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.reliability.codec import pack, unpack

FORMAT = 1
_STAGED = ".staged-"
_OLD = ".old-"


@dataclass
class Snapshot:
    """The whole state of a run at one step, on the host."""

    step: int
    epoch: int
    model: dict[str, Tensor]
    aliases: dict[str, str]
    optimizer: Any
    state: Any
    facts: dict[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """The checkpoints of one run. Only rank 0 writes."""

    def __init__(self, folder: Path, keep_last: int = 3, attempt: int = 0) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.attempt = attempt

    # Writing

    def save(self, snapshot: Snapshot) -> Path:
        """Write `snapshot`; when this returns it is safe on the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{snapshot.step:08d}"
        staged = self.folder / f"{_STAGED}{final.name}-{os.getpid()}"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        try:
            self._write_files(staged, snapshot)
            self._move_into_place(staged, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"could not save step {snapshot.step} in {self.folder}: {reason}; "
                "earlier checkpoints are untouched. Free some space or choose another --save-dir"
            ) from error
        return final

    def _write_files(self, staged: Path, snapshot: Snapshot) -> None:
        optimizer: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        plain = {
            "optimizer": pack(snapshot.optimizer, optimizer),
            "state": pack(snapshot.state, state),
        }
        _save_tensors(staged / "model.safetensors", snapshot.model)
        _save_tensors(staged / "optimizer.safetensors", optimizer)
        _save_tensors(staged / "state.safetensors", state)
        _write_text(staged / "state.json", json.dumps(plain))
        manifest = {
            "format": FORMAT,
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "attempt": self.attempt,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "aliases": snapshot.aliases,
            **snapshot.facts,
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": _hash(path)}
                for path in sorted(staged.iterdir())
            },
        }
        manifest["sha256"] = _digest(manifest)
        _write_text(staged / "manifest.json", json.dumps(manifest, indent=1))
        _sync_folder(staged)

    def _move_into_place(self, staged: Path, final: Path) -> None:
        if final.exists():
            # The same step again, after going back to an earlier one: a folder cannot be
            # renamed onto one that is not empty.
            old = self.folder / f"{_OLD}{final.name}-{os.getpid()}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            staged.rename(final)
            _sync_folder(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            staged.rename(final)
            _sync_folder(self.folder)

    def mark_best(self, path: Path) -> None:
        """Let `best` name this checkpoint."""
        link = self.folder / f".best-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(self.folder / "best")
        _sync_folder(self.folder)

    def prune(self) -> None:
        """Drop old checkpoints, and leftovers of crashed saves. Keeps `best`."""
        steps = [path for path in self._folders() if self._on_timeline(path)]
        kept = set(steps[: self.keep_last])
        best = self.folder / "best"
        if best.exists():
            kept.add(best.resolve())
        for path in self._folders():
            if path not in kept and path.resolve() not in kept:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".*-step-*"):
            if not path.name.endswith(f"-{os.getpid()}"):
                shutil.rmtree(path, ignore_errors=True)

    def branch(self, from_step: int) -> None:
        """Go on from `from_step`: what earlier attempts saved after it is no longer ours."""
        lineage = self._lineage()
        self.attempt = 1 + max((entry["attempt"] for entry in lineage), default=0)
        lineage.append({"attempt": self.attempt, "from_step": from_step})
        self.folder.mkdir(parents=True, exist_ok=True)
        staged = self.folder / f".lineage-{os.getpid()}"
        _write_text(staged, json.dumps(lineage))
        staged.replace(self.folder / "lineage.json")
        _sync_folder(self.folder)

    # Reading

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose every byte is as written, and why newer ones are not."""
        damaged: list[str] = []
        for path in self._folders():
            if not self._on_timeline(path):
                continue
            problem = damage(path)
            if problem is None:
                return path, damaged
            damaged.append(f"{path.name} is damaged: {problem}")
        return None, damaged

    def _folders(self) -> list[Path]:
        """Finished checkpoints, newest first."""
        return sorted(self.folder.glob("step-*"), reverse=True)

    def recover(self) -> None:
        """Finish or undo what a crash interrupted."""
        for old in self.folder.glob(f"{_OLD}step-*"):
            final = self.folder / old.name.removeprefix(_OLD).rsplit("-", 1)[0]
            if not final.exists():
                old.rename(final)

    def _lineage(self) -> list[dict[str, int]]:
        try:
            found: list[dict[str, int]] = json.loads((self.folder / "lineage.json").read_text())
            return found
        except (OSError, ValueError):
            return []

    def _on_timeline(self, path: Path) -> bool:
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            attempt, step = int(manifest.get("attempt", 0)), int(manifest["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return True  # damaged: reported as such by whoever reads it
        return all(
            step <= entry["from_step"] for entry in self._lineage() if entry["attempt"] > attempt
        )


def load(path: Path) -> Snapshot:
    """Read a checkpoint, after checking every byte of it."""
    problem = damage(path)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}; resume from another checkpoint")
    manifest = json.loads((path / "manifest.json").read_text())
    plain = json.loads((path / "state.json").read_text())
    return Snapshot(
        step=manifest["step"],
        epoch=manifest["epoch"],
        model=load_file(path / "model.safetensors"),
        aliases=manifest["aliases"],
        optimizer=unpack(plain["optimizer"], load_file(path / "optimizer.safetensors")),
        state=unpack(plain["state"], load_file(path / "state.safetensors")),
        facts=manifest,
    )


def read_facts(path: Path) -> dict[str, Any]:
    """What a checkpoint says about itself, without loading it."""
    facts: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return facts


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as written."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        recorded = manifest.pop("sha256")
        if recorded != _digest(manifest):
            return "manifest.json was changed"
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']} is not known to this version"
        for name, facts in manifest["files"].items():
            file = path / name
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            if _hash(file) != facts["sha256"]:
                return f"{name} was changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return f"unreadable ({error})"
    return None


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_folder = _sync


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
