"""Callbacks: which events come, in which order, in every kind of loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import Callback, ConfigError
from multi_gpu_training.training.callbacks import EVENTS, CallbackList, Hook


class Recorder(Callback):
    """Notes every event by name."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *arguments: self.seen.append(name.removeprefix("on_"))
        return super().__getattribute__(name)


for _event in EVENTS:  # a callback listens to what its class overrides
    setattr(Recorder, _event, lambda self, *arguments: None)

STEP = ["step_begin", "forward", "backward", "exchange", "optimizer", "micro_batch_end", "step_end"]


def test_a_run_tells_its_story_in_order(tmp_path: Path) -> None:
    told = Recorder()
    manager = manager_for(
        tmp_path, batch_size=8, training_mode="single", log_every=2, enable_fault_tolerance=True
    )
    manager.fit(line(), points(16), points(4), loss_fn=squares, optimizer=sgd, callbacks=[told])
    one = ["input", "batch", *STEP]
    end = ["input", "data_end", "validation", "epoch_end", "save_begin", "save_end"]
    story = ["setup", "epoch_begin", *one, *one, "log", *end]
    # When a checkpoint's files are safe depends on the disk.
    assert [event for event in told.seen if event != "checkpoint"] == [*story, "end"]
    assert told.seen.count("checkpoint") == 1


def test_the_parts_of_a_step_come_once_per_micro_batch(tmp_path: Path) -> None:
    told = Recorder()
    manager = manager_for(
        tmp_path, batch_size=4, gradient_accumulation_steps=2, training_mode="single"
    )
    manager.fit(line(), points(8), loss_fn=squares, optimizer=sgd, callbacks=[told])
    parts = [event for event in told.seen if event in STEP]
    first = ["step_begin", "forward", "backward", "exchange", "micro_batch_end"]
    last = ["forward", "backward", "exchange", "optimizer", "micro_batch_end", "step_end"]
    assert parts == [*first, *last]


def test_a_loop_of_ones_own_has_the_events_of_its_steps_and_their_log(tmp_path: Path) -> None:
    logged: list[tuple[int, float]] = []

    class Watch(Recorder):
        pass

    class Log(Callback):
        def on_log(self, run: Any, metrics: Any, step: int) -> None:
            logged.append((step, metrics["loss"]))

    told = Watch()
    manager = manager_for(tmp_path, batch_size=4, training_mode="single", log_every=2)
    manager.setup_training(
        line(), points(16), loss_fn=squares, optimizer=sgd, callbacks=[told, Log()]
    )
    inputs, targets = points(16).tensors
    losses = []
    for start in range(0, 12, 4):
        batch = [inputs[start : start + 4], targets[start : start + 4]]
        losses.append(float(manager.trainer.train_step(batch).loss))
    manager.finish()
    assert told.seen.count("step_begin") == told.seen.count("step_end") == 3
    assert [step for step, _ in logged] == [2, 3]  # the last one when the run is finished
    assert logged[0][1] == pytest.approx(sum(losses[:2]) / 2)
    assert logged[1][1] == pytest.approx(losses[2])


def test_the_result_of_a_step_is_given_to_its_callbacks(tmp_path: Path) -> None:
    found: list[tuple[int, float, float]] = []

    class Watch(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            found.append((result.step, float(result.loss), float(result.grad_norm)))

    manager = manager_for(tmp_path, batch_size=8, training_mode="single", max_grad_norm=1.0)
    manager.fit(line(), points(16), loss_fn=squares, optimizer=sgd, callbacks=[Watch()])
    assert [step for step, _, _ in found] == [1, 2]
    assert all(loss > 0 and norm > 0 for _, loss, norm in found)


def test_only_what_a_class_overrides_is_called() -> None:
    class Quiet(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            pass

    calls = CallbackList(None, [Quiet(), Callback()])
    assert {event for event in EVENTS if getattr(calls, event)} == {"on_step_end"}
    calls.remove(calls.members[0])
    assert not any(getattr(calls, event) for event in EVENTS)


def test_hooks_of_version_0_1_still_work_and_warn(tmp_path: Path) -> None:
    seen: list[Any] = []
    with pytest.warns(DeprecationWarning, match="derive from Callback"):

        class Old(Hook):
            def on_run_start(self, manager: Any) -> None:
                seen.append("start")

            def on_step_end(self, manager: Any, step: int) -> None:
                seen.append(step)

            def on_epoch_end(self, manager: Any, epoch: int, metrics: dict[str, float]) -> None:
                seen.append(sorted(metrics))

            def on_run_end(self, manager: Any) -> None:
                seen.append("end")

    manager = manager_for(tmp_path, batch_size=8, training_mode="single")
    manager.fit(line(), points(16), loss_fn=squares, optimizer=sgd, hooks=[Old()])
    assert seen == ["start", 1, 2, ["loss"], "end"]


def logged_steps(folder: Path) -> list[tuple[int, float]]:
    logged: list[tuple[int, float]] = []

    class Log(Callback):
        def on_log(self, run: Any, metrics: Any, step: int) -> None:
            logged.append((step, metrics["loss"]))

    manager = manager_for(folder, batch_size=4, log_every=1)
    manager.setup_training(line(), points(16), loss_fn=squares, optimizer=sgd, callbacks=[Log()])
    inputs, targets = points(16).tensors
    for step in range(2):
        start = 8 * step + 4 * manager.placement.dp_rank
        manager.trainer.train_step([inputs[start : start + 4], targets[start : start + 4]])
    manager.finish()
    return logged


def test_steps_of_ones_own_are_logged_over_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, logged_steps, tmp_path)
    assert first == second and [step for step, _ in first] == [1, 2]
    inputs, targets = points(16).tensors
    expected = squares(line(), [inputs[:8], targets[:8]])
    assert first[0][1] == pytest.approx(float(expected.detach()), rel=1e-5)


class Elsewhere(Callback):
    """As people write it who come from another library."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Called by Lightning."""

    def on_step_ends(self, run: Any, result: Any) -> None:
        """Misspelt."""

    def on_epoch_end(self, run: Any) -> None:  # type: ignore[override]
        """Lacks two arguments."""

    def on_fault(self, *everything: Any) -> None:
        """Takes whatever comes."""


def test_a_callback_that_would_never_be_called_is_refused_before_training(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, batch_size=8)
    for callbacks, expected in (
        (
            [Elsewhere()],
            [
                "Elsewhere.on_train_epoch_end would never be called: there is no such event; name "
                "it on_epoch_end",
                "Elsewhere.on_step_ends would never be called: there is no such event; name it "
                "on_step_end",
                "Elsewhere.on_epoch_end is called with other arguments; write "
                "def on_epoch_end(self, run, epoch, metrics)",
            ],
        ),
        ([Elsewhere], ["which is not a Callback object; write Elsewhere()"]),
        (["csv"], ["callbacks holds 'csv', which is not a Callback object"]),
        (Elsewhere(), ["give a list of them, callbacks=[...]"]),
    ):
        with pytest.raises(ConfigError) as refused:
            manager.fit(line(), points(16), loss_fn=squares, callbacks=callbacks)  # type: ignore[arg-type]
        for text in expected:
            assert text in str(refused.value)
    assert not list(tmp_path.glob("*/*"))
