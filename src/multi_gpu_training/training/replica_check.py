"""Compares the replicas of the model now and then: they must be equal to the bit."""

from __future__ import annotations

from collections.abc import Callable

from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step import StepResult


class ReplicaCheck(Callback):
    """Raises DivergenceError after a step whose weights differ between ranks."""

    watches_only = True

    def __init__(self, check: Callable[[], None], every: int) -> None:
        self._check = check
        self._every = every

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if result.step % self._every == 0:
            self._check()
