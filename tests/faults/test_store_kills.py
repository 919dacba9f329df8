"""A save that is killed at any instant leaves an intact checkpoint, and nothing for long."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.kit import Forked
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training.checkpoint.integrity import damage, digest, manifest_text, read_manifest
from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.errors import CheckpointError

CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink"}


def snapshot(step: int) -> Snapshot:
    tensors = {"w": torch.full((64,), float(step))}
    facts = {"score": {"metric": "loss", "value": 1.0 / step, "smaller_is_better": True}}
    state = {"step": step, "random": torch.arange(9)}
    return Snapshot(step, 0, tensors, {}, {"m": torch.zeros(64)}, state, facts)


def save(folder: Path, step: int, attempt: int = 0) -> None:
    store = CheckpointStore(folder, keep_last=1, attempt=attempt)
    store.keep(store.save(snapshot(step)), best=True)


def first(folder: Path) -> int:
    return 0


def next_one(folder: Path) -> int:
    save(folder, 1)
    return 1


def same_again(folder: Path) -> int:
    save(folder, 2)
    return 2


SITUATIONS: dict[str, Callable[[Path], int]] = {
    "the very first save": first,
    "a save that drops an older one": next_one,
    "a step that is saved again": same_again,
}


def kill_at(instant: int, folder: Path) -> None:
    """Let this process be killed before its `instant`-th change of the disk; when it writes, in
    the midst of that."""
    left = instant

    def now() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        ours = event != "open" or str(folder) in str(args[0])  # else a module may be loaded
        if event in CHANGES and ours and now():
            die()

    write, flush = os.write, os.fsync

    def half(descriptor: int, data: Any) -> int:
        if now():
            write(descriptor, data[: len(data) // 2])
            die()
        return write(descriptor, data)

    def before(descriptor: int) -> None:
        if now():
            die()
        flush(descriptor)

    os.write, os.fsync = half, before
    sys.addaudithook(audit)


def check(folder: Path, before: int) -> str | None:
    """What is wrong with the store after a kill, if anything is."""
    store = CheckpointStore(folder, keep_last=1)
    store.recover()
    path, damaged = store.newest_intact()
    if damaged:
        return f"{damaged}"
    if path is None:
        return "nothing intact" if before else None
    if path.name not in (f"step-{max(before, 1):08d}", "step-00000002"):
        return f"newest is {path.name}"
    best = folder / "best"
    if best.exists() and damage(best) is not None:
        return f"best is damaged: {damage(best)}"
    save(folder, 3)
    names = sorted(entry.name for entry in folder.iterdir())
    return None if names == ["best", "step-00000003"] else f"left: {names}"


def every_instant(folder: str, situation: str) -> None:
    """Fork a process for each instant until one saves to the end; write down what went wrong."""
    problems, instant, killed = [], 0, True
    while killed:
        instant += 1
        where = Path(folder) / f"at-{instant}"
        where.mkdir()
        before = SITUATIONS[situation](where)
        child = os.fork()
        if child == 0:
            kill_at(instant, where)
            save(where, 2, attempt=1)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        problem = check(where, before)
        if problem is not None:
            problems.append(f"instant {instant}: {problem}")
    Path("found.json").write_text(json.dumps([instant - 1, problems]))


@pytest.mark.parametrize("situation", list(SITUATIONS))
def test_no_instant_of_a_save_is_dangerous(tmp_path: Path, situation: str) -> None:
    run = Forked(every_instant, str(tmp_path / "store"), situation, cwd=tmp_path)
    (tmp_path / "store").mkdir(exist_ok=True)
    assert run.end_of_run() == 0, run
    instants, problems = json.loads((tmp_path / "found.json").read_text())
    print(f"{situation}: killed at {instants} instants")
    assert instants > 20
    assert problems == []


class Hostile:
    """Runs code in whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint_runs_no_code(tmp_path: Path, file: str) -> None:
    """With hashes that fit: whoever can change the files can change the manifest."""

    def train(resume: str | None) -> None:
        settings = {"training_mode": "single", "batch_size": 4, "enable_fault_tolerance": True}
        manager = manager_for(tmp_path, run_name="it", recipe="custom", resume=resume, **settings)
        manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)

    train(None)
    path = tmp_path / "custom/it/checkpoints/step-00000004"
    mark = tmp_path / "code-was-run"
    (path / file).write_bytes(pickle.dumps(Hostile(mark)))
    manifest = read_manifest(path)
    raw = (path / file).read_bytes()
    manifest["files"][file] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest["sha256"] = digest(manifest)
    (path / "manifest.json").write_text(manifest_text(manifest))
    assert damage(path) is None
    with pytest.raises(CheckpointError, match=file):
        train(str(path))
    assert not mark.exists()
