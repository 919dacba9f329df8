"""The end of an epoch: add up its metrics, then record it, judge it and save."""

from __future__ import annotations

from dataclasses import dataclass

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training.callbacks import CallbackList, StepLog
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.saving import Saving
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


@dataclass(frozen=True)
class TrainedEpoch:
    """An epoch whose steps are done; its validation, if there is one, closes it."""

    number: int
    metrics: dict[str, float]
    whole: bool  # False where max_steps cut it short: a resumed run continues inside it


@dataclass
class EpochEnd:
    """Ends epochs. Every rank must make the same calls."""

    config: MultiGPUConfig
    trainer: MultiGPUTrainer
    callbacks: CallbackList
    progress: Progress
    saving: Saving
    log: StepLog
    metrics: MetricsCollector  # of the current epoch, over the steps logged so far

    def add_up(self, epoch: int, unattended: bool) -> dict[str, float]:
        """The metrics of all steps, over all ranks. unattended: the next epoch follows at once,
        without a validation or code of the user's loop in between."""
        trainer, config = self.trainer, self.config
        # While the device computes the last steps, copy what they will give: allowed only if
        # nothing changes the state before it is saved.
        unchanged = unattended and self.callbacks.only_watch(BETWEEN_EPOCHS)
        ahead = unchanged and config.enable_fault_tolerance and not trainer.strategy.syncs_buffers
        copy = self.saving.checkpoints.copy_ahead if ahead else None
        # The order matters: undo wrongly recorded steps, then log what is still on its way from
        # the device, then count the rest towards the epoch's metrics.
        trainer.execution.verify(spare=True, meanwhile=copy)
        self.log.end_epoch()
        trainer.strategy.sync_buffers()  # of ranks that ran out of samples before the epoch ended
        self.metrics.merge(trainer.collect_metrics())
        trainer.state.metrics.reset()
        trainer.execution.close_window()
        metrics = self.metrics.compute(trainer.placement)
        trainer.nan_guard.look(now=True)  # here, because the device is awaited anyway
        if not metrics and config.on_nonfinite == "skip":
            text = f"every step of epoch {epoch + 1} was skipped: no gradient of it was finite"
            raise NonFiniteLossError(trainer.step, text=text)
        trainer.check_loss(metrics, self.saving.folder)
        if config.consistency_check_every:
            trainer.check_replicas()
        return metrics

    def close(self, epoch: TrainedEpoch, val: dict[str, float] | None = None) -> None:
        """Record an epoch, compare it with the best, call the callbacks and save."""
        judged = epoch.metrics if val is None else val
        better = self.progress.finish_epoch(epoch.metrics, val, epoch.whole)
        if epoch.whole:
            self.metrics.reset()  # not earlier: a run may stop during validation
            deciding = self.progress.of_deciding_set(judged)
            self.trainer.state.schedule.after_epoch(deciding)
        for call in self.callbacks.on_epoch_end:
            call(epoch.number, judged)
        if self.config.enable_fault_tolerance:
            self.saving.save(best=better, wait=False, score=self.progress.score(judged))
