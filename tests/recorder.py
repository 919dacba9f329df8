"""A stand-in for CUDA graphs: like one it repeats what was recorded, with the Python values of that
time, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from multi_gpu_training.training.runner.graph import CaptureError
from multi_gpu_training.training.runner.selection import StepExecution
from multi_gpu_training.training.state_rollback import StateCopies
from multi_gpu_training.training.step_state import StepState

HIDDEN = "MGT_TEST_HIDDEN_WEIGHT"


class StandIn:
    """Repeats work with the value of HIDDEN that it was recorded with."""

    def __init__(self, state: StepState, fails: str | None = None) -> None:
        self.copies = StateCopies(state)
        self.fails = fails

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        self.copies.keep("outside")
        # A recording does nothing yet: above all it does not send gradients.
        with self.copies.state.strategy.no_sync(last=False):
            outputs = work()
        self.copies.restore("outside")
        if self.fails:
            raise CaptureError(self.fails)
        frozen = os.environ.get(HIDDEN)

        class Recorded:
            def replay(self) -> None:
                with hidden(frozen):
                    (result, norm) = work()
                outputs[0].mean.copy_(result.mean)
                if norm is not None:
                    outputs[1].copy_(norm)

        return Recorded(), outputs


@contextmanager
def hidden(value: str | None) -> Iterator[None]:
    before = os.environ.get(HIDDEN)
    set_hidden(value)
    try:
        yield
    finally:
        set_hidden(before)


def set_hidden(value: str | None) -> None:
    if value is None:
        os.environ.pop(HIDDEN, None)
    else:
        os.environ[HIDDEN] = value


@contextmanager
def recording(fails: Callable[[int], str | None] = lambda rank: None) -> Iterator[None]:
    start = StepExecution.start

    def with_stand_in(self: Any) -> None:
        start(self, StandIn(self.state, fails(self.state.placement.dp_rank)))

    with mock.patch.object(StepExecution, "start", with_stand_in):
        yield
