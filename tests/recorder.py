"""A stand-in for CUDA graphs: it repeats what was recorded, with the Python values of that time,
and does nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from multi_gpu_training.training.runner.graph import CaptureError
from multi_gpu_training.training.runner.selection import StepExecution
from multi_gpu_training.training.state_rollback import StateCopies
from multi_gpu_training.training.step_state import StepState

HIDDEN = "MGT_TEST_HIDDEN_WEIGHT"


class StandIn:
    """Repeats work with the value of HIDDEN, and the attributes of the objects in `freezes`, that
    it was recorded with."""

    def __init__(
        self, state: StepState, fails: str | None = None, freezes: Sequence[Any] = ()
    ) -> None:
        self.copies = StateCopies(state)
        self.fails = fails
        self.freezes = freezes

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        state = self.copies.state
        parameters = [*state.parameters, state.step_module.tally]
        self.copies.keep("outside")
        before = [p.grad for p in parameters]
        # A recording does nothing yet: above all it does not send gradients.
        with state.strategy.no_sync(last=False):
            outputs = work()
        after = [p.grad for p in parameters]
        self.copies.restore("outside")
        if self.fails:
            raise CaptureError(self.fails)
        frozen = os.environ.get(HIDDEN)
        compiled = state.step_module.compiled
        values = [(item, dict(vars(item))) for item in self.freezes]

        class Recorded:
            def replay(self) -> None:
                with hidden(frozen), state.step_module.computing(compiled), ExitStack() as stack:
                    for item, then in values:
                        stack.enter_context(mock.patch.multiple(item, **then))
                    # Like a graph, it reads and writes gradients in its own memory.
                    outside = [p.grad for p in parameters]
                    for parameter, grad in zip(parameters, before, strict=True):
                        parameter.grad = grad
                    (result, norm) = work()
                    for parameter, kept, grad in zip(parameters, after, outside, strict=True):
                        if kept is not None and kept is not parameter.grad:
                            kept.copy_(parameter.grad)
                        parameter.grad = grad
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
def recording(
    fails: Callable[[int], str | None] = lambda rank: None, freezes: Sequence[Any] = ()
) -> Iterator[None]:
    """Let steps be recorded by the stand-in; `fails(rank)` says why they cannot be there."""
    start = StepExecution.start

    def with_stand_in(self: Any) -> None:
        start(self, StandIn(self.state, fails(self.state.placement.dp_rank), freezes))

    with mock.patch.object(StepExecution, "start", with_stand_in):
        yield
