"""The training loop: epochs, steps, validation, checkpoints, stopping, and going back.

    run             trains all epochs, unless max_steps or early stopping ends the run first
    train_epoch     makes one pass over the data; after a rollback, resumes at the checkpoint
    validate_epoch  evaluates every sample once, then closes the epoch: record, best, checkpoint
    save_checkpoint saves the whole state in the background
    stop            after a signal: saves at a step that all ranks have reached, then exits

Everything that only watches (progress bar, log, timing, replica check) is a callback, called from
here or by `trainer.train_step`. The loop sees checkpoints and the log only as protocols.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import came_from_a_loader, share_of
from multi_gpu_training.data.feeding import Loader, ValLoaders
from multi_gpu_training.data.loader import wait_for_no_worker
from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.distributed.control import Control
from multi_gpu_training.distributed.progress_slot import Phase, note_phase, note_step
from multi_gpu_training.errors import (
    CheckpointError,
    ConfigError,
    MultiGPUError,
    NonFiniteLossError,
)
from multi_gpu_training.training.callbacks import CallbackList
from multi_gpu_training.training.evaluation import Evaluator, named_sets, prefixed
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.oom import advice, is_out_of_memory
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.stopping import (
    leave,
    training_batches,
    validation_batches,
)
from multi_gpu_training.training.trainer import MultiGPUTrainer

# What happens between the last step of an epoch and the first of the next.
BETWEEN_EPOCHS = (
    "on_log",
    "on_epoch_end",
    "on_save_begin",
    "on_save_end",
    "on_checkpoint",
    "on_epoch_begin",
)


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


class StepLog(Protocol):
    """What the loop needs from the step log. active: false if the user's loop logs for itself."""

    active: bool

    def flush(self) -> None:
        """Log the steps not logged yet; raise if their loss is not finite."""

    def end_epoch(self) -> None:
        """Wait for pending metrics; steps not logged yet count towards the epoch only."""

    def went_back(self) -> None:
        """Tell the log that the run returned to an earlier step."""


@dataclass
class TrainingLoop:
    """All epochs of one run. Every rank must make the same calls."""

    config: MultiGPUConfig
    trainer: MultiGPUTrainer
    callbacks: CallbackList
    progress: Progress
    checkpoints: Checkpoints
    log: StepLog
    control: Control
    train_loader: Loader
    val_loader: ValLoaders | None
    evaluator: Evaluator
    epoch_metrics: MetricsCollector  # of the current epoch, over the steps logged so far
    facts: dict[str, Any]  # what a checkpoint's manifest holds besides the state
    renew_shares: Callable[[], None]  # re-measures how much each rank should compute
    record: Callable[..., None]  # writes an event
    warn: Callable[[str], None]
    track: Callable[[str, Iterable[Any], int | None], Iterable[Any]]  # shows a bar of batches
    folder: Path
    last_epoch: int | None = None  # the epoch after which the run was asked to end
    _epoch: int | None = None  # the last epoch train_epoch was asked for
    _whole: bool = True  # whether that epoch was trained to its end
    _trained: tuple[int, dict[str, float]] | None = None  # an epoch not validated yet
    _validated: tuple[int, dict[str, float]] | None = None  # the latest: step and metrics

    def run(self) -> None:
        """Train all remaining epochs."""
        while not (self.is_complete or self.progress.out_of_patience or self.asked_to_end):
            epoch = self.progress.epochs_done  # a rollback may return to an earlier epoch
            if epoch >= self.config.epochs:
                break
            validate = self.val_loader is not None
            undisturbed = not validate and self.callbacks.only_watch(BETWEEN_EPOCHS)
            self._train(self.train_loader, epoch, validate, undisturbed)

    # One epoch

    def train_epoch(self, loader: Iterable[Any], epoch: int) -> dict[str, float]:
        """Make one pass over the loader; return metrics over all ranks.

        If a resumed run has already finished this epoch, return its recorded metrics instead.
        """
        self._epoch = epoch
        if epoch < self.progress.epochs_done:
            return self.progress.history[epoch]["train"]
        if self.is_complete:
            return self.progress.last["train"]
        if self.asked_to_end:
            self.stop()  # nothing else would end a loop written by the user
        self._close_trained()  # a user's own loop may skip validation
        metrics = self._train(loader, epoch)
        if metrics is None:
            raise self._out_of_reach(f"epoch {epoch + 1}")
        return metrics

    def _train(
        self,
        loader: Iterable[Any],
        epoch: int,
        validate: bool = False,
        undisturbed: bool = False,
    ) -> dict[str, float] | None:
        """Train an epoch, and validate it when asked to. Returns None if a rollback restored a
        checkpoint from another epoch, which must be trained instead. undisturbed: no code of the
        user's runs between this epoch and the next."""
        trainer, self._epoch = self.trainer, epoch
        if loader is self.train_loader:
            if self.train_loader.epoch != epoch:
                self.train_loader.seek(epoch)
            self.renew_shares()
        trainer.state.enter_training_mode()
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
                    # Fires on_step_begin and on_step_end. Do not keep the result: that would copy
                    # the numbers of each recorded step before the next one overwrites them.
                    if trainer.train_step(batch).moved and self._after_step():
                        break
                    step = trainer.step + 1
                metrics = self._end_of_training(loader, epoch, undisturbed)
                if validate and self.val_loader is not None:
                    self._validate(self.val_loader)
                if self.should_stop or epoch + 1 >= self.config.epochs:
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
            if self.train_loader.epoch != epoch:
                self.train_loader.seek(epoch)

    def _batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The rest of an epoch, or nothing if only its end remains to be recorded."""
        if self.reached_max_steps:  # the run ended just before the epoch's end was recorded
            return ()
        self.progress.unfinished = None
        # Data on the GPU is gathered inside the step.
        batches = loader.batches() if isinstance(loader, ResidentLoader) else loader
        if loader is not self.train_loader and self.epoch_metrics.names:
            batches = self._from_the_middle(loader)  # the run is inside this epoch
        return training_batches(batches, self.control, self.trainer.state)

    def _from_the_middle(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches of a wrapper around the run's own loader, which knows where to resume."""
        for batch in loader:
            if not came_from_a_loader(batch):
                raise CheckpointError(
                    f"the checkpoint of step {self.trainer.step} was saved in the middle of an "
                    "epoch whose batches come from your own loader, which would begin it again. "
                    "Give its data to setup_training and train_epoch the loader that it returns, "
                    "or set checkpoint_frequency above the steps of an epoch: its end is saved "
                    "anyway"
                )
            yield batch

    def _after_step(self) -> bool:
        """Between two steps; True to end the epoch here."""
        step, every = self.trainer.step, self.config.validate_every
        self.checkpoints.poll()
        if every and step % every == 0 and not self._at_end_of_epoch:
            self._validate_inside_epoch()
        elif self.checkpoints.due(step):
            self.save_between_steps()
        return self.reached_max_steps

    def save_between_steps(self, **facts: Any) -> None:
        """Save without waiting for the disk. Collective."""
        self.log.flush()  # finds a NaN before it is saved
        self.save_checkpoint(wait=False, **facts)

    def between_steps(self) -> None:
        """Save if a save is due, in a loop that calls backward itself."""
        self.checkpoints.poll()
        if self.checkpoints.due(self.trainer.step):
            self.save_between_steps()

    def _end_of_training(
        self, loader: Iterable[Any], epoch: int, undisturbed: bool
    ) -> dict[str, float]:
        """All steps of the epoch are done; close it now, or leave that to its validation."""
        note_phase(Phase.EPOCH)
        trainer = self.trainer
        ours = loader is self.train_loader
        self._whole = not self.reached_max_steps or (ours and self._at_end_of_epoch)
        if self.reached_max_steps:  # an epoch that max_steps cut short does not count as aborted
            self.train_loader.seek(trainer.state.epoch, trainer.state.position)
        # The order matters: undo wrongly recorded steps, then log what is still on its way from
        # the device, then count the rest towards the epoch's metrics. While the device computes
        # the last steps, copy what they will give.
        undisturbed = undisturbed and not trainer.strategy.syncs_buffers
        meanwhile = self._copy_ahead if undisturbed else None
        trainer.execution.verify(spare=True, meanwhile=meanwhile)
        self.log.end_epoch()
        trainer.strategy.sync_buffers()  # of ranks that ran out of samples before the epoch ended
        self.epoch_metrics.merge(trainer.collect_metrics())
        trainer.state.metrics.reset()
        trainer.execution.close_window()
        metrics = self.epoch_metrics.compute(trainer.placement)
        trainer.nan_guard.look(now=True)  # here, because the device is awaited anyway
        if not metrics and self.config.on_nonfinite == "skip":
            text = f"every step of epoch {epoch + 1} was skipped: no gradient of it was finite"
            raise NonFiniteLossError(trainer.step, text=text)
        self.check_finite(metrics)
        if self.config.consistency_check_every:
            trainer.check_replicas()
        if self.val_loader is None:
            self._close_epoch(epoch, metrics, None)
        else:
            self._trained = (epoch, metrics)  # `validate_epoch` closes it: best and early stopping
        return metrics

    def _copy_ahead(self) -> None:
        if self.config.enable_fault_tolerance:
            self.checkpoints.copy_ahead()

    def validate_epoch(self, loader: Iterable[Any] | None = None) -> dict[str, float]:
        """Evaluate every sample of the loader once; return metrics over all ranks."""
        loader = loader if loader is not None else self.val_loader
        if loader is None:
            raise ConfigError("validate_epoch needs a loader; give val_dataset to setup_training")
        try:
            return self._validate(loader)
        except Exception as error:
            self._recover(error, self.trainer.step)
            raise self._out_of_reach("the validation") from error

    def _validate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate, then close the epoch that is waiting for it."""
        recorded = self.progress.record_of(self._epoch) if loader is self.val_loader else None
        if self._trained is None and recorded is not None:
            return recorded["val"]  # a resumed run has validated this epoch before
        known = self._validated if self._trained and loader is self.val_loader else None
        if known is not None and known[0] != self.trainer.step:
            known = None  # otherwise a stream or max_steps ended exactly where a validation was due
        metrics = self._validation(loader) if known is None else known[1]
        note_phase(Phase.EPOCH)
        if self._trained is not None:
            (epoch, train), self._trained = self._trained, None
            for call in self.callbacks.on_validation if known is None else ():
                call(metrics)
            self.progress.validated_step = self.trainer.step
            self._close_epoch(epoch, train, metrics)
        return metrics

    def _validate_before_steps(self) -> None:
        """Validate the untrained model, or repeat a validation that a signal or fault cut off."""
        step, every, done = self.trainer.step, self.config.validate_every, self.progress
        if self.val_loader is None:
            return
        if step == 0 and self.config.validate_at_start and self._validated is None:
            metrics = self._validation(self.val_loader)
            done.find_metric(metrics)  # catches a wrong best_metric now rather than after an epoch
            self._validated = (0, metrics)
            for call in self.callbacks.on_validation:
                call(metrics)
            return
        missed = step and every and step % every == 0 and done.validated_step < step
        if missed and not (self._at_end_of_epoch or self.reached_max_steps):
            self._validate_inside_epoch()

    def _validate_inside_epoch(self) -> None:
        """Validate between two steps; save if the result is the best so far."""
        assert self.val_loader is not None
        metrics, step = self._validation(self.val_loader), self.trainer.step
        self._validated, self.progress.validated_step = (step, metrics), step
        for call in self.callbacks.on_validation:
            call(metrics)
        better = self.progress.judge(metrics)
        if self.checkpoints.due(step) or (better and self.config.enable_fault_tolerance):
            score = self.progress.score(metrics) if better else None
            self.save_between_steps(best=better, score=score, metrics=metrics)

    def _validation(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate one or several validation sets. Ranks can stop after each."""
        note_phase(Phase.VALIDATION)
        metrics: dict[str, float] = {}
        sets = self.val_loader if isinstance(self.val_loader, dict) else {}
        one_of_them = {name: one for name, one in sets.items() if one is loader}
        for name, batches in (one_of_them or named_sets(loader)).items():
            title = f"Validation {name}".rstrip()
            length = len(batches) if isinstance(batches, Sized) else None
            shown = self.track(title, validation_batches(batches, self.control), length)
            found = self.evaluator.metrics_of(shown)
            if not found:
                which = f" on {name!r}" if name else ""
                raise ConfigError(
                    f"the validation{which} gave no metric: its data are empty, or eval_fn adds "
                    "nothing; give it at least one sample and one metric, or leave it out of "
                    "val_dataset"
                )
            metrics |= prefixed(name, found)
        spoilt = [f"val/{name} is {value}" for name, value in metrics.items() if value != value]
        if spoilt:
            self.warn(
                f"step {self.trainer.step}: {', '.join(spoilt)}; such a validation is never the "
                "best. Check the data and the metric for a division by zero"
            )
        return metrics

    def _close_epoch(
        self, epoch: int, train: dict[str, float], val: dict[str, float] | None
    ) -> None:
        """Record an epoch, compare it with the best, call the callbacks and save."""
        judged = train if val is None else val
        better = self.progress.finish_epoch(train, val, self._whole)
        if self._whole:
            self.epoch_metrics.reset()  # not earlier: a run may stop during validation
            self.trainer.state.schedule.after_epoch(self.progress.of_deciding_set(judged))
        for call in self.callbacks.on_epoch_end:
            call(epoch, judged)
        if self.config.enable_fault_tolerance:
            self.save_checkpoint(best=better, wait=False, score=self.progress.score(judged))

    def _close_trained(self) -> None:
        """Close an epoch that was trained but never validated."""
        if self._trained is not None:
            (epoch, train), self._trained = self._trained, None
            self._close_epoch(epoch, train, None)

    # Going back

    def _recover(self, error: Exception, step: int) -> None:
        """Apply the fault policies to an error at `step`: raise it, or restore a checkpoint and
        return to its position in the data."""
        note_step(step)
        # An error from a step already carries this advice; one from a validation does not.
        if is_out_of_memory(error) and not hasattr(error, "__notes__"):
            error.add_note(advice(self.trainer.state))
        identity = self.trainer.placement.identity
        who = f"rank {identity.rank} on {identity.host}"
        blamed = error.ranks if isinstance(error, NonFiniteLossError) else []
        if blamed and identity.rank not in blamed:  # every rank raises it; any may report first
            who = f"rank {', '.join(map(str, blamed))}, told by {who}"
        error.add_note(f"({who}, step {step}, run {self.folder})")
        self.checkpoints.recover(error)
        state = self.trainer.state
        self.train_loader.seek(state.epoch, state.position)
        self.log.went_back()
        self._trained = self._validated = None

    def _out_of_reach(self, where: str) -> CheckpointError:
        """The user's own loop is at `where`; only it could return to where the state is now."""
        return CheckpointError(
            f"{where} failed, and the state of step {self.trainer.step} in epoch "
            f"{self.progress.epochs_done + 1} was brought back, where your own loop does not "
            "continue; start the run again with --resume auto"
        )

    # Saving and stopping

    def save_checkpoint(
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
        facts = {"metrics": metrics or self.progress.newest, **self.facts}
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

    def stop(self, save: Callable[[], Any] | None = None) -> None:
        """Save the step that all ranks have reached, unless it is already saved, and end this
        process. `save` replaces `save_checkpoint` where that is not enough."""
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
            self.save_checkpoint()
        return f"saved step {step}; continue with --resume auto"

    # Where the run stands

    @property
    def should_stop(self) -> bool:
        """True once max_steps is reached, early stopping has decided, or the epoch after which the
        run was asked to end is over."""
        return self.reached_max_steps or self.progress.out_of_patience or self.asked_to_end

    def end_after_epoch(self) -> None:
        """End the run once the current epoch is closed. Every rank must call this."""
        if self._epoch is None:
            raise ConfigError(
                "this training does not go by epochs of the manager; use stop, which saves first"
            )
        self.last_epoch = self.progress.epochs_done

    @property
    def asked_to_end(self) -> bool:
        return self.last_epoch is not None and self.progress.epochs_done > self.last_epoch

    @property
    def reached_max_steps(self) -> bool:
        return self.config.max_steps is not None and self.trainer.step >= self.config.max_steps

    @property
    def is_complete(self) -> bool:
        """Whether max_steps is reached and the epoch of the last step is recorded."""
        progress = self.progress
        recorded = progress.unfinished is not None or progress.epochs_done > self.trainer.epoch
        return self.reached_max_steps and recorded

    @property
    def _at_end_of_epoch(self) -> bool:
        total = self.train_loader.steps
        return total is not None and self.trainer.state.position >= total

    def check_finite(self, metrics: dict[str, float]) -> None:
        """Raise if the loss over some steps is NaN or infinite."""
        if math.isfinite(metrics.get("loss", 0.0)):
            return
        trainer = self.trainer
        trainer.execution.verify()  # these two name the step and the samples where they can
        trainer.nan_guard.look(now=True)
        rate = float(trainer.optimizer.param_groups[0]["lr"])
        raise NonFiniteLossError(
            trainer.step,
            text=f"the loss is {metrics['loss']} over the steps up to {trainer.step}; lower the "
            f"learning rate (now {rate:g}), set max_grad_norm, or check the data. The checkpoints "
            f"in {self.folder / 'checkpoints'} are from before",
        )
