"""Saves closer together than `checkpoint_interval_s`: training never waits for the disk, and what
the run needs at its end is there, however it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import CONTEXT, run_ranks
from safetensors.torch import load_file
from tiny import flat, line, manager_for, points, sgd, squares
from torch import Tensor, nn

from multi_gpu_training import Callback, MetricsCollector
from multi_gpu_training.checkpoint import durable
from multi_gpu_training.errors import CheckpointError

NEVER = 1e6  # seconds: nothing is written in between
RUN = {"batch_size": 4, "run_name": "run", "training_mode": "single", "keep_last": 99}
RUN |= {"enable_fault_tolerance": True, "checkpoint_frequency": 1, "checkpoint_interval_s": NEVER}


class Steps(Callback):
    """Keeps the weights of every step, and which checkpoints were reported; `at` does more."""

    def __init__(self, at: Callable[[Any, int], None] = lambda manager, step: None) -> None:
        self.at = at
        self.weights: dict[int, Tensor] = {}
        self.reported: list[int] = []

    def on_step_end(self, manager: Any, result: Any) -> None:
        self.weights[result.step] = flat(manager.model).clone()
        self.at(manager, result.step)

    def on_checkpoint(self, manager: Any, path: Path) -> None:
        self.reported.append(step_of(path))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def place(folder: Path) -> Path:
    return folder / "custom" / "run" / "checkpoints"


def saved(folder: Path) -> list[int]:
    return sorted(map(step_of, place(folder).glob("step-*")))


def best(folder: Path) -> int:
    return step_of((place(folder) / "best").resolve())


def fit(folder: Path, hook: Callback | None = None, **settings: Any) -> nn.Module:
    model = line()
    manager = manager_for(folder, **{**RUN, **settings})
    hooks = [hook] if hook else []
    manager.fit(model, points(), loss_fn=squares, optimizer=sgd, callbacks=hooks)
    return model


def before_writing(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], None]) -> None:
    def observe(path: Path) -> None:
        if path.name == "model.safetensors":
            do(int(path.parent.name.split("-")[2]))  # .staged-step-N-...

    monkeypatch.setattr(durable, "observers", [observe])


def test_training_never_waits_for_the_disk_and_the_last_state_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes nothing before step 7 of 8. The first save has begun by then; of the others
    the last one, taken at its own step, is written."""
    go = threading.Event()
    before_writing(monkeypatch, lambda step: _wait(go))
    hook = Steps(at=lambda manager, step: go.set() if step == 7 else None)
    fit(tmp_path, hook, epochs=2)
    # At the end of the first epoch, 4, the loss was the best so far; and at that of the second.
    assert saved(tmp_path) == [1, 8] and sorted(hook.reported) == [1, 8]
    for step in (1, 8):
        weights = load_file(place(tmp_path) / f"step-{step:08d}" / "model.safetensors")
        ours = torch.cat([weights[name].flatten() for name in ("weight", "bias")])
        assert torch.equal(ours, hook.weights[step])


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_best_one_that_waits_gives_way_only_to_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is written at the end, even if the disk refuses it the first time."""
    scores = [0.2, 0.5, 0.9, 0.1, 0.3]
    tries: list[int] = []

    def refuse_once(step: int) -> None:
        tries.append(step)
        if step == 12 and tries.count(12) == 1:
            raise CheckpointError("no space")

    before_writing(monkeypatch, refuse_once)
    settings = {**RUN, "checkpoint_frequency": 99, "epochs": 5, "best_metric": "score"}
    manager = manager_for(tmp_path, **{**settings, "progress": "lines", "keep_last": 1})

    def eval_fn(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        metrics.add("score", scores[manager.progress.epochs_done] * len(batch[0]), len(batch[0]))

    manager.fit(line(), points(), points(), eval_fn=eval_fn, optimizer=sgd)
    assert tries == [4, 12, 20, 12]
    assert saved(tmp_path) == [12, 20] and best(tmp_path) == 12
    shown = capsys.readouterr().out
    assert [f"step-{step:08d} (score" in shown for step in (4, 8, 12)] == [True, False, True]


def end_in_some_way(folder: Path, how: str) -> None:
    """End at step 4, when the save of step 1 is written and that of step 3 waits."""

    def at(manager: Any, step: int) -> None:
        if step == 2:
            manager.fault_tolerance.current.wait()  # that of step 1, which is written at once
        if step < 4:
            return
        if how == "alone":  # the interval passes while training stands still in a long step
            end = time.monotonic() + 30
            while 3 not in saved(folder) and time.monotonic() < end:
                time.sleep(0.02)
        if how in ("killed", "alone"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until it is heard
        if how == "failed":
            raise ValueError("user's own")

    if how != "left":
        fit(folder, Steps(at), checkpoint_interval_s=0.5 if how == "alone" else NEVER, epochs=2)
        return
    manager = manager_for(folder, **{**RUN, "checkpoint_frequency": 99})
    manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    for batch in list(manager.train_loader)[:3]:
        manager.trainer.train_step(batch)
        manager.save_checkpoint(wait=False)
    # The script ends without `finish`, and Python exits.


ENDS = {"killed": [1], "alone": [1, 3], "stopped": [4, 5, 6], "left": [1, 3]}


def test_however_a_run_ends_it_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    """kill -9 loses what waits in memory; nothing else does. With an interval that has passed,
    nothing waits any more, whatever training does meanwhile."""
    whole = flat(fit(tmp_path / "whole", epochs=2))
    processes = {
        how: CONTEXT.Process(target=end_in_some_way, args=(tmp_path / how, how)) for how in ENDS
    }
    for process in processes.values():
        process.start()
    with pytest.raises(ValueError, match="user's own"):
        end_in_some_way(tmp_path / "failed", "failed")
    assert saved(tmp_path / "failed") == [1, 3]
    for how, process in processes.items():
        process.join(120)
        assert process.exitcode == {"killed": -9, "alone": -9, "stopped": 143, "left": 0}[how]
        left = saved(tmp_path / how)
        # All ranks stop at the next step that they agree on.
        assert left == ENDS[how] if how != "stopped" else left[-1] in ENDS[how]
        hook = Steps()
        again = flat(fit(tmp_path / how, hook, epochs=2, resume="auto"))
        assert min(hook.weights) == left[-1] + 1
        assert torch.equal(again, whole)


def two_ranks(folder: Path, policy: str) -> tuple[list[int], str]:
    hook = Steps()
    with pytest.MonkeyPatch.context() as patch:
        if policy:
            before_writing(patch, _refuse)
        settings = {**RUN, "training_mode": "ddp", "global_batch_size": 4, "epochs": 2}
        settings |= {"on_save_failure": policy or "continue"}
        manager = manager_for(folder, **settings)
        try:
            manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, callbacks=[hook])
        except CheckpointError as error:
            return sorted(hook.weights), str(error)
    return sorted(hook.weights), ""


def _refuse(step: int) -> None:
    if step > 1:
        raise CheckpointError(f"could not save step {step}: no space")


def test_two_ranks_agree_on_saves_that_wait(tmp_path: Path) -> None:
    """Rank 0 alone has them; a last one that cannot be written is an error on both."""
    assert run_ranks(2, two_ranks, tmp_path / "well", "") == [([*range(1, 9)], "")] * 2
    assert saved(tmp_path / "well") == [1, 8]
    for policy in ("continue", "stop"):
        told = run_ranks(2, two_ranks, tmp_path / policy, policy)
        assert told == [([*range(1, 9)], "could not save step 8: no space")] * 2
        assert saved(tmp_path / policy) == [1]


def test_a_save_that_waits_or_is_waited_for_comes_before_the_next(tmp_path: Path) -> None:
    """By hand, with `wait`: it is on the disk, and what waited is there as well. What the events
    say training stood still for includes the saves that were replaced."""
    manager = manager_for(tmp_path, **{**RUN, "enable_fault_tolerance": False})
    manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    kept = manager.fault_tolerance
    for step, batch in enumerate(manager.train_loader, 1):
        manager.trainer.train_step(batch)
        manager.save_checkpoint(best=step == 2, wait=False)
        assert kept.holds(step)
    assert saved(tmp_path) in ([], [1])
    path = manager.save_checkpoint()
    assert path.exists() and saved(tmp_path) == [1, 2, 4] and best(tmp_path) == 2
    manager.finish()


def test_a_protected_checkpoint_stays_until_another_one_is_protected(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **{**RUN, "keep_last": 1, "batch_size": 1})
    manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    kept, left = manager.fault_tolerance, []
    for step, batch in enumerate(manager.train_loader, 1):
        manager.trainer.train_step(batch)
        if step % 2 == 0:
            kept.save()
        kept.protect({5: 5, 9: 9, 13: None}.get(step, kept.store.protected_step))
        left.append(saved(tmp_path))
    # With 5 protected, 4 stays: the newest one that is not after it. Later it is 8.
    assert left[5::2] == [[4, 6], [4, 8], [8, 10], [8, 12], [14], [16]]
    manager.finish()


def test_what_turns_out_wrong_goes_and_best_names_what_is_left(tmp_path: Path) -> None:
    """Also what waits to be written."""

    def discard(manager: Any, step: int) -> None:
        if step == 6:
            kept = manager.fault_tolerance
            assert kept.holds(5)
            kept.discard_after(2)
            assert not kept.holds(5)
            assert saved(tmp_path / "b") == [1, 2] and not (place(tmp_path / "b") / "best").exists()

    fit(tmp_path / "b", Steps(discard), checkpoint_interval_s=0, epochs=2)
    assert saved(tmp_path / "b") == [1, 2, 6, 7, 8] and best(tmp_path / "b") == 8

    def discard_waiting(manager: Any, step: int) -> None:
        if step == 6:
            manager.fault_tolerance.discard_after(1)

    fit(tmp_path / "c", Steps(discard_waiting), epochs=2, max_steps=7, keep_last=2)
    assert saved(tmp_path / "c") == [1, 7]
