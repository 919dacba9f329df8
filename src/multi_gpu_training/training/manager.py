"""The manager: from a model and a dataset to a trained model, on as many ranks as there are."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multi_gpu_training.config import MultiGPUConfig, TrainingMode
from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.feeding import (
    BatchSizes,
    Data,
    Loader,
)
from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.distributed.control import Control, LeaveWait
from multi_gpu_training.distributed.launch import start_ranks_if_needed
from multi_gpu_training.distributed.listening import end_on_signals
from multi_gpu_training.distributed.placement import place
from multi_gpu_training.distributed.rank_main import install_error_hook
from multi_gpu_training.distributed.replicas import check_replicas
from multi_gpu_training.distributed.whereabouts import (
    INPUT,
    Phase,
    note_hang_limit,
    note_phase,
    note_step,
)
from multi_gpu_training.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteLossError,
)
from multi_gpu_training.measure.balance import Balance
from multi_gpu_training.measure.request import requested
from multi_gpu_training.monitoring.announce import epoch_line, summary
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.interval import IntervalLog
from multi_gpu_training.monitoring.log import EventFile, StructuredLogger
from multi_gpu_training.monitoring.observer import Observer
from multi_gpu_training.monitoring.run_folder import RunFolder
from multi_gpu_training.monitoring.tensorboard import Curves
from multi_gpu_training.reliability.fault_tolerance import FaultToleranceManager
from multi_gpu_training.reliability.saving import Save
from multi_gpu_training.safe_output import protect_output
from multi_gpu_training.training.assembly import assemble, open_records
from multi_gpu_training.training.callbacks import Callback, CallbackList, Hook
from multi_gpu_training.training.data_parallel import DataParallelTrainer
from multi_gpu_training.training.distributed_data_parallel import DistributedDataParallelTrainer
from multi_gpu_training.training.evaluation import EvalFn, evaluate
from multi_gpu_training.training.learning_rate import Scaling
from multi_gpu_training.training.loss import SupervisedLoss
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.precision import set_arithmetic
from multi_gpu_training.training.progress import FitResult, Progress
from multi_gpu_training.training.reminder import recall
from multi_gpu_training.training.resuming import find_checkpoint, go_on_from, plain_options
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.stopping import end_control, start_control, validation_batches
from multi_gpu_training.training.trainer import (
    Augment,
    MultiGPUTrainer,
    SingleDeviceTrainer,
    opened,
)

TRAINERS: dict[TrainingMode, type[MultiGPUTrainer]] = {
    TrainingMode.SINGLE: SingleDeviceTrainer,
    TrainingMode.DATA_PARALLEL: DataParallelTrainer,
    TrainingMode.DISTRIBUTED_DATA_PARALLEL: DistributedDataParallelTrainer,
}


class MultiGPUTrainingManager:
    """Places this process, and trains a model over all ranks.

        manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=32))
        manager.fit(model, dataset, val_dataset=val_dataset)

    or, keeping your own loop,

        model, train_loader, val_loader = manager.setup_training(model, dataset, val_dataset=...)
        for epoch in range(epochs):
            train_metrics = manager.train_epoch(train_loader, epoch)
            val_metrics = manager.validate_epoch(val_loader)

    or, with your own batches, `manager.trainer.train_step(batch)`. Started without a launcher
    where several GPUs are there, this process becomes the supervisor of one rank a GPU.
    """

    def __init__(self, config: MultiGPUConfig | None = None) -> None:
        protect_output()
        install_error_hook()
        self.config = config or MultiGPUConfig()
        self.config.check()
        self.measurement = requested()
        if self.measurement is not None:
            self.config = self.measurement.adapt(self.config)
        start_ranks_if_needed(self.config)
        end_on_signals(signal.SIGUSR1)
        reproducible = self.measurement is not None and self.measurement.reproducible
        set_arithmetic(self.config, reproducible)
        self.placement = place(self.config)
        self.console = Console(self.placement.is_main, self.config.progress)
        self.logger = StructuredLogger(self.console, EventFile(None))
        self.trainer = TRAINERS[self.config.training_mode](self.config, self.placement)
        self.progress = Progress(self.config)
        self.balance = Balance(self.config, self.placement)
        self.callbacks: CallbackList = CallbackList(self)
        self.trainer.callbacks = self.callbacks
        self.recipe_options: dict[str, Any] = {}
        self.events: EventFile
        self.curves: Curves
        self.model: nn.Module
        self.loss_fn: Any
        self.eval_fn: EvalFn | None
        self.scaling: Scaling
        self.train_loader: Loader
        self.val_loader: Loader | None = None
        self.run: RunFolder
        self.sizes: BatchSizes
        self.fault_tolerance: FaultToleranceManager
        self.observer: Observer
        self.control: Control
        self.saved_step: int | None = None
        self.evaluated = MetricsCollector()  # this rank's part of the last evaluation
        self._epoch_metrics = MetricsCollector()
        self._epoch_is_whole = True
        self._announce_loss = False
        self._pending: tuple[int, dict[str, float]] | None = None
        self._asked_epoch: int | None = None
        self._started = time.perf_counter()

    # Setting up

    def setup_training(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Data,
        val_dataset: Data | None = None,
        *,
        loss_fn: Any = None,
        optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        eval_fn: EvalFn | None = None,
        augment: Augment | None = None,
        callbacks: Sequence[Callback] = (),
        hooks: Sequence[Hook] = (),
        states: dict[str, Any] | None = None,
    ) -> tuple[nn.Module, Loader, Loader | None]:
        """Place the model, share out the data, and go on from a checkpoint where asked to.

        `model` may be a function that builds it, `optimizer` one that takes its parameters,
        `scheduler` one that takes the optimizer. `augment(batch, random)` changes training batches
        on the device; `random` gives numbers that belong to each sample (SampleRandom). Returns
        the model on its device and the loaders of this rank; without `val_dataset` the third is
        None. `states` are further objects with `state_dict`, saved and restored with the run;
        (object, "per_rank") for one that differs between ranks.
        """
        open_records(self, states or {})
        try:
            checkpoint = find_checkpoint(self)
            self.trainer.augment = augment
            given = (model, dataset, val_dataset, loss_fn, optimizer, scheduler, eval_fn)
            assemble(self, *given)
            if checkpoint is not None:
                go_on_from(self, checkpoint)
            recall(self.run.path, self.trainer.memory, self.placement)
            if self.trainer.memory.parts > 1:
                self.console.line(self.trainer.memory.describe())
            self.balance.settle(
                self.trainer, self.train_loader, self.val_loader, self.logger, self.console.line
            )
        except BaseException:
            self._close()
            raise
        self.saved_step = self.trainer.step if checkpoint is not None else None
        self.control = start_control(self)
        self.callbacks.extend([*callbacks, *hooks])
        if self.measurement is not None:
            self.callbacks.extend(self.measurement.callbacks(self))
        self._start_execution()
        for call in self.callbacks.on_setup:
            call()
        return self.model, self.train_loader, self.val_loader

    def _start_execution(self) -> None:
        """Let steps be recorded where they can be, and say how to take recorded ones back."""
        execution = self.trainer.execution
        execution.say = self.console.line
        execution.steps_left = self._steps_left
        execution.snapshot_more = self._keep_rest
        execution.start()
        self.trainer.finite.start()
        self._log = IntervalLog(self)
        self.observer = Observer(self)

    def _steps_left(self) -> int | None:
        total = self.train_loader.steps
        ends = [] if total is None else [total * self.config.epochs]
        ends += [] if self.config.max_steps is None else [self.config.max_steps]
        return min(ends) - self.trainer.step if ends else None

    def _keep_rest(self) -> Callable[[], None]:
        """What a step changes beside the trainer's own state; the result puts it back."""
        epoch_metrics = self._epoch_metrics.kept()
        states = self.fault_tolerance.kept()

        def put_back() -> None:
            self._epoch_metrics.put_back(epoch_metrics)
            states()

        return put_back

    def fit(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Data,
        val_dataset: Data | None = None,
        *,
        epochs: int | None = None,
        **setup: Any,
    ) -> FitResult:
        """Train for `epochs` (default: the config's) and return what came out.

        Takes what `setup_training` takes.
        """
        if epochs is not None:
            self.config.epochs = epochs
        self.setup_training(model, dataset, val_dataset, **setup)
        epoch = self.progress.epochs_done
        try:
            while epoch < self.config.epochs and not (self._is_over or self.progress.exhausted):
                try:
                    self.train_epoch(self.train_loader, epoch)
                except EarlierEpoch as back:
                    epoch = back.epoch
                    continue
                if self.val_loader is not None:
                    self.validate_epoch(self.val_loader)
                epoch += 1
        finally:
            self.finish()
        return self.result()

    def finish(self) -> None:
        """End the run: its last checkpoint, summary, curves, hooks. `fit` calls it; after your
        own loop, call it on every rank. A signal that came too late to stop the run ends the
        process here."""
        note_phase(Phase.ENDING)
        try:
            if sys.exception() is None:
                self.trainer.execution.verify()  # the weights of a loop of one's own, too
                self.trainer.finite.look(now=True)
                self.fault_tolerance.saver.settle()
            else:  # the other ranks may be anywhere
                self.fault_tolerance.saver.drain()
        finally:
            for call in self.callbacks.on_end:
                call()
            summary(self)
            self.observer.end()
            self._close()
            note_hang_limit(math.nan)  # what the user does now may take any time
            end_control(self)

    def _close(self) -> None:
        self.curves.close()
        self.fault_tolerance.saver.close()
        self.events.close()
        self.run.close()
        self.trainer.execution.leave_stream()

    @property
    def optimizer(self) -> Optimizer:
        return self.trainer.optimizer

    @property
    def step(self) -> int:
        """Optimizer steps so far, those before a resume included."""
        return self.trainer.step

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.path

    def say(self, text: str) -> None:
        """Show a line, on the main rank."""
        self.console.line(text)

    def log(self, **metrics: float | Tensor) -> None:
        """Give metrics of your own to every logger, under the current step."""
        values = {name: float(value) for name, value in metrics.items()}
        self.logger.record("metrics", step=self.trainer.step, **values)
        self.curves.write("own", values, self.trainer.step)

    def show_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table, on the main rank."""
        self.console.table(title, columns, rows)

    @property
    def should_stop(self) -> bool:
        """True once max_steps is reached or early stopping has seen enough."""
        return self._has_all_steps or self.progress.exhausted

    @property
    def _has_all_steps(self) -> bool:
        return self.config.max_steps is not None and self.trainer.step >= self.config.max_steps

    @property
    def _is_over(self) -> bool:
        """Whether max_steps is reached, and the epoch of the last step is recorded."""
        progress = self.progress
        recorded = progress.unfinished is not None or progress.epochs_done > self.trainer.epoch
        return self._has_all_steps and recorded

    def result(self) -> FitResult:
        last = self.progress.last
        return FitResult(
            metrics=last["val"] or last["train"],
            best=self.progress.best,
            steps=self.trainer.step,
            folder=self.run.path,
            history=self.progress.history,
        )

    # The loop

    def train_epoch(self, train_loader: Iterable[Any], epoch: int) -> dict[str, float]:
        """Train one pass over the loader; returns metrics over all ranks.

        An epoch that a resumed run has finished already is not trained again: its recorded
        metrics are returned.
        """
        self._asked_epoch = epoch
        if epoch < self.progress.epochs_done:
            return self.progress.history[epoch]["train"]
        if self._is_over:
            return self.progress.last["train"]
        self._finish_pending()
        loader = self.train_loader if train_loader is self.train_loader else None
        if loader is not None and loader.epoch != epoch:
            loader.seek(epoch)
        if loader is not None:
            self.balance.renew()
        total = loader.steps if loader is not None else None
        self.console.start_bar(f"Epoch {epoch + 1}/{self.config.epochs}", total)
        self.model.train()
        self._log.start_epoch(total)
        self.trainer.execution.mark()
        while True:
            try:
                if self._has_all_steps:  # it was ended before the epoch was recorded
                    self._epoch_is_whole = total is not None and self.trainer.position >= total
                else:
                    self._epoch_is_whole = True
                    self.progress.unfinished = None  # it goes on
                    self._train_on(_batches(train_loader), total)
                return self._end_of_epoch(epoch)
            except Exception as error:
                self.fault_tolerance.handle_error(error, aloud=False)  # back: it rolled back
            self._go_back(epoch)

    def _go_back(self, epoch: int) -> None:
        """The state of a checkpoint was brought back: go on from its place in the data."""
        self.train_loader.seek(self.trainer.epoch, self.trainer.position)
        self._log.went_back()
        if self.progress.epochs_done != epoch:
            raise EarlierEpoch(self.progress.epochs_done, epoch)
        if self.train_loader.epoch != epoch:
            self.train_loader.seek(epoch)

    def _train_on(self, batches: Iterable[Any], total: int | None) -> None:
        trainer, wait, control = self.trainer, self._log.wait, self.control
        passed_over = self.fault_tolerance.passed_over
        step = trainer.step + 1  # the one that an error belongs to
        try:
            wait.ask()
            control.waiting = True
            for batch in batches:
                control.waiting = False
                wait.got()
                if passed_over.places and passed_over.holds(share := share_of(batch)):
                    assert share is not None
                    trainer.pass_over(share)
                    wait.ask()
                    continue
                result = trainer.train_step(batch)
                wait.used()
                if self._announce_loss:
                    self._say_loss(opened(batch))
                if result.moved and self._after_step(result):
                    self._epoch_is_whole = total is not None and trainer.position >= total
                    break
                step = trainer.step + 1
                if control.ends_next and result.moved:
                    control.arrive()
                note_phase(INPUT)
                wait.ask()
                control.waiting = result.moved
            control.waiting = False
        except LeaveWait:
            control.arrive()
        except Exception as error:
            note_step(step)
            error.add_note(self._where(step))
            raise
        finally:
            self.console.end_bar()

    def validate_epoch(self, val_loader: Iterable[Any] | None = None) -> dict[str, float]:
        """Evaluate on every sample of the loader, once; returns metrics over all ranks."""
        loader = val_loader if val_loader is not None else self.val_loader
        if loader is None:
            raise ConfigError("validate_epoch needs a loader; give val_dataset to setup_training")
        own = loader is self.val_loader
        recorded = self.progress.record_of(self._asked_epoch) if own else None
        if self._pending is None and recorded is not None:
            return recorded["val"]
        note_phase(Phase.VALIDATION)
        metrics = self.evaluate(validation_batches(self, loader))
        note_phase(Phase.EPOCH)
        if self._pending is not None:
            epoch, train = self._pending
            self._pending = None
            self._finish_epoch(epoch, train, metrics)
        return metrics

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Metrics of the model as it is on any batches, over all ranks; records nothing."""
        self.trainer.execution.verify()
        if self.config.broadcast_buffers:
            self.placement.broadcast_tensors(self.model.buffers())
        transform = self.trainer.transform
        collected = evaluate(
            self.model,
            loader if transform is None else map(transform, loader),
            self.loss_fn,
            self.eval_fn,
            self.trainer.precision,
            self.placement.device,
        )
        self.evaluated = collected
        return collected.compute(self.placement)

    def save_checkpoint(
        self, best: bool = False, wait: bool = True, *, score: dict[str, Any] | None = None
    ) -> Path:
        """Save the whole state now; when this returns it is safe on the disk. Every rank must
        call it. With wait=False training may go on once the state is copied to the host; it is
        written beside training. `score` says how good it is, for `keep_best`."""
        note_phase(Phase.CHECKPOINT)
        self.trainer.execution.verify()
        self.trainer.finite.look(now=True)  # finds a NaN before it is saved
        self.trainer.read_metrics()
        facts = {"metrics": self._last_metrics(), "global_batch_size": self.sizes.global_batch}
        facts["options"] = plain_options(self)
        if score is not None:
            facts["score"] = score
        with self.observer.checkpoint():
            path = self.fault_tolerance.save(facts, best, wait)
        self.saved_step = self.trainer.step
        return path

    def _checkpoint_is_safe(self, save: Save) -> None:
        """On rank 0, between steps: the files of an earlier `save_checkpoint` are on the disk."""
        score = save.captured.manifest.get("score")
        if save.best and score is not None:
            value = f"{score['metric']} {score['value']:.4f}"
            self.console.line(f"  saved best model: {save.path} ({value})")
        for call in self.callbacks.on_checkpoint:
            call(save.path)

    # Parts of the loop

    def _after_step(self, result: StepResult) -> bool:
        """What happens between steps; True to end the epoch here."""
        step = self.trainer.step
        self.fault_tolerance.saver.poll()
        self.console.tick(self.trainer.position)
        saving = self.fault_tolerance.due(step)
        self._log.after_step(result, saving)  # finds a NaN before it is saved
        every = self.config.consistency_check_every
        if every and step % every == 0:
            check_replicas(self.model, self.placement, step)
        if saving:
            self.save_checkpoint(wait=False)
        return self._has_all_steps

    def check_finite(self, metrics: dict[str, float]) -> None:
        if not math.isfinite(metrics.get("loss", 0.0)):
            self.trainer.execution.verify()  # they know more
            self.trainer.finite.look(now=True)
            rate = float(self.trainer.optimizer.param_groups[0]["lr"])
            raise NonFiniteLossError(
                self.trainer.step,
                text=f"the loss is {metrics['loss']} over the steps up to {self.trainer.step}; "
                f"lower the learning rate (now {rate:g}), set max_grad_norm, or check the data. "
                f"The checkpoints in {self.run.checkpoints} are from before",
            )

    def check_finite_now(self) -> None:
        """Of the steps that were not logged yet. Collective."""
        self._log.finish()
        self.check_finite(self.trainer.read_metrics().compute(self.placement))

    def _end_of_epoch(self, epoch: int) -> dict[str, float]:
        note_phase(Phase.EPOCH)
        self.trainer.execution.verify()
        self._log.end_epoch()
        self._epoch_metrics.merge(self.trainer.read_metrics())
        self.trainer.metrics.reset()
        metrics = self._epoch_metrics.compute(self.placement)
        self.trainer.finite.look(now=True)  # here, where the device is waited for anyway
        if not metrics and self.config.on_nonfinite == "skip":
            text = f"every step of epoch {epoch + 1} was skipped: no gradient of it was finite"
            raise NonFiniteLossError(self.trainer.step, text=text)
        self.check_finite(metrics)
        if self.config.consistency_check_every:
            check_replicas(self.model, self.placement, self.trainer.step)
        if self.val_loader is None:
            self._finish_epoch(epoch, metrics, None)
        else:
            self._pending = (epoch, metrics)
        return metrics

    def _finish_epoch(
        self, epoch: int, train: dict[str, float], val: dict[str, float] | None
    ) -> None:
        whole = self._epoch_is_whole
        better = self.progress.finish_epoch(train, val, whole)
        if whole:
            self._epoch_metrics.reset()  # not before: a run may stop in the validation
            self.trainer.schedule.after_epoch(val or train)
        self.console.line(epoch_line(epoch, self.config.epochs, train, val))
        self.logger.record("epoch", epoch=epoch, step=self.trainer.step, train=train, val=val)
        if val is not None:
            self.curves.write("val", val, self.trainer.step)
        for call in self.callbacks.on_epoch_end:
            call(epoch, val or train)
        if self.config.enable_fault_tolerance:
            self.save_checkpoint(best=better, wait=False, score=self.progress.score(val or train))

    def _finish_pending(self) -> None:
        """An epoch that was trained but not validated is done all the same."""
        if self._pending is not None:
            epoch, train = self._pending
            self._pending = None
            self._finish_epoch(epoch, train, None)

    def _say_loss(self, batch: Any) -> None:
        self._announce_loss = False
        if isinstance(self.loss_fn, SupervisedLoss):
            self.console.line(self.loss_fn.describe(batch))

    def _where(self, step: int) -> str:
        identity = self.placement.identity
        return f"(rank {identity.rank} on {identity.host}, step {step}, run {self.run.path})"

    def _last_metrics(self) -> dict[str, float]:
        last = self.progress.last
        return last["val"] or last["train"]


class EarlierEpoch(CheckpointError):
    """The state of an earlier epoch was brought back. `fit` goes on there; a loop of the user's
    own cannot."""

    def __init__(self, epoch: int, asked: int) -> None:
        self.epoch = epoch
        super().__init__(
            f"the last intact checkpoint is of epoch {epoch + 1}, and this is epoch {asked + 1}; "
            "start the run again with --resume auto"
        )


def _batches(loader: Iterable[Any]) -> Iterable[Any]:
    """What to iterate over: data on the GPU is gathered inside the step."""
    return loader.batches() if isinstance(loader, ResidentLoader) else loader
