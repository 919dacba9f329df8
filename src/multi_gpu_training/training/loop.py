"""The training loop. A whole run, top to bottom:

    run                     until max_steps, early stopping or the last epoch ends it
      _train                one epoch; after a rollback, the rest of it again
        train_step          by the trainer, once per micro-batch: on_step_begin, ..., on_step_end
        _after_step         validate or save, where that is due
        _end_of_steps       add up the epoch's metrics
        _validate           evaluate every sample once, and close the epoch: record, best, save
      _recover              after an error: raise it, or go back to the last checkpoint

Users who write `for epoch ...` themselves call `train_epoch` and `validate_epoch` instead of `run`.

This file says what comes when; `validation.py`, `epoch_end.py`, `saving.py` and `stopping.py` say
what it is. Everything that only watches (progress bar, log, timing, replica check) is a
callback. Every rank makes the same calls, since most of them are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import refuse_to_start_over, share_of
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.distributed.control import Control
from multi_gpu_training.distributed.progress_slot import Phase, note_phase, note_step
from multi_gpu_training.errors import CheckpointError, ConfigError, DataError, add_place
from multi_gpu_training.training.callbacks import CallbackList, StepLog
from multi_gpu_training.training.epoch_end import EpochEnd, TrainedEpoch
from multi_gpu_training.training.oom import add_advice
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.saving import Checkpoints, Saving
from multi_gpu_training.training.stopping import Stopping, training_batches
from multi_gpu_training.training.trainer import MultiGPUTrainer
from multi_gpu_training.training.validation import Validation


@dataclass
class TrainingLoop:
    """All epochs of one run."""

    config: MultiGPUConfig
    trainer: MultiGPUTrainer
    callbacks: CallbackList
    progress: Progress
    train_loader: Loader
    validation: Validation
    epoch_end: EpochEnd
    checkpoints: Checkpoints
    saving: Saving
    stopping: Stopping
    log: StepLog
    control: Control
    renew_shares: Callable[[], None]  # re-measures how much each rank should compute
    folder: Path
    _unvalidated: TrainedEpoch | None = None  # waits for the validation that closes it

    def run(self) -> None:
        """Train all remaining epochs."""
        while not self.stopping.is_over:
            # Not a counter: a rollback may return to an earlier epoch.
            self._train(self.train_loader, self.progress.epochs_done, in_fit=True)

    # The same epoch by epoch, for a loop written by the user

    def train_epoch(self, loader: Iterable[Any], epoch: int) -> dict[str, float]:
        """Make one pass over the loader; return metrics over all ranks.

        If a resumed run has already finished this epoch, return its recorded metrics instead.
        """
        if epoch < 0:
            raise ConfigError(f"train_epoch(loader, {epoch}): epochs count from 0")
        self.progress.epoch = epoch
        if epoch < self.progress.epochs_done:
            return self.progress.history[epoch]["train"]
        if self.stopping.is_complete:
            return self.progress.last["train"]
        if self.stopping.asked_to_end:
            self.saving.stop()  # nothing else would end a loop written by the user
        if self._unvalidated is not None:  # a user's own loop may skip validation
            trained, self._unvalidated = self._unvalidated, None
            self.epoch_end.close(trained)
        metrics = self._train(loader, epoch)
        if metrics is None:
            raise self._out_of_reach(f"epoch {epoch + 1}")
        return metrics

    def validate_epoch(self, loader: Iterable[Any] | None = None) -> dict[str, float]:
        """Evaluate every sample of the loader once; return metrics over all ranks."""
        loader = loader if loader is not None else self.validation.loader
        if loader is None:
            raise ConfigError("validate_epoch needs a loader; give val_dataset to setup_training")
        try:
            return self._validate(loader)
        except Exception as error:
            self._recover(error, self.trainer.step)
            raise self._out_of_reach("the validation") from error

    # One epoch

    def _train(
        self, loader: Iterable[Any], epoch: int, in_fit: bool = False
    ) -> dict[str, float] | None:
        """Train an epoch. in_fit: validate it as well, since no code of the user's does it.

        Returns None if a rollback led into another epoch, which must be trained instead.
        """
        trainer, self.progress.epoch = self.trainer, epoch
        if loader is self.train_loader:
            self._seek(epoch)
            self.renew_shares()
        trainer.state.modes.enter_training()
        trainer.execution.mark()  # recorded steps are never undone past this point
        while True:
            for call in self.callbacks.on_epoch_begin:  # after a rollback, again
                call(epoch)
            step = trainer.step + 1  # the step an error belongs to
            try:
                self._validate_before_steps()
                for batch in self._batches(loader):
                    if self.checkpoints.skips(batch):
                        # It still counts as seen, so that positions in the data do not shift.
                        trainer.pass_over(share_of(batch))
                        continue
                    # Do not keep the result: that would copy the numbers of each recorded step
                    # before the next one overwrites them.
                    if trainer.train_step(batch).moved and self._after_step():
                        break
                    step = trainer.step + 1
                metrics = self._end_of_steps(loader, epoch, in_fit)
                if in_fit and self.validation.loader is not None:
                    self._validate(self.validation.loader)
                if self.stopping.should_stop or epoch + 1 >= self.config.epochs:
                    trainer.execution.verify()  # a rollback is still possible here
                return metrics
            except Exception as error:
                self._recover(error, step)  # raises the error unless a checkpoint was restored
            if isinstance(loader, Iterator):
                raise CheckpointError(
                    f"step {step} failed and the checkpoint of step {trainer.step} is back, but "
                    "the batches since then are gone: train_epoch was given an iterator. Give it "
                    "the loader that setup_training returns, or anything that `for` can begin "
                    "again"
                )
            if self.progress.epochs_done != epoch:
                return None
            self._seek(epoch)

    def _batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The rest of an epoch, or nothing if only its end remains to be recorded."""
        if self.stopping.reached_max_steps:  # the run ended just before the epoch was recorded
            return ()
        self.progress.unfinished = None
        # Data on the GPU is gathered inside the step.
        batches = loader.batches() if isinstance(loader, ResidentLoader) else loader
        if loader is not self.train_loader and self.epoch_end.metrics.names:
            # The run is inside this epoch. Only the run's own loader, perhaps inside a wrapper of
            # the user's, knows where.
            batches = refuse_to_start_over(loader, self.trainer.step)
        return training_batches(batches, self.control, self.trainer.state)

    def _after_step(self) -> bool:
        """Between two steps; True to end the epoch here."""
        step = self.trainer.step
        self.checkpoints.poll()
        if self.config.validate_every and self.validation.is_due(step):
            self._validate_inside_epoch()
        elif self.checkpoints.due(step):
            self.saving.between_steps()
        return self.stopping.reached_max_steps

    def _end_of_steps(self, loader: Iterable[Any], epoch: int, in_fit: bool) -> dict[str, float]:
        """All steps of the epoch are done; close it now, or leave that to its validation."""
        note_phase(Phase.EPOCH)
        state, cut = self.trainer.state, self.stopping.reached_max_steps
        whole = not cut or (loader is self.train_loader and state.at_end_of_epoch)
        if cut:  # else the loader takes the epoch for one that the user's loop broke off
            self.train_loader.seek(state.epoch, state.position)
        validates = self.validation.loader is not None
        metrics = self.epoch_end.add_up(epoch, unattended=in_fit and not validates)
        if not metrics and not cut:
            raise DataError(
                f"epoch {epoch + 1} trained no step: the data gave no batch, or each was skipped "
                "after a fault; check the data and their filters",
                code="MGT302",
            )
        trained = TrainedEpoch(epoch, metrics, whole)
        if validates:
            self._unvalidated = trained  # its validation decides about best and early stopping
        else:
            self.epoch_end.close(trained)
        return metrics

    # Validation

    def _validate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate, then close the epoch that is waiting for it."""
        trained = self._unvalidated
        if trained is None and loader is self.validation.loader:
            recorded = self.progress.record_of(self.progress.epoch)
            if recorded is not None:  # a resumed run has validated this epoch before
                return recorded["val"]
        known = self.validation.found_here(loader) if trained else None
        metrics = self.validation.measure(loader) if known is None else known
        note_phase(Phase.EPOCH)
        if trained is not None:
            self._unvalidated = None
            for call in self.callbacks.on_validation if known is None else ():
                call(metrics)
            self.progress.validated_step = self.trainer.step
            self.epoch_end.close(trained, metrics)
        return metrics

    def _validate_before_steps(self) -> None:
        """Validate the untrained model, or repeat a validation that a signal or fault cut off."""
        if self.validation.due_at_start:
            self.validation.between_steps()  # to compare with; never the best, never saved
        elif self.validation.was_missed and not self.stopping.reached_max_steps:
            self._validate_inside_epoch()

    def _validate_inside_epoch(self) -> None:
        """Validate between two steps; save if the result is the best so far."""
        metrics = self.validation.between_steps()
        better = self.progress.judge(metrics)
        best = better and self.config.enable_fault_tolerance
        if best or self.checkpoints.due(self.trainer.step):
            score = self.progress.score(metrics) if better else None
            self.saving.between_steps(best=better, score=score, metrics=metrics)

    # Going back

    def _recover(self, error: Exception, step: int) -> None:
        """Apply the fault policies to an error at `step`: raise it, or restore a checkpoint and
        return to its position in the data."""
        state = self.trainer.state
        note_step(step)
        add_advice(error, state)
        identity = state.placement.identity
        add_place(error, identity.rank, identity.host, step, self.folder)
        self.checkpoints.recover(error)
        self.train_loader.seek(state.epoch, state.position)
        self.log.went_back()
        self._unvalidated = None
        self.validation.forget()

    def _seek(self, epoch: int) -> None:
        if self.train_loader.epoch != epoch:  # otherwise it may stand inside the epoch already
            self.train_loader.seek(epoch)

    def _out_of_reach(self, where: str) -> CheckpointError:
        """The user's own loop is at `where`; only it could return to where the state is now."""
        return CheckpointError(
            f"{where} failed, and the state of step {self.trainer.step} in epoch "
            f"{self.progress.epochs_done + 1} was brought back, where your own loop does not "
            "continue; start the run again with --resume auto"
        )
