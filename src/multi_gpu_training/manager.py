"""`MultiGPUTrainingManager`: from a model and a dataset to a trained model, on all ranks.

A thin facade: `setup.py` builds the parts, `training/loop.py` is the loop.
"""

from __future__ import annotations

import importlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import (
    BatchSizes,
    Data,
    Loader,
    ValData,
    ValLoaders,
    count_steps,
)
from multi_gpu_training.data.own_batches import OwnBatches, shard
from multi_gpu_training.data.sample_count import BatchSizeFn
from multi_gpu_training.distributed.control import Control
from multi_gpu_training.distributed.placement import place
from multi_gpu_training.distributed.progress_slot import Phase, note_hang_limit, note_phase
from multi_gpu_training.distributed.signal_thread import SILENT_ENDS, end_on_signals
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.faults.fault_tolerance import FaultToleranceManager
from multi_gpu_training.launch.launcher import start_ranks_if_needed
from multi_gpu_training.measure.balance import Balance
from multi_gpu_training.measure.request import requested
from multi_gpu_training.monitoring.announce import summary
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.events import EventFile, StructuredLogger
from multi_gpu_training.monitoring.loggers import Logger, check_loggers
from multi_gpu_training.monitoring.profiling.step_tracer import ProfileRequest
from multi_gpu_training.monitoring.run_events import is_asked_for
from multi_gpu_training.monitoring.run_folder import RunFolder
from multi_gpu_training.run_records import Records
from multi_gpu_training.safe_output import brief, protect_output
from multi_gpu_training.setup import Training
from multi_gpu_training.setup_arguments import Given, check_given
from multi_gpu_training.training.callbacks import Callback, CallbackList, Hook, check_callbacks
from multi_gpu_training.training.compile_cache import keep_compile_cache
from multi_gpu_training.training.evaluation import EvalFn
from multi_gpu_training.training.loop import TrainingLoop
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.manual_optimization import ManualTrainer
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.precision import set_arithmetic
from multi_gpu_training.training.prediction import PredictFn, call_model, gather_outputs
from multi_gpu_training.training.prepared_parts import sort_out
from multi_gpu_training.training.progress import FitResult, Progress
from multi_gpu_training.training.rate_search import RateSearch, search_rate
from multi_gpu_training.training.step_state import Augment
from multi_gpu_training.training.stopping import end_control
from multi_gpu_training.training.trainer import TRAINERS

_MADE_BY_SETUP = frozenset(
    ("_training", "records", "fault_tolerance", "model", "loss_fn", "train_loader", "sizes")
    + ("control", "loop")
)


class _NotSetUpError(ConfigError, AttributeError):
    """Something was asked of a manager before it had a training."""


class SetupArguments(TypedDict, total=False):
    """The keyword arguments of `setup_training`, which `fit` takes as well."""

    loss_fn: Any
    optimizer: Optimizer | Callable[[Any], Optimizer] | None
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
    eval_fn: EvalFn | None
    augment: Augment | None
    callbacks: Sequence[Callback | Hook]
    loggers: Sequence[Logger]
    states: dict[str, Any] | None
    hooks: Sequence[Hook]
    batch_size_fn: BatchSizeFn | None
    description: Mapping[str, Any] | None


class MultiGPUTrainingManager:
    """Trains a model on all ranks.

        manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=32))
        manager.fit(model, dataset, val_dataset=val_dataset)

    or, keeping your own loop,

        model, train_loader, val_loader = manager.setup_training(model, dataset, val_dataset=...)
        for epoch in range(epochs):
            train_metrics = manager.train_epoch(train_loader, epoch)
            val_metrics = manager.validate_epoch(val_loader)

    or, with your own batches, `manager.trainer.train_step(batch)`; or, with your own backward and
    any number of optimizers,

        trainer = manager.prepare(generator, discriminator, opt_g, opt_d)
        with trainer.step():
            trainer.backward(loss, optimizer=opt_d)

    Create it early in the script. If no launcher started this process and there are several GPUs,
    it starts one rank per GPU, each of which runs the script, and supervises them.
    """

    def __init__(self, config: MultiGPUConfig | None = None) -> None:
        protect_output()
        if config is not None and not isinstance(config, MultiGPUConfig):
            raise ConfigError(
                f"MultiGPUTrainingManager takes a MultiGPUConfig, not {brief(config)}; write "
                "MultiGPUTrainingManager(MultiGPUConfig(batch_size=32, ...)). A YAML file is for "
                "`mgt train`"
            )
        self.config = config or MultiGPUConfig()
        self.config.check()
        self._measurement = requested()  # where mgt verify, bench, check or estimate started this
        if self._measurement is not None:
            self.config = self._measurement.adapt(self.config)
        traced = ProfileRequest.of(self.config)
        if traced is not None:
            self.config = traced.adapt(self.config)
        start_ranks_if_needed(self.config)
        end_on_signals(*SILENT_ENDS)
        keep_compile_cache()
        reproducible = self._measurement is not None and self._measurement.reproducible
        set_arithmetic(self.config, reproducible)
        self.placement = place(self.config)
        self.console = Console(self.placement.is_main, self.config.progress)
        self.logger = StructuredLogger(self.console, EventFile(None))
        self.callbacks = CallbackList(self)
        self.trainer = TRAINERS[self.config.training_mode](
            self.config,
            self.placement,
            callbacks=self.callbacks,
            say=self.say,
            told=lambda *fault: self._training.fault_tolerance.record_fault(*fault),
            snapshot_other_state=lambda: self._training.snapshot(),
            record=lambda kind, **facts: self.logger.record(kind, **facts),
            retract=lambda step: self._training.fault_tolerance.discard_after(step),
        )
        self.progress = Progress(self.config)
        self.balance = Balance(self.config, self.placement)
        self.recipe_options: dict[str, Any] = {}
        # What `setup_training` makes.
        self._training: Training
        self.records: Records
        self.fault_tolerance: FaultToleranceManager
        self.model: nn.Module
        self.loss_fn: LossFn
        self.train_loader: Loader
        self.val_loader: ValLoaders | None = None
        self.sizes: BatchSizes
        self.control: Control
        self.loop: TrainingLoop

    if not TYPE_CHECKING:  # else every name would pass for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in _MADE_BY_SETUP or hasattr(type(self), name):
                raise _NotSetUpError(
                    f"manager.{name} needs a training, but none is set up yet; call fit, "
                    "setup_training or prepare first"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Setting up

    def setup_training(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Data | None = None,
        val_dataset: ValData | None = None,
        *,
        loss_fn: Any = None,
        optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        eval_fn: EvalFn | Any = None,
        augment: Augment | None = None,
        callbacks: Sequence[Callback | Hook] = (),
        loggers: Sequence[Logger] = (),
        states: dict[str, Any] | None = None,
        hooks: Sequence[Hook] = (),
        batch_size_fn: BatchSizeFn | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> tuple[nn.Module, Loader, ValLoaders | None]:
        """Put the model on its device, split the data among ranks, and resume if asked to.

        Returns the model and this rank's loaders for training and validation. The third value is
        None without `val_dataset`, and a dict of loaders if you name several sets:
        {"clean": ..., "noisy": ...}.

        `model` may be a function that builds the model, `optimizer` a function of its parameters,
        `scheduler` a function of the optimizer. Without a `dataset`, your loop makes the batches
        for `train_step`.

        - `augment(batch, random)` changes training batches on the device; `random` draws numbers
          that belong to each sample (SampleRandom).
        - `eval_fn(model, batch, metrics)`, or torchmetrics objects, add validation metrics.
        - `states` are further objects with a `state_dict`, saved and restored with the run; use
          (object, "per_rank") for one that differs between ranks.
        - `batch_size_fn(batch)` counts the samples of your own batches if their shapes are
          ambiguous.
        - `description` goes into every checkpoint and tells `load` how to rebuild the model:
          {"model": "package.module:Net", "arguments": {...}, "labels": [...]}.
        - `hooks` is the old name of `callbacks`.
        """
        self._set_up(
            Given(
                model=model,
                dataset=dataset,
                val_dataset=val_dataset,
                loss_fn=loss_fn,
                optimizer=optimizer,
                scheduler=scheduler,
                eval_fn=eval_fn,
                augment=augment,
                callbacks=[*callbacks, *hooks] if hooks else callbacks,
                loggers=loggers,
                states=states or {},
                batch_size_fn=batch_size_fn,
                description=description,
            )
        )
        return self.model, self.train_loader, self.val_loader

    def prepare(
        self,
        *parts: nn.Module | Optimizer | LRScheduler,
        dataset: Data | None = None,
        val_dataset: ValData | None = None,
        loss_fn: Any = None,
        eval_fn: EvalFn | None = None,
        augment: Augment | None = None,
        callbacks: Sequence[Callback | Hook] = (),
        loggers: Sequence[Logger] = (),
        states: dict[str, Any] | None = None,
        batch_size_fn: BatchSizeFn | None = None,
    ) -> ManualTrainer:
        """Set up a training whose loop calls backward itself.

        Takes modules, any number of optimizers, and schedulers in any order. Modules are moved to
        the device and stay unwrapped. You advance the schedulers; they are saved with the run.
        With a `dataset`, iterate over `train_loader`. `loss_fn` and `eval_fn` serve validation;
        the other arguments are those of `setup_training`.
        """
        model, optimizers, schedulers = sort_out(parts)
        if self._measurement is not None:
            self._measurement.check_own_backward(len(optimizers))
        self._set_up(
            Given(
                model=model,
                dataset=dataset,
                val_dataset=val_dataset,
                loss_fn=loss_fn,
                optimizer=None,
                scheduler=None,
                eval_fn=eval_fn,
                augment=augment,
                callbacks=callbacks,
                loggers=loggers,
                states=states or {},
                batch_size_fn=batch_size_fn,
                optimizers=optimizers,
                schedulers=schedulers,
            )
        )
        assert self._training.manual is not None
        return self._training.manual

    def _set_up(self, given: Given) -> None:
        if hasattr(self, "_training"):
            raise ConfigError(
                "this manager has already set up a training; create another "
                "MultiGPUTrainingManager for the next one"
            )
        check_given(given)
        check_loggers(self.config, given.loggers)
        check_callbacks(given.callbacks)
        self._handled = sys.exception()  # somebody may train while handling an error
        options = self.recipe_options
        made = self._training = Training(
            self.trainer, self.console, self.progress, self.balance, self._measurement, options
        )
        try:
            self.logger, self.records = made.logger, made.records
            made.build(given)
            self.model, self.loss_fn, self.loop = made.model, made.loss_fn, made.loop
            self.train_loader, self.val_loader = made.train_loader, made.val_loader
            self.sizes, self.control = made.sizes, made.control
            self.fault_tolerance = made.fault_tolerance
            weakref.finalize(self, made.control.close)  # where nobody calls finish
            made.start(self)
        except BaseException:
            made.close()
            del self._training
            raise

    # Training

    def fit(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Data | None,
        val_dataset: ValData | None = None,
        *,
        epochs: int | None = None,
        **arguments: Unpack[SetupArguments],
    ) -> FitResult:
        """Train for `epochs` (default: the config's) and return the result.

        The other arguments are those of `setup_training`.
        """
        if dataset is None:
            raise DataError(
                "fit got no dataset; if your loop makes its own batches, use "
                "manager.setup_training(model) and manager.trainer.train_step(batch), or "
                "manager.prepare(model, optimizer) (docs/own-loop.md)"
            )
        if epochs is not None:
            self.config.epochs = epochs
        self.setup_training(model, dataset, val_dataset, **arguments)
        try:
            self.loop.run()
        finally:
            self.finish()
        return self.result()

    def train_epoch(self, train_loader: Iterable[Any], epoch: int) -> dict[str, float]:
        """Train one pass over the loader; return metrics over all ranks.

        If a resumed run has already finished this epoch, return its recorded metrics instead.
        """
        return self.loop.train_epoch(train_loader, epoch)

    def validate_epoch(self, val_loader: Iterable[Any] | None = None) -> dict[str, float]:
        """Evaluate on every sample of the loader once; return metrics over all ranks."""
        return self.loop.validate_epoch(val_loader)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Evaluate the model as it is now; return metrics over all ranks and record nothing.

        Every rank must call it. `data` is a dataset or DataLoader, each of whose samples counts
        once; a dict of several; or this rank's batches, such as val_loader. None: the validation
        data. With `ema_decay` or `swa_start`, this evaluates the averaged weights.
        """
        return self.loop.validation.evaluator.evaluate(self._evaluation_data(data, "evaluation"))

    def predict(self, data: Any = None, predict_fn: PredictFn | None = None) -> Any:
        """Return the outputs for all samples, in the order of the data, in host memory.

        Every rank must call it and gets the whole result. `data` is as in `evaluate`; if a
        DataLoader shuffles, outputs still come in the dataset's order.
        `predict_fn(model, batch)` returns tensors with one row per sample, lists with one entry
        per sample, or tuples and dicts of those. By default, the model is called with the batch
        without its last entry, the target; a batch that is a single tensor or dict is the input.
        """
        data = self._evaluation_data(data, "prediction", in_order=True)
        given = predict_fn or call_model
        if isinstance(data, Mapping):
            return {
                name: self.loop.validation.evaluator.predict(part, given)
                for name, part in data.items()
            }
        return self.loop.validation.evaluator.predict(data, given)

    def gather(self, outputs: Iterable[tuple[Any, Any]]) -> Any:
        """Collect the outputs of your own loop over `val_loader` from all ranks, in data order.

        Takes pairs of a batch and its outputs. Every rank must call it.
        """
        return gather_outputs(outputs, self.placement)

    @contextmanager
    def averaged_weights(self) -> Iterator[nn.Module]:
        """Give the model its averaged weights (`ema_decay`, `swa_start`) inside a `with` block.

        Changes nothing if no weights are averaged. Every rank must enter it.
        """
        with self.loop.validation.evaluator.ready_model() as model:
            yield model

    def _evaluation_data(self, data: Any, purpose: str, **how: Any) -> Any:
        if data is None:
            if self.val_loader is None:
                raise ConfigError(
                    f"there is no validation data for the {purpose}; give it a dataset, or "
                    "val_dataset to setup_training"
                )
            return self.val_loader
        if isinstance(data, Mapping):
            return {
                name: self._evaluation_data(part, purpose, **how) for name, part in data.items()
            }
        if isinstance(data, str | bytes):
            raise ConfigError(f"{brief(data)} is not data for the {purpose}; give a dataset")
        if isinstance(data, (Dataset, DataLoader)):
            return self._training.data.loaders_for(data, purpose, **how)
        return data

    def save_checkpoint(
        self, best: bool = False, wait: bool = True, *, score: dict[str, Any] | None = None
    ) -> Path:
        """Save the whole state now. Every rank must call it.

        When this returns, the state is safe on disk. With wait=False it returns as soon as the
        state is copied to the host, and a thread writes it. `score` says how good the state is,
        for `keep_best`.
        """
        return self.loop.saving.save(best, wait, score=score)

    def finish(self) -> None:
        """End the run: write its last checkpoint, summary and log, and call the callbacks.

        `fit` calls it; after your own loop, call it on every rank. If a signal came too late to
        stop the run, the process exits here. While an error of this run is being handled (in
        `except` or `finally`), the run counts as failed, and no rank waits for another.
        """
        note_phase(Phase.ENDING)
        try:
            if self._failure() is None:
                self._training.settle()
            else:  # the other ranks may be anywhere
                self.fault_tolerance.drain()
        finally:
            try:
                for call in self.callbacks.on_end:
                    call()
                events, folder = self._training.run_events, self.records.folder
                told = events.end(self.folder, self._failure())
                if self._failure() is None or is_asked_for(self._failure()):  # it may be restarted
                    summary(self.console, self.progress, self.config, self.step, folder, told)
                events.write_report(told, self.say, self._failure())
            finally:
                self._training.close(well=self._failure() is None)
                note_hang_limit(math.nan)  # what the user does now may take any time
                end_control(self.control, self._failure())

    def _failure(self) -> BaseException | None:
        """The error that is ending this run, if any; not one that somebody was handling already
        when it began."""
        error = sys.exception()
        return None if error is self._handled else error

    def _generate_comparison_report(self, results: Any = None, **options: Any) -> Any:
        """Guide 003's name for `comparison_report`: throughput, memory and quality of several
        trainings. Without `results`, of this run alone."""
        # By name, as it lies two layers above: only the guide expects it here.
        above = importlib.import_module("multi_gpu_training.planning.bench.run_comparison")
        return above.comparison_report([self.folder] if results is None else results, **options)

    def result(self) -> FitResult:
        return FitResult(
            metrics=self.progress.newest,
            best=self.progress.best,
            steps=self.step,
            folder=self.folder,
            history=self.progress.history,
        )

    # For callbacks and your own loop

    def shard(self, batch: Any) -> Any:
        """Return this rank's rows of a batch that every rank made alike, on its device.

        `train_step` and `trainer.step` know which part of the whole batch it is.
        """
        state, placement = self.trainer.state, self.placement
        size = state.count_samples(batch)
        share = state.own_share(batch)
        if self._training.manual is not None:
            share = replace(share, first=True, last=True)
        part, sample, share = shard(batch, size, share, placement)
        if isinstance(self.train_loader, OwnBatches):
            self.train_loader.keep_template(sample)
        if self._training.manual is not None:
            self._training.manual.sharded(share)
        return part

    def steps_per_epoch(self, dataset: Data | None = None) -> int | None:
        """Optimizer steps per epoch over `dataset`, before or after `setup_training`.

        Default: the training data. None if unknown: a stream without `steps_per_epoch`.
        """
        if dataset is None and hasattr(self, "_training"):
            return self.train_loader.steps
        return count_steps(dataset, self.config, self.placement, self.trainer.strategy.replicas)

    @contextmanager
    def main_process_first(self, per_host: bool = True) -> Iterator[None]:
        """Run a block on one rank of each machine first, then on the others: a download, a cache.

        per_host=False: on rank 0 first, if machines share their disks.
        """
        identity = self.placement.identity
        first = identity.local_rank == 0 if per_host else identity.is_main
        if not first:
            self.placement.barrier()
        try:
            yield
        finally:  # also after an error: the others would wait for nothing
            if first:
                self.placement.barrier()

    def find_learning_rate(
        self, lowest: float = 1e-7, highest: float = 1.0, steps: int = 100
    ) -> RateSearch:
        """Train a few steps at rising rates, suggest one, and restore the state from before.

        Call it after `setup_training`, on every rank.
        """
        if self._training.manual is not None:
            raise ConfigError("find_learning_rate takes train_step; after prepare, try rates in it")
        return search_rate(self.trainer, self.train_loader, lowest, highest, steps)

    @property
    def should_stop(self) -> bool:
        """True once max_steps is reached or early stopping ends the run."""
        return self.loop.stopping.should_stop

    @property
    def step(self) -> int:
        """Optimizer steps so far, including those before a resume."""
        return self.trainer.step

    @property
    def optimizer(self) -> Optimizer:
        return self.trainer.optimizer

    @property
    def run(self) -> RunFolder:
        """The run's folder, and the paths of the files in it."""
        return self.records.folder

    @property
    def folder(self) -> Path:
        return self.records.folder.path

    @property
    def evaluated(self) -> MetricsCollector:
        """The metrics that this rank collected in the last evaluation."""
        return self.loop.validation.evaluator.evaluated

    def log(self, **metrics: float | Tensor) -> None:
        """Send your own metrics to every logger, under the current step."""
        self.records.loggers.log(metrics, self.step)

    def say(self, text: str) -> None:
        """Print a line, on rank 0 only."""
        self.console.line(text)

    def show_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, on rank 0 only."""
        self.console.table(title, columns, rows)
