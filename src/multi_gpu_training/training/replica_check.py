"""Compares the model's replicas at intervals: they must be equal to the bit."""

from __future__ import annotations

from collections.abc import Callable

from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState


class ReplicaCheck(Callback):
    """Raises DivergenceError after a step whose weights differ between ranks.

    It checks every `every` steps, after the first step of each later epoch, and before a
    checkpoint. The first step of an epoch, because the user's own loop has no end-of-epoch event.
    """

    watches_only = True

    def __init__(self, check: Callable[[], None], every: int, state: StepState) -> None:
        self._check = check
        self._every = every
        self._state = state
        self._epoch, self._compared = state.epoch, state.step

    def on_step_end(self, run: Run, result: StepResult) -> None:
        epoch = self._state.epoch
        if result.step % self._every == 0 or epoch != self._epoch:
            self._epoch = epoch
            self._compare()

    def on_save_begin(self, run: Run) -> None:
        if self._compared != self._state.step:
            self._compare()

    def _compare(self) -> None:
        self._compared = self._state.step
        self._check()
