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

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.reliability.durable import is_own, own_name, sync, write_text
from multi_gpu_training.reliability.hashing import Bytes, FileHash, HashThreads
from multi_gpu_training.reliability.host_copy import HostBuffer
from multi_gpu_training.reliability.integrity import (
    MANIFEST,
    Verified,
    damage,
    digest,
    trusted_manifest,
    written,
)
from multi_gpu_training.reliability.lineage import STAGED_LINEAGE, Lineage
from multi_gpu_training.reliability.retention import Kept, score_of, to_drop
from multi_gpu_training.reliability.snapshot import Capture, Snapshot, capture
from multi_gpu_training.reliability.tensor_file import write_file

_STAGED = ".staged-"
_OLD = ".old-"
_BEST = ".best-"


class CheckpointStore:
    """The checkpoints of one run on one disk. One rank writes, one checkpoint at a time."""

    def __init__(
        self, folder: Path, keep_last: int = 3, attempt: int = 0, keep_best: int = 1
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.attempt = attempt
        self._verified = Verified()
        self.lineage = Lineage(folder)
        self._best: Path | None = None  # still to be named so

    # Writing

    def save(self, snapshot: Snapshot) -> Path:
        """Write `snapshot`; when this returns it is safe on the disk."""
        return self.write(capture(snapshot, HostBuffer()))

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def write(self, captured: Capture) -> Path:
        """Write what was captured; when this returns it is safe on the disk."""
        final = self.path_of(captured.step)
        staged = self.folder / f"{_STAGED}{final.name}-{own_name()}"
        try:
            captured.copy.wait()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lineage.write()
            staged.mkdir()
            self._write_files(staged, captured)
            self._move_into_place(staged, final)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise CheckpointError(
                f"could not save step {captured.step} in {self.folder}: "
                f"{error.strerror or error}; earlier checkpoints are untouched. Free some space "
                "or choose another --save-dir"
            ) from error
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        self._verified.written(final)
        return final

    def _write_files(self, staged: Path, captured: Capture) -> None:
        text = json.dumps(captured.plain).encode()
        contents: dict[str, Sequence[Bytes]] = {**captured.copy.files, "state.json": [text]}
        threads = HashThreads()
        opened: list[int] = []
        hashes: dict[str, FileHash] = {}
        try:
            for name, pieces in contents.items():
                descriptor, hashes[name] = write_file(staged / name, pieces, threads)
                opened.append(descriptor)
            for descriptor in opened:
                os.fsync(descriptor)
            threads.finish()
        finally:
            threads.abandon()
            for descriptor in opened:
                os.close(descriptor)
        manifest = {
            **captured.manifest,
            "attempt": self.attempt,
            "files": {name: hashes[name].facts() for name in sorted(hashes)},
        }
        manifest["sha256"] = digest(manifest)
        write_text(staged / MANIFEST, written(manifest))
        sync(staged)

    def _move_into_place(self, staged: Path, final: Path) -> None:
        self._verified.forget(final)
        if final.exists():
            # The same step again, after going back to an earlier one: a folder cannot be
            # renamed onto one that is not empty.
            old = self.folder / f"{_OLD}{final.name}-{own_name()}"
            final.rename(old)
            try:
                staged.rename(final)
            except OSError:
                old.rename(final)
                raise
            sync(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            staged.rename(final)
            sync(self.folder)

    def staging(self, final: Path) -> Path:
        """A folder in which a checkpoint can be put together."""
        self.folder.mkdir(parents=True, exist_ok=True)
        staged = self.folder / f"{_STAGED}{final.name}-{own_name()}"
        staged.mkdir()
        return staged

    def install(self, staged: Path, final: Path) -> str | None:
        """Take a checkpoint that came from elsewhere; what is wrong with it, if anything is."""
        problem = damage(staged)
        if problem is not None:
            return f"{final.name} did not arrive intact: {problem}"
        self._move_into_place(staged, final)
        self._verified.written(final)
        return None

    def keep(self, path: Path, best: bool) -> None:
        """After `path` was saved: let `best` name it if it is, and drop what need not be kept.

        It is best too where the one that was better could not be saved.
        """
        if best or self._beats(path, self._named_best()):
            self._best = path
        if self._best is not None:
            self.mark_best(self._best)
            self._best = None
        self.prune()

    def _beats(self, path: Path, named: Path | None) -> bool:
        ours = trusted_manifest(path)
        theirs = trusted_manifest(named) if named is not None else {}
        mine, other = score_of(ours), score_of(theirs)
        if mine is None or other is None:
            return mine is not None and named is None
        return ours["score"]["metric"] == theirs["score"]["metric"] and mine > other

    def _named_best(self) -> Path | None:
        best = self.folder / "best"
        return self.folder / best.resolve().name if best.exists() else None

    def mark_best(self, path: Path) -> None:
        """Let `best` name this checkpoint."""
        link = self.folder / f"{_BEST}{own_name()}"
        link.symlink_to(path.name)
        link.replace(self.folder / "best")
        sync(self.folder)

    def prune(self) -> None:
        """Drop checkpoints that retention does not keep, and leftovers of crashed saves."""
        found = [self._kept(path) for path in self.folders()]
        named = self._named_best()
        for path in to_drop(found, self._is_intact, self.keep_last, self.keep_best, named):
            shutil.rmtree(path, ignore_errors=True)
            self._verified.forget(path)
        for path in self.leftovers():
            if is_own(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def branch(self, from_step: int) -> None:
        """Go on from `from_step`: what earlier attempts saved after it is no longer ours."""
        self.lineage.branch(from_step)
        self.attempt = self.lineage.attempt
        newer = any(self._step(path) > from_step for path in self.folders())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lineage.write()
        except OSError as error:
            if newer:
                raise CheckpointError(
                    f"cannot go back to step {from_step}: {self.folder / 'lineage.json'} cannot "
                    f"be written ({error.strerror}); free some space first"
                ) from error
            # Nothing newer could be taken for ours: the next save writes it.

    # Reading

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose every byte is as written, and why newer ones are not."""
        damaged: list[str] = []
        for path in self.folders():
            if not self.on_timeline(path):
                continue
            problem = self._verified.damage(path)
            if problem is None:
                return path, damaged
            damaged.append(f"{path.name} is damaged: {problem}")
        return None, damaged

    def folders(self) -> list[Path]:
        """Finished checkpoints, newest first."""
        return sorted(self.folder.glob("step-*"), key=self._step, reverse=True)

    def leftovers(self) -> list[Path]:
        """What crashed saves have left; the next save clears it away."""
        patterns = (f"{_STAGED}*", f"{_OLD}*", f"{_BEST}*", f"{STAGED_LINEAGE}*")
        return sorted(path for pattern in patterns for path in self.folder.glob(pattern))

    def recover(self) -> None:
        """Finish or undo what a crash interrupted."""
        for old in self.folder.glob(f"{_OLD}step-*"):
            name = re.match(r"step-\d+", old.name.removeprefix(_OLD))
            if name and not (self.folder / name[0]).exists():
                old.rename(self.folder / name[0])

    def on_timeline(self, path: Path) -> bool:
        """False for a checkpoint that was abandoned when the run went back before it."""
        manifest = trusted_manifest(path)
        if not manifest:
            return True  # damaged: reported as such by whoever reads it
        return self.lineage.includes(int(manifest.get("attempt", 0)), int(manifest["step"]))

    def _kept(self, path: Path) -> Kept:
        return Kept(path, self.on_timeline(path), score_of(trusted_manifest(path)))

    def _is_intact(self, path: Path) -> bool:
        return self._verified.damage(path) is None

    @staticmethod
    def _step(path: Path) -> int:
        digits = path.name.removeprefix("step-")
        return int(digits) if digits.isdigit() else -1
