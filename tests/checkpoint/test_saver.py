"""Checkpoints are written beside training: what is on the disk, who waits, who is told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import quickly
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import flat, line, manager_for, points, sgd, squares
from torch import nn

from multi_gpu_training import Callback, MultiGPUTrainingManager
from multi_gpu_training.checkpoint import durable
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.errors import CheckpointError

FOUR_STEPS = {"batch_size": 4, "run_name": "run", "training_mode": "single"}
KEPT = {**FOUR_STEPS, "enable_fault_tolerance": True, "keep_last": 9}


class Watch(Callback):
    """Notes down what happens in which order; `at_step` may do something more."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.at_step = at_step
        self.weights: dict[int, torch.Tensor] = {}
        self.order: list[str] = []
        self.threads: set[str] = set()

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.order.append(f"step {step}")
        self.weights[step] = flat(manager.model).clone()
        self.at_step(step)

    def on_checkpoint(self, manager: MultiGPUTrainingManager, path: Path) -> None:
        assert (path / "manifest.json").exists()
        self.order.append(path.name)
        self.threads.add(threading.current_thread().name)

    def on_end(self, manager: MultiGPUTrainingManager) -> None:
        self.order.append("end")


def before_writing(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], None]) -> None:
    """Call `do(step)` in the thread that writes, before the first byte of a checkpoint."""

    def observe(path: Path) -> None:
        if path.name == "model.safetensors":
            do(int(path.parent.name.split("-")[2]))  # .staged-step-N-...

    monkeypatch.setattr(durable, "observers", [observe])


def no_space(step: int) -> None:
    raise CheckpointError(f"could not save step {step}: no space")


def failing_at(steps: Callable[[int], bool]) -> Callable[[int], None]:
    return lambda step: no_space(step) if steps(step) else None


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "custom" / "run" / "events" / "rank-0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def saved(folder: Path) -> list[int]:
    found = (folder / "custom" / "run" / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def fit(folder: Path, hook: Callback | None = None, **settings: Any) -> Any:
    manager = manager_for(folder, **{**KEPT, **settings})
    hooks = [] if hook is None else [hook]
    return manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, callbacks=hooks)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written is the state of its step, not that of the steps meanwhile."""
    go = threading.Event()
    before_writing(monkeypatch, lambda step: _wait(go))
    watch = Watch(at_step=lambda step: go.set() if step == 4 else None)
    fit(tmp_path, watch, checkpoint_frequency=2)
    assert watch.order.index("step 4") < watch.order.index("step-00000002")
    assert watch.order[-2:] == ["step-00000004", "end"]  # the end of the run waits for it
    assert watch.threads == {"MainThread"}
    for step in (2, 4):
        weights = load_file(
            tmp_path / "custom" / "run" / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        )
        ours = torch.cat([weights[name].flatten() for name in ("weight", "bias")])
        assert torch.equal(ours, watch.weights[step])


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_save_waits_for_the_one_before_and_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []

    def slow(step: int) -> None:
        running.append(step)
        assert len(running) == 1, "two at a time"
        time.sleep(1.0 if step == 3 else 0.0)
        running.remove(step)

    before_writing(monkeypatch, slow)
    fit(tmp_path, checkpoint_frequency=3)  # and step 4, the end of the epoch
    first, second = events(tmp_path, "checkpoint")
    assert (first["step"], second["step"]) == (3, 4)
    assert first["waited_s"] == 0 and 0.2 < second["waited_s"] <= first["write_s"] + 1
    # What training stood still for is not the writing.
    assert first["stall_s"] < 1 <= first["write_s"]


def test_memory_for_saving_is_one_state_taken_once(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **KEPT, checkpoint_frequency=1)
    model = nn.Sequential(nn.Linear(4, 500), nn.Linear(500, 1))
    manager.fit(model, points(), loss_fn=squares)
    state = 3 * sum(p.numel() * p.element_size() for p in model.parameters())  # AdamW
    saves = events(tmp_path, "checkpoint")
    for event in saves:
        assert state <= event["bytes"] <= event["buffer_bytes"] <= state + 1000
        assert event["allocate_s"] == 0 or event["step"] == 1
        assert event["pinned"] is False
    assert len({event["buffer_bytes"] for event in saves}) == 1


def test_a_failed_save_does_not_stop_training_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before_writing(monkeypatch, failing_at(lambda step: step == 2))
    watch = Watch()
    fit(tmp_path, watch, checkpoint_frequency=1, progress="lines")
    assert saved(tmp_path) == [1, 3, 4]
    assert "step-00000002" not in watch.order
    shown = capsys.readouterr().out
    assert shown.count("could not save step 2: no space") == 1
    assert "Training continues; the next save tries again" in shown
    assert [event["step"] for event in events(tmp_path, "checkpoint_failed")] == [2]


def test_a_last_save_that_fails_is_tried_again_and_then_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def fail(step: int) -> None:
        tries.append(step)
        if len(tries) < failures:
            no_space(step)

    before_writing(monkeypatch, fail)
    failures = 2
    fit(tmp_path / "a")
    assert tries == [4, 4] and saved(tmp_path / "a") == [4]
    tries.clear()
    failures = 9
    watch = Watch()
    with pytest.raises(CheckpointError, match="could not save step 4"):
        fit(tmp_path / "b", watch)
    assert watch.order[-1] == "end"
    fit(tmp_path / "b", resume="auto", checkpoint_frequency=9, enable_fault_tolerance=False)


def test_saving_by_hand_says_at_once_that_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_for(tmp_path, **{**KEPT, "enable_fault_tolerance": False})
    manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    before_writing(monkeypatch, no_space)
    with pytest.raises(CheckpointError, match="no space"):
        manager.save_checkpoint()
    monkeypatch.undo()
    path = manager.save_checkpoint()
    assert (path / "manifest.json").exists()
    manager.finish()


def stop_on_failure(folder: Path) -> list[str]:
    """Every save but the first fails; rank 0 alone writes."""
    with pytest.MonkeyPatch.context() as patch:
        before_writing(patch, failing_at(lambda step: step > 1))
        watch = Watch()
        settings = {**KEPT, "training_mode": "ddp", "global_batch_size": 4}
        manager = manager_for(
            folder, **settings, checkpoint_frequency=1, on_save_failure="stop", epochs=3
        )
        try:
            manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, callbacks=[watch])
        except CheckpointError as error:
            return [*watch.order, str(error)]
        return watch.order


def test_all_ranks_stop_at_the_same_step_when_told_to(tmp_path: Path) -> None:
    """The save of step 2 fails; the ranks learn it together when step 3 is to be saved."""
    first, second = run_ranks(2, stop_on_failure, tmp_path)
    expected = ["step 1", "step 2", "step 3", "end", "could not save step 2: no space"]
    assert second == expected
    assert [entry for entry in first if "step-" not in entry] == expected
    assert saved(tmp_path) == [1]


def test_a_state_that_cannot_be_saved_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for text in run_ranks(2, save_a_function, tmp_path):
        assert text.startswith("cannot save replicated.bad.f")


def save_a_function(folder: Path) -> str:
    class Bad:
        def state_dict(self) -> dict[str, Any]:
            return {"f": print}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    manager = manager_for(folder, **{**KEPT, "training_mode": "ddp"})
    try:
        manager.fit(line(), points(), loss_fn=squares, states={"bad": Bad()})
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_error_in_training_does_not_lose_the_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_writing(monkeypatch, lambda step: time.sleep(0.3))

    def fail(step: int) -> None:
        if step == 3:
            raise ValueError("user's own")

    watch = Watch(at_step=fail)
    with pytest.raises(ValueError, match="user's own"):
        fit(tmp_path, watch, checkpoint_frequency=2)
    assert saved(tmp_path) == [2]
    assert watch.order[-2:] == ["step-00000002", "end"]


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tiny import line, manager_for, points, sgd, squares
from multi_gpu_training.checkpoint import durable
durable.observers.append(lambda path: time.sleep(0.2))
manager = manager_for(Path(sys.argv[1]), run_name="run", training_mode="single")
manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
manager.save_checkpoint(wait=False)
if sys.argv[3] == "die":
    raise ValueError("after the save had begun")
"""


def test_a_script_that_ends_or_dies_at_once_keeps_what_it_began_to_save(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    tests = str(Path(__file__).parent.parent)
    started = {
        how: subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / how), tests, how],
            env=quickly(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for how in ("end", "die")
    }
    for how, process in started.items():
        _, told = process.communicate(timeout=120)
        assert process.returncode == (how == "die"), told
        store = CheckpointStore(tmp_path / how / "custom" / "run" / "checkpoints")
        found, damaged = store.newest_intact()
        assert found is not None and not damaged, told
