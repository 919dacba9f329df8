"""Steps that are replayed show their phases in the eager steps that they are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training.monitoring.phases import PhaseClock
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.training.runner.selection import StepExecution
from multi_gpu_training.training.state_rollback import StateCopies


class Repeats:
    """Stands for a CUDA graph: does what was recorded again."""

    def __init__(self, state: Any) -> None:
        self.copies = StateCopies(state)

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        self.copies.keep("outside")
        outputs = work()
        self.copies.restore("outside")

        class Recorded:
            def replay(self) -> None:
                result, _ = work()
                outputs[0].mean.copy_(result.mean)

        return Recorded(), outputs


def test_comparisons_with_eager_steps_are_timed_and_labelled(tmp_path: Path) -> None:
    start = StepExecution.start

    def with_stand_in(self: Any) -> None:
        start(self, Repeats(self.state))

    settings = {"training_mode": "single", "batch_size": 2, "epochs": 20, "log_every": 5}
    with mock.patch.object(StepExecution, "start", with_stand_in):
        manager = manager_for(tmp_path, step_execution="graph", **settings)
        manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    assert manager.trainer.execution.mode == "graph"
    assert not any(isinstance(m, PhaseClock) for m in manager.callbacks.members)
    lines = manager.run.events(0).read_text().splitlines()
    timed = [e for e in map(json.loads, lines) if e["event"] == "phases"]
    assert len(timed) >= 5 and {event["source"] for event in timed} == {"check"}
    for event in timed:
        assert event["interval_steps"] > 0
        assert event["forward_s"] > 0 and event["backward_s"] > 0 and event["optimizer_s"] > 0
    assert sum(event["event"] == "work" for event in map(json.loads, lines)) == 1
    assert read_run(manager.run.path).samples[0].from_checks
