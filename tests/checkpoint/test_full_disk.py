"""A disk that is full, over its quota or read-only: training continues, nothing saved is lost."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import CONTEXT
from tiny import manager_for, points, squares
from torch import nn

from multi_gpu_training import Callback, MultiGPUTrainingManager
from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.monitoring.events import EventFile
from multi_gpu_training.monitoring.loggers.tensorboard_logger import TensorBoardLogger

LEVELS = 10
KIB = 1024


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A real file system of its own."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount a small file system here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def state(step: int, floats: int = 50_000) -> Snapshot:
    """About 600 KB in three files."""
    return Snapshot(
        step=step,
        epoch=0,
        model={"weight": torch.full((floats,), float(step))},
        aliases={},
        optimizer={"exp_avg": torch.ones(floats), "exp_avg_sq": torch.ones(floats // 2)},
        state={"ema": torch.ones(floats // 2), "text": "x" * 1000},
    )


def test_at_ten_fill_levels_no_intact_checkpoint_is_lost(tmp_path: Path) -> None:
    """The disk runs full in another place of the save each time: in its manifest, its last file,
    its first. The last level leaves room for nothing at all."""
    with small_disk(tmp_path / "disk", 3000) as disk:
        failures = 0
        for level in range(LEVELS):
            store = CheckpointStore(disk / f"run-{level}", keep_last=1)
            older = store.save(state(1))
            pages = sum(-(-file.stat().st_size // 4096) for file in older.iterdir())
            stat = os.statvfs(disk)
            # One page too few, two, and then less and less.
            missing = level + 1 if level < 2 else pages * (level - 1) // (LEVELS - 2)
            room = 4096 * (pages - missing)
            filler = disk / "filler"
            with filler.open("wb") as file:
                file.write(b"x" * (stat.f_bavail * stat.f_bsize - room))
            with pytest.raises(CheckpointError) as told:
                store.save(state(2))
            failures += 1
            assert "could not save step 2" in str(told.value)
            assert "No space left on device" in str(told.value)
            assert "earlier checkpoints are untouched" in str(told.value)
            assert store.newest_intact() == (older, [])
            assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
            filler.unlink()
            newer = store.save(state(2))  # space has returned
            assert store.newest_intact() == (newer, [])
            for path in [*newer.iterdir(), *older.iterdir()]:
                path.unlink()
        assert failures == LEVELS


def save_with_limit(folder: Path, limit: int) -> None:
    """In a process whose files may not grow beyond `limit` bytes, as under some quotas."""
    store = CheckpointStore(folder)
    older = store.save(state(1))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    with pytest.raises(CheckpointError, match=r"could not save step 2.*File too large"):
        store.save(state(2))
    assert store.newest_intact() == (older, [])
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    newer = store.save(state(3))
    assert store.newest_intact() == (newer, [])


@pytest.mark.parametrize("limit", [0, 100, 70_000, 150_000, 199_999])
def test_a_limit_on_files_loses_nothing(tmp_path: Path, limit: int) -> None:
    """Needs no root, unlike a disk of one's own."""
    process = CONTEXT.Process(target=save_with_limit, args=(tmp_path / "run", limit))
    process.start()
    process.join(60)
    assert process.exitcode == 0


class Fill(Callback):
    """Fills the disk after one step and empties it after another."""

    def __init__(self, disk: Path, full: int, free: int) -> None:
        self.filler, self.full, self.free = disk / "filler", full, free
        self.steps: list[int] = []
        self.saved: list[str] = []

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.steps.append(step)
        save = manager.fault_tolerance.current
        if save is not None:
            save.wait()  # so that it is known which saves meet a full disk
        if step == self.full:
            stat = os.statvfs(self.filler.parent)
            with self.filler.open("wb") as file:
                file.write(b"x" * stat.f_bavail * stat.f_bsize)
        if step == self.free:
            self.filler.unlink()

    def on_checkpoint(self, manager: MultiGPUTrainingManager, path: Path) -> None:
        self.saved.append(path.name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_training_outlives_a_full_disk_and_saves_again_when_there_is_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints, events and curves on the same disk; TensorBoard's thread dies of it aloud."""
    with small_disk(tmp_path / "disk", 2000) as disk:
        manager = manager_for(
            disk,
            run_name="run",
            training_mode="single",
            enable_fault_tolerance=True,
            batch_size=1,
            checkpoint_frequency=2,
            keep_last=2,
            log_every=1,
            tensorboard=True,
            progress="lines",
        )
        hook = Fill(disk, full=5, free=11)
        model = nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 1))
        manager.fit(model, points(), loss_fn=squares, callbacks=[hook])
        store = CheckpointStore(disk / "custom" / "run" / "checkpoints")
        assert hook.steps == list(range(1, 17))
        wanted = [f"step-{step:08d}" for step in (2, 4, 12, 14, 16)]
        assert hook.saved == [*wanted, wanted[-1]]  # the last step is the end of the epoch too
        assert store.newest_intact() == (store.path_of(16), [])
        shown = capsys.readouterr()
        for step in (6, 8, 10):
            assert shown.out.count(f"could not save step {step} ") == 1
        assert shown.err.count("an event could not be recorded: ") == 1
        events = [
            json.loads(text)
            for text in (disk / "custom/run/events/rank-0.jsonl").read_text().splitlines()
            if text.endswith("}") and text.startswith("{")
        ]
        assert any(e["event"] == "events_lost" and e["count"] > 3 for e in events)
        assert {e["step"] for e in events if e["event"] == "step"} >= {1, 2, 3, 12, 13, 14, 15, 16}


def test_a_nearly_full_disk_saves_again_after_killed_saves(tmp_path: Path) -> None:
    """Room for two checkpoints; killed saves have left three halves of one. A start clears them
    away, and so does a save that finds the disk full."""
    with small_disk(tmp_path / "disk", 400) as disk:
        settings = {"run_name": "it", "enable_fault_tolerance": True, "batch_size": 2}
        settings |= {"on_save_failure": "stop", "keep_last": 1, "progress": "off"}

        def fit(steps: int, **more: Any) -> None:
            given = {**settings, "max_steps": steps, **more}
            given.setdefault("training_mode", "single")
            manager = manager_for(disk, **given)
            manager.fit(nn.Linear(4, 1), points(), loss_fn=squares, callbacks=more_hooks)

        more_hooks: list[Callback] = []
        fit(2)
        checkpoints = disk / "custom" / "it" / "checkpoints"

        def leave(number: int) -> None:
            staged = checkpoints / f".staged-step-00000009-{number}-0123456789abcdef"
            staged.mkdir()
            stat = os.statvfs(disk)
            room = stat.f_bavail * stat.f_bsize // (2 if number < 2 else 1)
            (staged / "model.safetensors").write_bytes(b"x" * max(0, room - 4096))

        for number in range(3):
            leave(number)
        fit(4, resume="auto")
        assert not list(checkpoints.glob(".staged-*"))

        class Fill(Callback):
            def on_step_end(self, manager: Any, result: Any) -> None:
                leave(2)  # after the start: only the save itself can find it

        more_hooks.append(Fill())
        fit(5, resume="auto")
        assert not list(checkpoints.glob(".staged-*"))
        assert CheckpointStore(checkpoints).newest_intact()[0] == checkpoints / "step-00000005"
        more_hooks.clear()
        gc.collect()  # managers map the files that they resumed from


def test_a_read_only_disk_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2000) as disk:
        store = CheckpointStore(disk / "run")
        older = store.save(state(1))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match=r"could not save step 2.*Read-only file system"):
            store.save(state(2))
        assert store.newest_intact() == (older, [])
        store.branch(1)  # resuming goes on; what it has to note waits for the next save
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        newer = store.save(state(2))
        assert store.newest_intact() == (newer, [])
        assert json.loads((store.folder / "lineage.json").read_text())["entries"] == [
            {"attempt": 1, "from_step": 1}
        ]


def test_events_go_on_after_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full:
        """Writes half of a line, then nothing, then all again."""

        def __init__(self, file: Any) -> None:
            self.file, self.answers = file, ["half", "none", "none"]

        def write(self, raw: bytes) -> int:
            answer = self.answers.pop(0) if self.answers else "all"
            if answer == "none":
                raise OSError(28, "No space left on device")
            written: int = self.file.write(raw[: len(raw) // 2] if answer == "half" else raw)
            return written

        def close(self) -> None:
            self.file.close()

    path = tmp_path / "events.jsonl"
    events = EventFile(path, rank=0)
    events.write("before")
    events._file = Full(events._file)  # type: ignore[assignment]
    for number in range(4):
        events.write("step", number=number)
    events.close()
    good = []
    for text in path.read_text().splitlines():
        try:
            good.append(json.loads(text))
        except ValueError:
            continue
    assert [e["event"] for e in good] == ["before", "events_lost", "step"]
    assert good[1]["count"] == 3 and good[2]["number"] == 3
    assert capsys.readouterr().err.count("training continues") == 1


def test_curves_go_on_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = TensorBoardLogger(tmp_path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(curves._writer, "add_scalar", full)
    curves.log({"train/loss": 1.0}, 1)
    curves.log({"train/loss": 1.0}, 2)  # not tried again for a minute
    assert capsys.readouterr().err.count("curves cannot be written") == 1
    curves._retry_at = 0.0
    curves.log({"train/loss": 1.0}, 3)
    curves.close()
    assert len(list(tmp_path.glob("events.out.*"))) == 2
