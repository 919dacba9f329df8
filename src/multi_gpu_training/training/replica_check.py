"""Compares the replicas of the model now and then: they must be equal to the bit."""

from __future__ import annotations

from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.trainer import MultiGPUTrainer


class ReplicaCheck(Callback):
    """Raises DivergenceError after a step whose weights differ between ranks.

    Every `every` steps, after the first step of another epoch, and before a checkpoint: your own
    loop around `train_step` has no other end of an epoch.
    """

    watches_only = True

    def __init__(self, trainer: MultiGPUTrainer, every: int) -> None:
        self._trainer = trainer
        self._every = every
        self._epoch = trainer.epoch
        self._compared = trainer.step

    def on_step_end(self, run: Run, result: StepResult) -> None:
        epoch = self._trainer.epoch
        if result.step % self._every == 0 or epoch != self._epoch:
            self._epoch = epoch
            self._compare()

    def on_save_begin(self, run: Run) -> None:
        if self._compared != self._trainer.step:
            self._compare()

    def _compare(self) -> None:
        self._compared = self._trainer.step
        self._trainer.check_replicas()
