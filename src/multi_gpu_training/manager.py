"""`MultiGPUTrainingManager`: from a model and a dataset to a trained model, on all ranks.

A thin facade: `setup.py` builds the parts, `training/loop.py` is the loop.
"""

from __future__ import annotations

import math
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multi_gpu_training import setup
from multi_gpu_training.checkpoint.saver import Save
from multi_gpu_training.config import MultiGPUConfig, TrainingMode
from multi_gpu_training.data.feeding import BatchSizes, Data, Loader
from multi_gpu_training.data.loader import wait_for_no_worker
from multi_gpu_training.distributed.control import Control
from multi_gpu_training.distributed.placement import place
from multi_gpu_training.distributed.progress_slot import Phase, note_hang_limit, note_phase
from multi_gpu_training.distributed.signal_thread import end_on_signals
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.faults.fault_tolerance import FaultToleranceManager
from multi_gpu_training.launch.launcher import start_ranks_if_needed
from multi_gpu_training.measure.balance import Balance
from multi_gpu_training.measure.request import requested
from multi_gpu_training.monitoring.announce import announce, summary
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.events import EventFile, StructuredLogger
from multi_gpu_training.monitoring.loggers import Logger, check_loggers
from multi_gpu_training.monitoring.monitor import Monitor
from multi_gpu_training.monitoring.run_folder import RunFolder
from multi_gpu_training.safe_output import protect_output
from multi_gpu_training.training.callbacks import Callback, CallbackList, Hook
from multi_gpu_training.training.compile_cache import keep_compile_cache
from multi_gpu_training.training.evaluation import EvalFn
from multi_gpu_training.training.learning_rate import Scaling
from multi_gpu_training.training.loop import TrainingLoop
from multi_gpu_training.training.loss import LossFn, SupervisedLoss, choose_loss
from multi_gpu_training.training.metrics import EpochSums, MetricsCollector
from multi_gpu_training.training.oom import take_oom_hint
from multi_gpu_training.training.precision import set_arithmetic
from multi_gpu_training.training.progress import FitResult, Progress
from multi_gpu_training.training.step_state import Augment
from multi_gpu_training.training.stopping import end_control
from multi_gpu_training.training.trainer import (
    DataParallelTrainer,
    DistributedDataParallelTrainer,
    MultiGPUTrainer,
    SingleDeviceTrainer,
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
    where there are several GPUs, this process becomes the supervisor of one rank per GPU.
    """

    def __init__(self, config: MultiGPUConfig | None = None) -> None:
        protect_output()
        self.config = config or MultiGPUConfig()
        self.config.check()
        self._measurement = requested()  # where mgt verify, bench, check or estimate started this
        if self._measurement is not None:
            self.config = self._measurement.adapt(self.config)
        start_ranks_if_needed(self.config)
        end_on_signals(signal.SIGUSR1)
        keep_compile_cache()
        reproducible = self._measurement is not None and self._measurement.reproducible
        set_arithmetic(self.config, reproducible)
        self.placement = place(self.config)
        self.console = Console(self.placement.is_main, self.config.progress)
        self.logger = StructuredLogger(self.console, EventFile(None))
        self.trainer = TRAINERS[self.config.training_mode](self.config, self.placement)
        self.callbacks: CallbackList = CallbackList(self)
        self.trainer.callbacks = self.callbacks
        self.progress = Progress(self.config)
        self.balance = Balance(self.config, self.placement)
        self.recipe_options: dict[str, Any] = {}
        self.records: setup.Records
        self.fault_tolerance: FaultToleranceManager
        self.model: nn.Module
        self.loss_fn: LossFn
        self.scaling: Scaling
        self.train_loader: Loader
        self.val_loader: Loader | None = None
        self.sizes: BatchSizes
        self.loop: TrainingLoop
        self.control: Control
        self._monitor: Monitor

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
        callbacks: Sequence[Callback | Hook] = (),
        loggers: Sequence[Logger] = (),
        states: dict[str, Any] | None = None,
        hooks: Sequence[Hook] = (),
    ) -> tuple[nn.Module, Loader, Loader | None]:
        """Place the model, share out the data, and continue from a checkpoint where asked to.

        `model` may be a function that builds it, `optimizer` one that takes its parameters,
        `scheduler` one that takes the optimizer. `augment(batch, random)` changes training batches
        on the device; `random` gives numbers that belong to each sample (SampleRandom). Returns
        the model on its device and the loaders of this rank; without `val_dataset` the third is
        None. `states` are further objects with `state_dict`, saved and restored with the run;
        (object, "per_rank") for one that differs between ranks. `hooks` is the old name of
        `callbacks`.
        """
        if hasattr(self, "records"):
            raise ConfigError(
                "this manager has set up a training already; make another MultiGPUTrainingManager "
                "for another training"
            )
        check_loggers(self.config.loggers)
        self.records = setup.open_records(
            self.config, self.placement, self.console, self.recipe_options
        )
        self.logger = self.records.logger
        try:
            epoch_metrics = self._register(states or {})
            checkpoint = setup.find_checkpoint(self.config, self.fault_tolerance, self.say)
            self._build(
                model, dataset, val_dataset, loss_fn, optimizer, scheduler, augment, eval_fn
            )
            if checkpoint is not None:
                self._resume(checkpoint)
            self._settle_shares()
            setup.start_loggers(self.records, self.config, self.trainer, loggers)
            self.control = self._start_control()
            listeners = [*callbacks, *hooks]
            self.loop = self._build_loop(epoch_metrics, eval_fn, listeners, loss_fn is None)
            self.loop.saved_step = self.step if checkpoint is not None else None
            self._start(epoch_metrics)
        except BaseException:
            self._abandon()
            raise
        return self.model, self.train_loader, self.val_loader

    def _register(self, states: dict[str, Any]) -> MetricsCollector:
        """Decide what is saved with the run; the sums of the epoch under way, which are part of
        it."""
        self.fault_tolerance = self._open_checkpoints()
        epoch_metrics = MetricsCollector()
        sums = EpochSums(epoch_metrics, self.trainer.metrics), "per_rank"
        own = {"progress": self.progress, "shares": self.balance, "epoch_metrics": sums}
        setup.register_states(self.fault_tolerance, states, **own)
        return epoch_metrics

    def _build(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Data,
        val_dataset: Data | None,
        loss_fn: Any,
        optimizer: Any,
        scheduler: Any,
        augment: Augment | None,
        eval_fn: EvalFn | None,
    ) -> None:
        """Loaders, model, optimizer and schedule."""
        config, trainer = self.config, self.trainer
        trainer.augment = augment
        if self._measurement is not None:
            batch = config.global_batch_size or config.batch_size
            dataset = self._measurement.shorten(dataset, batch)
            val_dataset = self._measurement.shorten(val_dataset, batch)
        self.loss_fn = choose_loss(loss_fn)
        if isinstance(self.loss_fn, SupervisedLoss):
            self.loss_fn.look_at(dataset)
        setup.check_metric(config, self.loss_fn, eval_fn)
        self.train_loader, self.val_loader, self.sizes = setup.build_loaders(
            dataset, val_dataset, config, trainer
        )
        built = setup.build_model(model, config)
        if self._measurement is not None:
            self._measurement.prepare(built)
        trainer.loader = self.train_loader
        trainer.oom.whole = self.sizes.per_rank
        self.model = trainer.build(built, self.loss_fn)
        batch, epoch_steps = self.sizes.global_batch, self.train_loader.steps
        self.scaling = setup.build_optimization(
            trainer, optimizer, scheduler, config, batch, epoch_steps, self.say
        )
        setup.describe_run(
            self.fault_tolerance, config, self.recipe_options, trainer, self.train_loader, batch
        )
        facts = (self.sizes, self.train_loader, self.scaling, self.folder)
        announce(self.say, config, trainer, *facts)

    def _resume(self, checkpoint: Path) -> None:
        setup.resume(
            checkpoint,
            self.fault_tolerance,
            self.trainer,
            self.train_loader,
            self.sizes.global_batch,
            lambda: self.progress.epochs_done,
            setup.plain_options(self.recipe_options),
        )

    def _settle_shares(self) -> None:
        """How much each rank computes, and in how small parts. Collective."""
        trainer = self.trainer
        take_oom_hint(self.folder, trainer.oom, self.placement)
        if trainer.oom.parts > 1:
            self.say(trainer.oom.describe())
        loaders = self.train_loader, self.val_loader
        self.balance.settle(trainer, *loaders, self.logger, self.console.line)

    def _start(self, epoch_metrics: MetricsCollector) -> None:
        if self._measurement is not None:
            self.callbacks.extend(self._measurement.callbacks(self))
        self._start_execution(epoch_metrics)
        self._monitor = Monitor(
            self.config, self.trainer, self.sizes, self.train_loader, self.logger
        )
        self.callbacks.add(self._monitor)
        for call in self.callbacks.on_setup:
            call()

    def _abandon(self) -> None:
        """Setting up failed: let go of the folder, threads and signals."""
        if hasattr(self, "_monitor"):
            self._monitor.stop()
        if hasattr(self, "control"):
            self.control.close()
        if hasattr(self, "fault_tolerance"):
            self.fault_tolerance.saver.close()
        self.records.close()
        self.trainer.execution.leave_stream()
        del self.records

    def _open_checkpoints(self) -> FaultToleranceManager:
        folder = self.records.folder
        kept = FaultToleranceManager(
            self.config,
            self.placement,
            self.trainer,
            self.logger,
            folder.checkpoints,
            folder.hosts,
            lambda: setup.rolling_back(self.trainer),
        )
        kept.saver.on_saved = self._checkpoint_is_safe
        setup.tell_faults(self.trainer, kept, folder.path, self.callbacks)
        return kept

    def _start_control(self) -> Control:
        """Listen for signals; before every step of the trainer is a boundary. Collective."""
        control = Control(self.placement, self.config.grace_s)
        alive = weakref.ref(self)

        def on_stop() -> None:
            found = alive()
            assert found is not None
            found.loop.stop()

        control.on_stop = on_stop
        control.on_leave = wait_for_no_worker
        self.trainer.boundary = control
        control.listen()
        weakref.finalize(self, control.close)  # where nobody calls finish
        return control

    def _build_loop(
        self,
        epoch_metrics: MetricsCollector,
        eval_fn: EvalFn | None,
        callbacks: Sequence[Callback | Hook],
        loss_was_chosen: bool,
    ) -> TrainingLoop:
        config, trainer, loader = self.config, self.trainer, self.train_loader
        log, wait = setup.build_log(
            config,
            trainer,
            loader,
            self.records,
            epoch_metrics,
            self.sizes.global_batch,
            self.fault_tolerance,
            lambda metrics: self.loop.check_finite(metrics),
        )
        chosen = self.loss_fn if loss_was_chosen else None
        setup.add_callbacks(
            self.callbacks,
            callbacks,
            log,
            wait,
            self.records,
            config,
            trainer,
            self.console,
            loader,
            chosen if isinstance(chosen, SupervisedLoss) else None,
        )
        return TrainingLoop(
            config=config,
            trainer=trainer,
            callbacks=self.callbacks,
            progress=self.progress,
            checkpoints=setup.RunCheckpoints(self.fault_tolerance),
            log=log,
            control=self.control,
            train_loader=loader,
            val_loader=self.val_loader,
            loss_fn=self.loss_fn,
            eval_fn=eval_fn,
            epoch_metrics=epoch_metrics,
            facts=self._checkpoint_facts,
            renew_shares=self.balance.renew,
            record=self.logger.record,
            folder=self.folder,
        )

    def _start_execution(self, epoch_metrics: MetricsCollector) -> None:
        """Let steps be recorded where they can be, and say how to take recorded ones back."""
        execution = self.trainer.execution
        execution.say = self.say
        execution.steps_left = self.loop.steps_left
        execution.snapshot_more = setup.state_keeper(self.fault_tolerance, epoch_metrics)
        execution.start()
        self.trainer.nan_guard.start()

    # Training

    def fit(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Data,
        val_dataset: Data | None = None,
        *,
        epochs: int | None = None,
        **arguments: Any,
    ) -> FitResult:
        """Train for `epochs` (default: the config's) and return what came out.

        Takes what `setup_training` takes.
        """
        if epochs is not None:
            self.config.epochs = epochs
        self.setup_training(model, dataset, val_dataset, **arguments)
        try:
            self.loop.run()
        finally:
            self.finish()
        return self.result()

    def train_epoch(self, train_loader: Iterable[Any], epoch: int) -> dict[str, float]:
        """Train one pass over the loader; returns metrics over all ranks.

        An epoch that a resumed run has finished already is not trained again: its recorded
        metrics are returned.
        """
        return self.loop.train_epoch(train_loader, epoch)

    def validate_epoch(self, val_loader: Iterable[Any] | None = None) -> dict[str, float]:
        """Evaluate on every sample of the loader, once; returns metrics over all ranks."""
        return self.loop.validate_epoch(val_loader)

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Metrics of the model as it is on any batches, over all ranks; records nothing."""
        return self.loop.evaluate(loader)

    def save_checkpoint(
        self, best: bool = False, wait: bool = True, *, score: dict[str, Any] | None = None
    ) -> Path:
        """Save the whole state now; when this returns it is safe on the disk. Every rank must
        call it. With wait=False training may go on once the state is copied to the host; it is
        written beside training. `score` says how good it is, for `keep_best`."""
        return self.loop.save_checkpoint(best, wait, score=score)

    def finish(self) -> None:
        """End the run: its last checkpoint, summary, log, callbacks. `fit` calls it; after your
        own loop, call it on every rank. A signal that came too late to stop the run ends the
        process here."""
        note_phase(Phase.ENDING)
        saver = self.fault_tolerance.saver
        try:
            if sys.exception() is None:
                self.trainer.execution.verify()  # the weights of your own loop, too
                self.trainer.nan_guard.look(now=True)
                self.loop.log.flush()
                saver.settle()
            else:  # the other ranks may be anywhere
                saver.drain()
        finally:
            try:
                for call in self.callbacks.on_end:
                    call()
                summary(self.console, self.progress, self.config, self.step, self.records.folder)
                self._monitor.end(self.folder, self.say)
            finally:
                self._close()
                note_hang_limit(math.nan)  # what the user does now may take any time
                end_control(self.control)

    def _close(self) -> None:
        self.fault_tolerance.saver.close()
        self.records.close()
        self.trainer.execution.leave_stream()

    def result(self) -> FitResult:
        return FitResult(
            metrics=self.progress.newest,
            best=self.progress.best,
            steps=self.step,
            folder=self.folder,
            history=self.progress.history,
        )

    # For callbacks and your own loop

    @property
    def should_stop(self) -> bool:
        """True once max_steps is reached or early stopping has seen enough."""
        return self.loop.should_stop

    @property
    def step(self) -> int:
        """Optimizer steps so far, those before a resume included."""
        return self.trainer.step

    @property
    def optimizer(self) -> Optimizer:
        return self.trainer.optimizer

    @property
    def run(self) -> RunFolder:
        """The run's folder, with the paths of what is in it."""
        return self.records.folder

    @property
    def folder(self) -> Path:
        return self.records.folder.path

    @property
    def evaluated(self) -> MetricsCollector:
        """What this rank collected in the last evaluation."""
        return self.loop.evaluated

    def log(self, **metrics: float | Tensor) -> None:
        """Send your own metrics to every logger, under the current step."""
        self.records.loggers.log(metrics, self.step)

    def say(self, text: str) -> None:
        """Show a line, on the main rank."""
        self.console.line(text)

    def show_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table, on the main rank."""
        self.console.table(title, columns, rows)

    # Parts

    def _checkpoint_facts(self) -> dict[str, Any]:
        options = setup.plain_options(self.recipe_options)
        return {"global_batch_size": self.sizes.global_batch, "options": options}

    def _checkpoint_is_safe(self, save: Save) -> None:
        """On rank 0, between steps: the files of an earlier `save_checkpoint` are on the disk."""
        score = save.captured.manifest.get("score")
        if save.best and score is not None:
            value = f"{score['metric']} {score['value']:.4f}"
            self.say(f"  saved best model: {save.path} ({value})")
        for call in self.callbacks.on_checkpoint:
            call(save.path)
