"""The checkpoints of a run on one disk: a crash at any instant leaves an intact one behind.

    checkpoints/
      step-00000100/
        model.safetensors      plain names, loadable anywhere; of sharded runs see shards.py
        optimizer.safetensors
        state.safetensors
        state.json
        model.json             how the model is rebuilt and fed, where the run said it
        manifest.json          sizes and hashes of the others, and of itself; written last
      best -> step-00000100
      lineage.json             which attempt started from which step, and lineage.copy.json

A checkpoint is staged in a temporary folder, flushed to the disk, and renamed into place.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from multi_gpu_training.checkpoint import durable, integrity, retention
from multi_gpu_training.checkpoint.integrity import trusted_manifest
from multi_gpu_training.checkpoint.shards import stored_rows
from multi_gpu_training.checkpoint.signature import ManifestSigner
from multi_gpu_training.checkpoint.snapshot import Capture, HostBuffer, Snapshot, capture
from multi_gpu_training.distributed import round_lease
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.safe_files import read_json, signed
from multi_gpu_training.state_dicts import json_text, unpack

_STAGED = ".staged-"
_OLD = ".old-"
_BEST = ".best-"
# What reading a file of nonsense raises.
_NONSENSE = (
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    RuntimeError,
    OSError,
)
_MOST_STATE = 4 * 2**30  # state.json holds each rank's state, with what the user registered
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointStore:
    """The checkpoints of one run on one disk. One rank writes, one checkpoint at a time."""

    def __init__(
        self,
        folder: Path,
        keep_last: int = 3,
        attempt: int = 0,
        keep_best: int = 1,
        chunk_bytes: int = integrity.CHUNK_BYTES,
        signer: ManifestSigner | None = None,
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.attempt = attempt
        self.verifier = integrity.Verifier(signer)
        self._signer = signer
        self.lineage = retention.Lineage(folder)
        self._chunk_bytes = chunk_bytes
        self._new_best: Path | None = None  # until `best` names it
        # The newest one at or before this step stays, whatever `keep_last` says.
        self.protected_step: int | None = None

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # Writing

    def save(self, snapshot: Snapshot) -> Path:
        """Write `snapshot`; when this returns it is safe on the disk."""
        return self.write(capture(snapshot, HostBuffer()))

    def write(self, captured: Capture) -> Path:
        """Write what was captured; when this returns it is safe on the disk."""
        captured.copy.wait()
        try:
            try:
                return self._write(captured)
            except OSError as error:
                # What killed saves left may be all that fills the disk.
                # The other ranks of a sharded save have seen its folder go: no second try.
                if error.errno not in _FULL or captured.shard or not self.clear_leftovers():
                    raise
                return self._write(captured)
        except OSError as error:
            raise CheckpointError(
                f"could not save step {captured.step} in {self.folder}: "
                f"{error.strerror or error}; earlier checkpoints are untouched. Free some space "
                "or choose another --save-dir",
                code="MGT704",
            ) from error

    def write_shard(self, captured: Capture) -> None:
        """Write this rank's file of a checkpoint that another rank writes."""
        assert captured.shard is not None
        captured.copy.wait()
        captured.shard.write(captured.copy.files[captured.shard.name], self._chunk_bytes)

    def _write(self, captured: Capture) -> Path:
        final = self.path_of(captured.step)
        staged = self.staged_name(final) if captured.shard is None else captured.shard.staged
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lineage.write()
            staged.mkdir()
            self._write_files(staged, captured)
            self._move_into_place(staged, final)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return final

    def _write_files(self, staged: Path, captured: Capture) -> None:
        text = json_text(captured.plain).encode()
        contents: dict[str, Sequence[integrity.Bytes]] = {
            **captured.copy.files,
            "state.json": [text],
        }
        if captured.description:
            contents[integrity.DESCRIPTION] = [json_text(captured.description).encode()]
        opened: list[int] = []
        hashes: dict[str, integrity.FileHash] = {}
        try:
            with integrity.HashThreads() as threads:
                for name, pieces in contents.items():
                    descriptor, hashes[name] = durable.write_pieces(
                        staged / name, pieces, threads, self._chunk_bytes
                    )
                    opened.append(descriptor)
                # All files are written before the first is flushed: the disk works meanwhile.
                for descriptor in opened:
                    os.fsync(descriptor)
                files = {name: hashes[name].facts() for name in sorted(hashes)}
            if captured.shard is not None:
                files |= captured.shard.collect()
        finally:
            for descriptor in opened:
                os.close(descriptor)
        manifest = {**captured.manifest, "attempt": self.attempt, "files": files}
        manifest["history"] = [[e["attempt"], e["from_step"]] for e in self.lineage.entries()]
        if self._signer is not None:
            manifest = self._signer.signed(manifest)
        # Last: files without a manifest never pass for a checkpoint.
        durable.write_text(staged / integrity.MANIFEST, integrity.manifest_text(signed(manifest)))
        durable.flush(staged)

    def _move_into_place(self, staged: Path, final: Path) -> None:
        round_lease.wait()  # other nodes may continue the run without us, on this very disk
        self.verifier.forget(final)
        if final.exists():
            # The same step again, after going back to an earlier one: a folder cannot be
            # renamed onto one that is not empty.
            old = self.folder / f"{_OLD}{final.name}-{durable.own_name()}"
            final.rename(old)
            try:
                staged.rename(final)
            except OSError:
                old.rename(final)
                raise
            durable.flush(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            staged.rename(final)
            durable.flush(self.folder)
        self.verifier.trust(final)  # hashed while it was written

    def staging(self, final: Path) -> Path:
        """Make a folder in which a checkpoint can be put together."""
        self.folder.mkdir(parents=True, exist_ok=True)
        staged = self.staged_name(final)
        staged.mkdir()
        return staged

    def install(self, staged: Path, final: Path) -> str | None:
        """Take a checkpoint that came from elsewhere; return what is wrong with it, if anything."""
        problem = self.verifier.damage(staged)
        self.verifier.forget(staged)
        if problem is None and self.path_of(integrity.read_manifest(staged)["step"]) != final:
            problem = "it is of another step"
        if problem is not None:
            return f"{final.name} did not arrive intact: {problem}"
        self._move_into_place(staged, final)
        return None

    def staged_name(self, final: Path) -> Path:
        """A new name for the folder in which this process puts a checkpoint together."""
        return self.folder / f"{_STAGED}{final.name}-{durable.own_name()}"

    # Keeping

    def keep(self, path: Path, best: bool) -> None:
        """After `path` was saved: point `best` at it if it is, and drop what is not needed.

        It is also the best if a better one could not be saved.
        """
        if best or self._beats(path, self._named_best()):
            self._new_best = path
        if self._new_best is not None:
            self.mark_best(self._new_best)
            self._new_best = None
        self.prune()

    def _beats(self, path: Path, named: Path | None) -> bool:
        ours = trusted_manifest(path)
        theirs = trusted_manifest(named) if named is not None else {}
        mine, other = retention.score_of(ours), retention.score_of(theirs)
        if mine is None or other is None:
            return mine is not None and named is None
        return ours["score"]["metric"] == theirs["score"]["metric"] and mine > other

    def _named_best(self) -> Path | None:
        best = self.folder / "best"
        return self.folder / best.resolve().name if best.exists() else None

    def mark_best(self, path: Path) -> None:
        """Point `best` at this checkpoint."""
        link = self.folder / f"{_BEST}{durable.own_name()}"
        link.symlink_to(path.name)
        # A rename replaces the link in one step: `best` names something at any instant.
        link.replace(self.folder / "best")
        durable.flush(self.folder)

    def prune(self) -> None:
        """Drop checkpoints that retention does not keep, and leftovers of crashed saves."""
        # First: what an earlier save replaced must not come back once its successor is dropped.
        self.clear_leftovers()
        found = self._stored()
        last, keep_best, best = self.keep_last, self.keep_best, self._named_best()
        spared = self._protected(found)
        for path in retention.to_drop(found, self._is_intact, last, keep_best, best, spared):
            self._remove(path)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, but for those of an earlier attempt that this run
        does not continue. `best` names the best one that is left."""
        found = self._stored()
        best = self._named_best()
        left = [kept for kept in found if _step(kept.path) <= step or not kept.current]
        if best is not None and _step(best) > step:
            # First `best`: a crash in between must leave no name of something that is gone.
            better = (k.path for k in retention.best_first(left) if self._is_intact(k.path))
            new = next(better, None)
            if new is not None:
                self.mark_best(new)
            else:
                (self.folder / "best").unlink()
        self._new_best = None
        for kept in found:  # newest first
            if kept not in left:
                self._remove(kept.path)
        if len(left) < len(found):
            durable.flush(self.folder)

    def _stored(self) -> list[retention.StoredCheckpoint]:
        """All checkpoints, newest first."""
        entries = self.lineage.entries()
        found = []
        for path in self.folders():
            score = retention.score_of(trusted_manifest(path))
            current = self.on_timeline(path, entries)
            found.append(retention.StoredCheckpoint(path, current, score))
        return found

    def _protected(self, found: Sequence[retention.StoredCheckpoint]) -> Path | None:
        step = self.protected_step
        if step is None:
            return None
        known = (k.path for k in found if k.current and _step(k.path) <= step)
        return next((path for path in known if self._is_intact(path)), None)

    def _is_intact(self, path: Path) -> bool:
        return self.verifier.damage(path) is None

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        self.verifier.forget(path)

    def clear_leftovers(self) -> bool:
        """Remove what killed saves left; whether there was anything. Needs the run's lock."""
        self.recover()
        cleared = False
        for path in self.leftovers():
            if durable.is_own(path.name):  # another save of this very process
                continue
            cleared = True
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return cleared

    def branch(self, from_step: int) -> None:
        """Continue from `from_step`, and abandon what earlier attempts saved after it."""
        self.lineage.branch(from_step)
        self.attempt = self.lineage.attempt
        newer = any(_step(path) > from_step for path in self.folders())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lineage.write()
        except OSError as error:
            if newer:
                raise CheckpointError(
                    f"cannot go back to step {from_step}: {self.folder / 'lineage.json'} cannot "
                    f"be written ({error.strerror}); free some space first",
                    code="MGT704",
                ) from error
            # Nothing newer could be mistaken for ours: the next save writes it.

    # Finding

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """Return the newest checkpoint whose every byte is as written, and why newer ones fail."""
        damaged: list[str] = []
        self.lineage.entries()
        if self.lineage.problem is not None:
            damaged.append(self.lineage.problem)
        for path in self.folders():
            if not self.on_timeline(path):
                continue
            problem = self.verifier.damage(path)
            if problem is None:
                return path, damaged
            damaged.append(f"{path.name} is damaged: {problem}")
        return None, damaged

    def folders(self) -> list[Path]:
        """Return finished checkpoints, newest first."""
        return sorted(self.folder.glob("step-*"), key=_step, reverse=True)

    def leftovers(self) -> list[Path]:
        """Return what crashed saves have left; the next start or save clears it away."""
        patterns = (f"{_STAGED}*", f"{_OLD}*", f"{_BEST}*", f"{retention.STAGED_LINEAGE}*")
        return sorted(path for pattern in patterns for path in self.folder.glob(pattern))

    def recover(self) -> None:
        """Finish or undo what a crash interrupted."""
        for old in self.folder.glob(f"{_OLD}step-*"):
            name = re.match("step-[0-9]+", old.name.removeprefix(_OLD))
            if name is None or durable.is_own(old.name) or (self.folder / name[0]).exists():
                continue
            if integrity.damage(old) is None:
                old.rename(self.folder / name[0])

    def on_timeline(self, path: Path, entries: list[dict[str, int]] | None = None) -> bool:
        """Return False for a checkpoint that was abandoned when the run went back before it.

        entries: the history of the run, if it is known already.
        """
        manifest = trusted_manifest(path)
        if not manifest:
            return True  # damaged: reported as such by whoever reads it
        attempt, step = int(manifest.get("attempt", 0)), int(manifest["step"])
        return self.lineage.includes(attempt, step, entries)


def _step(path: Path) -> int:
    digits = path.name.removeprefix("step-")
    return int(digits) if re.fullmatch("[0-9]{1,16}", digits) else -1


# Reading


def load(path: Path) -> Snapshot:
    """Read a checkpoint after checking every byte of it. Split tensors come whole."""
    problem = integrity.damage(path)
    if problem is not None:
        raise CheckpointError(
            f"{path} is damaged: {problem}; resume from another checkpoint", code="MGT701"
        )
    return read_verified(path, in_parts=False)


def read_verified(path: Path, in_parts: bool = True) -> Snapshot:
    """Read a checkpoint that was verified, here or by another rank that sees the same files.

    Where a checkpoint has shards, tensors that are split over files come `in_parts`: as
    `StoredRows`, which read only what they are asked for.
    """
    manifest = _read(path, integrity.read_manifest)
    plain = _read(path / "state.json", lambda file: read_json(file, dict[str, Any], _MOST_STATE))
    model, optimizer, state = (
        _read(path / f"{name}.safetensors", load_file) for name in ("model", "optimizer", "state")
    )
    for kind, tensors in (("model", model), ("optimizer", optimizer)):
        parts = _read(path, partial(stored_rows, manifest=manifest, kind=kind))
        tensors |= parts if in_parts else {name: part.whole() for name, part in parts.items()}
    return Snapshot(
        step=manifest["step"],
        epoch=manifest["epoch"],
        model=model,
        aliases=manifest["aliases"],
        optimizer=_read(path / "state.json", lambda _: unpack(plain["optimizer"], optimizer)),
        state=_read(path / "state.json", lambda _: unpack(plain["state"], state)),
        facts=manifest,
    )


@dataclass(frozen=True)
class StoredModel:
    """The model of a checkpoint without the rest of the run, and what describes it.

    description: empty where the run said nothing, as up to version 0.1. config: of the run.
    """

    step: int
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    extra: dict[str, Any]
    description: dict[str, Any]
    config: dict[str, Any]
    facts: dict[str, Any]


def load_model(path: Path) -> StoredModel:
    """Read the model of a checkpoint after checking every byte of it. Split tensors come whole;
    the optimizer's are not read."""
    problem = integrity.damage(path)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}", code="MGT701")
    manifest = _read(path, integrity.read_manifest)
    plain = _read(path / "state.json", lambda file: read_json(file, dict[str, Any], _MOST_STATE))
    tensors, held = (_read(path / f"{name}.safetensors", load_file) for name in ("model", "state"))
    parts = _read(path, partial(stored_rows, manifest=manifest, kind="model"))
    tensors |= {name: part.whole() for name, part in parts.items()}
    extra, config = _read(path / "state.json", lambda _: _about_model(unpack(plain["state"], held)))
    check_aliases(path, manifest["aliases"], tensors)
    description = {}
    if integrity.DESCRIPTION in manifest["files"]:
        description = _read(
            path / integrity.DESCRIPTION,
            lambda file: read_json(file, dict[str, Any], integrity.MOST_DESCRIPTION),
        )
    return StoredModel(
        manifest["step"],
        tensors,
        manifest["aliases"],
        extra,
        description,
        config,
        manifest,
    )


def check_aliases(path: Path, aliases: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    """Raise where a tensor is said to share the weights of one that is not there."""
    lost = [name for name, owner in aliases.items() if owner not in tensors]
    if lost:
        raise CheckpointError(
            f"{path}: {lost[0]!r:.80} is said to share the weights of another tensor, which is not "
            "there; load another checkpoint",
            code="MGT701",
        )


def _about_model(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run's state says about its model, and the run's config."""
    return dict(state["extra"]), dict(state.get("config") or {})


def _read(file: Path, how: Callable[[Path], Any]) -> Any:
    """Read a file with `how`. Its hash is right, so any error is the doing of whoever wrote it."""
    try:
        return how(file)
    except _NONSENSE as error:
        raise CheckpointError(
            f"{file} does not hold what a checkpoint holds ({type(error).__name__}: "
            f"{error!s:.300}); resume from another checkpoint, and ask where this one comes from",
            code="MGT701",
        ) from error
