"""Save a run: when it is due, at the end of an epoch, on request, and before a signal ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.loader import wait_for_no_worker
from multi_gpu_training.distributed.control import Control
from multi_gpu_training.distributed.progress_slot import Phase, note_phase
from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.training.callbacks import CallbackList, StepLog
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.stopping import leave
from multi_gpu_training.training.trainer import MultiGPUTrainer


class Checkpoints(Protocol):
    """What the loop needs from checkpointing. `save`, `settle` and `recover` are collective."""

    def due(self, step: int) -> bool: ...

    def holds(self, step: int) -> bool:
        """Whether this step is the newest one saved or being written."""

    def poll(self) -> None:
        """Between steps: report how the last save went, without waiting for it."""

    def copy_ahead(self) -> None:
        """Copy the state now for a save of this step. On this rank alone."""

    def save(self, facts: dict[str, Any], best: bool, wait: bool) -> Path: ...

    def settle(self) -> None:
        """Wait for a save that is being written."""

    def recover(self, error: Exception) -> None:
        """Restore the last checkpoint if that is the policy for this error; else raise it."""

    def protect(self, step: int) -> None:
        """Keep the checkpoint of this step until another one is protected."""

    def skips(self, batch: Any) -> bool:
        """Whether to skip a batch because it caused a fault before."""


@dataclass
class Saving:
    """Every save of a run goes through here. Every rank must make the same calls."""

    config: MultiGPUConfig
    trainer: MultiGPUTrainer
    callbacks: CallbackList
    progress: Progress
    checkpoints: Checkpoints
    log: StepLog
    control: Control
    manifest: dict[str, Any]  # what a checkpoint's manifest holds besides the state
    record: Callable[..., None]  # writes an event
    folder: Path

    def save(
        self,
        best: bool = False,
        wait: bool = True,
        *,
        score: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
    ) -> Path:
        """Save the whole state now. With `wait`, it is safe on disk when this returns; otherwise
        training continues once the state is copied, and the files are written in the background."""
        note_phase(Phase.CHECKPOINT)
        trainer = self.trainer
        trainer.execution.verify(spare=not wait)  # the last chance to undo wrong recorded steps
        trainer.nan_guard.look(now=True)  # finds a NaN before it is saved
        trainer.collect_metrics()
        facts = {"metrics": metrics or self.progress.newest, **self.manifest}
        if score is not None:
            facts["score"] = score
        for call in self.callbacks.on_save_begin:
            call()
        try:
            path = self.checkpoints.save(facts, best, wait)
            if trainer.execution.saved():
                self.checkpoints.protect(trainer.step)
            return path
        finally:
            for call in self.callbacks.on_save_end:
                call()

    def between_steps(self, **facts: Any) -> None:
        """Save without waiting for the disk."""
        self.log.flush()  # finds a NaN before it is saved
        self.save(wait=False, **facts)

    def if_due(self) -> None:
        """Save if a save is due, in a loop that calls backward itself."""
        self.checkpoints.poll()
        if self.checkpoints.due(self.trainer.step):
            self.between_steps()

    def stop(self, save: Callable[[], Any] | None = None) -> None:
        """Save the step that all ranks have reached, unless it is already saved, and end this
        process. `save` replaces `self.save` where that is not enough."""
        wait_for_no_worker()
        for call in self.callbacks.on_data_end:
            call()
        begun, problem = time.perf_counter(), None
        try:
            outcome = self._save_to_stop(save)
        except MultiGPUError as error:  # including a NaN: the run is ending, so no rollback
            problem = str(error)
            outcome = f"step {self.trainer.step} is lost: {problem}. An earlier one: --resume auto"
        facts = {"problem": problem, "save_s": time.perf_counter() - begun}
        self.record("stopped", step=self.trainer.step, signal=self.control.asked_by, **facts)
        leave(self.control, outcome)

    def _save_to_stop(self, save: Callable[[], Any] | None) -> str:
        step = self.trainer.step
        if not self.config.enable_fault_tolerance:
            return f"stopped at step {step}; nothing saved, as enable_fault_tolerance is false"
        if step == 0:
            return "stopped before the first step; there is nothing to save"
        if self.checkpoints.holds(step):
            self.checkpoints.settle()
        elif save is not None:
            save()
            self.checkpoints.settle()
        else:
            self.log.flush()  # finds a NaN before it is saved
            self.save()
        return f"saved step {step}; continue with --resume auto"
