"""Builds what the training loop needs: records, data, model, resumed state, callbacks.

`MultiGPUTrainingManager.setup_training` calls these in order. Everything gets its parts as
arguments; nothing gets the manager.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multi_gpu_training.checkpoint.changed_settings import RunDescription, may_resume_anyway
from multi_gpu_training.checkpoint.integrity import read_manifest
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_file import storable
from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.feeding import (
    BatchSizes,
    Data,
    Loader,
    training_loader,
    validation_loader,
)
from multi_gpu_training.data.order import FormsBatches
from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError, ConfigError, ModelError
from multi_gpu_training.faults.fault_tolerance import FaultToleranceManager
from multi_gpu_training.faults.policies import RESTART
from multi_gpu_training.monitoring.announce import LossAnnouncement
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.events import EpochEvents, EventFile, StructuredLogger
from multi_gpu_training.monitoring.input_wait import InputWait
from multi_gpu_training.monitoring.loggers import LoggedRun, Logger, LoggerList, open_loggers
from multi_gpu_training.monitoring.progress_bar import ProgressBar, ProgressLines
from multi_gpu_training.monitoring.run_folder import RunFolder, open_run
from multi_gpu_training.monitoring.sampling import StepSampler
from multi_gpu_training.monitoring.spikes import LossSpikes
from multi_gpu_training.monitoring.step_log import IntervalLog
from multi_gpu_training.training.activation_checkpointing import use_activation_checkpointing
from multi_gpu_training.training.callbacks import Callback, CallbackList, Hook, TrainingFault
from multi_gpu_training.training.evaluation import EvalFn
from multi_gpu_training.training.learning_rate import Scaling, choose_schedule, scale_rate
from multi_gpu_training.training.loss import LossFn, SupervisedLoss
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.oom import leave_oom_hint
from multi_gpu_training.training.optimizer import choose_optimizer
from multi_gpu_training.training.replica_check import ReplicaCheck
from multi_gpu_training.training.trainer import MultiGPUTrainer

# Records


@dataclass
class Records:
    """The folder of a run and what is written into it while it trains."""

    folder: RunFolder
    events: EventFile
    logger: StructuredLogger
    loggers: LoggerList

    def close(self) -> None:
        self.loggers.close()
        self.events.close()
        self.folder.close()


def open_records(
    config: MultiGPUConfig,
    placement: Placement,
    console: Console,
    recipe_options: Mapping[str, Any],
) -> Records:
    """Choose, make and lock the run's folder, and open its events. Collective."""
    folder = open_run(config, placement, recipe_options)
    identity = placement.identity
    events = EventFile(
        folder.events(identity.rank),
        folder.make_again,
        run=folder.path.name,
        attempt=identity.attempt,
        rank=identity.rank,
        world_size=identity.world_size,
    )
    return Records(folder, events, StructuredLogger(console, events), LoggerList())


def start_loggers(
    records: Records, config: MultiGPUConfig, trainer: MultiGPUTrainer, given: Sequence[Logger]
) -> None:
    """Open the loggers that the config names, and take those that the user gives. Call it once
    the run is resumed: a logger may drop what will be logged again."""
    main = trainer.placement.is_main
    run = LoggedRun(records.folder.path, config, main, trainer.step, records.events)
    names = ["jsonl", *(["tensorboard"] if config.tensorboard else []), *config.loggers]
    records.loggers.loggers += [*open_loggers(names, run), *(given if main else ())]


# Data and model


def build_loaders(
    dataset: Data,
    val_dataset: Data | None,
    config: MultiGPUConfig,
    trainer: MultiGPUTrainer,
) -> tuple[Loader, Loader | None, BatchSizes]:
    """This rank's loaders, and how a global batch is made up."""
    placement = trainer.placement
    loader, sizes = training_loader(dataset, config, placement, trainer.replicas)
    validation = None
    if val_dataset is not None:
        validation = validation_loader(val_dataset, config, placement, sizes)
    if config.validate_every is not None and validation is None:
        raise ConfigError(
            f"validate_every={config.validate_every}, but there is no val_dataset; give one, or "
            "drop validate_every"
        )
    return loader, validation, sizes


def build_model(model: Any, config: MultiGPUConfig) -> nn.Module:
    """The user's model, or what the user's function gives: the same on every rank."""
    if not isinstance(model, nn.Module):
        torch.manual_seed(config.seed)
        model = model()
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if config.use_gradient_checkpointing:
        use_activation_checkpointing(model)
    return model


def build_optimization(
    trainer: MultiGPUTrainer,
    optimizer: Any,
    scheduler: Any,
    config: MultiGPUConfig,
    global_batch: int,
    epoch_steps: int | None,
    say: Callable[[str], None],
) -> Scaling:
    """Give the trainer its optimizer and schedule; how the learning rate was scaled."""
    trainer.take_optimizer(choose_optimizer(optimizer, trainer.model, config, say))
    if trainer.gate_note:
        say(trainer.gate_note)
    scaling = scale_rate(trainer.optimizer, config, global_batch)
    trainer.schedule = choose_schedule(scheduler, trainer.optimizer, config, scaling, epoch_steps)
    return scaling


def describe_run(
    fault_tolerance: FaultToleranceManager,
    config: MultiGPUConfig,
    options: Mapping[str, Any],
    trainer: MultiGPUTrainer,
    loader: Loader,
    global_batch: int,
) -> None:
    """Let checkpoints record what the run is made of, and a resume compare it."""
    fault_tolerance.state.description = RunDescription(
        config, plain_options(options), trainer.optimizer, trainer.schedule, loader, global_batch
    )


def check_metric(config: MultiGPUConfig, loss_fn: LossFn, eval_fn: EvalFn | None) -> None:
    """A metric that the built-in evaluation never gives is an error before training."""
    known = {"loss", "accuracy", "f1"}
    asked = config.best_metric
    if eval_fn is None and isinstance(loss_fn, SupervisedLoss) and asked not in {None, *known}:
        raise ConfigError(
            f"best_metric={asked!r} is unknown; without an eval_fn there are "
            f"{', '.join(sorted(known))}"
        )


# Resuming


def find_checkpoint(
    config: MultiGPUConfig, fault_tolerance: FaultToleranceManager, say: Callable[[str], None]
) -> Path | None:
    """Where to continue from, if anywhere. Its global batch is kept: on another number of ranks a
    batch_size per rank would give another one, and another order of samples."""
    path = fault_tolerance.find(config.resume)
    if path is None:
        if config.resume is None:
            fault_tolerance.refuse_to_overwrite()
        return None
    saved = read_manifest(path).get("global_batch_size")
    if saved is not None and config.global_batch_size is None:
        config.global_batch_size = int(saved)
        say(f"continuing with the run's global batch of {saved} samples per step")
    return path


def resume(
    checkpoint: Path,
    fault_tolerance: FaultToleranceManager,
    trainer: MultiGPUTrainer,
    loader: Loader,
    global_batch: int,
    epochs_done: Callable[[], int],
    options: dict[str, Any],
) -> None:
    """Bring back the state of a checkpoint, and its place in the data. Collective."""
    try:
        fault_tolerance.resume(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_changed_options(options, checkpoint)}") from None
    saved = read_manifest(checkpoint).get("global_batch_size")
    if saved is not None and saved != global_batch:
        trainer.position = _place(trainer, loader, saved, global_batch, epochs_done())
    loader.seek(trainer.epoch, trainer.position)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's own options, as a checkpoint keeps them."""
    plain: dict[str, Any] = json.loads(json.dumps(storable(options), default=str))
    return plain


def _changed_options(have: dict[str, Any], checkpoint: Path) -> str:
    """In words, the recipe's options that the checkpoint's run had and this one does not."""
    had = read_manifest(checkpoint).get("options") or {}
    changed = [name for name, value in had.items() if have.get(name) != value]
    if not changed:
        return ""
    then = ", ".join(f"{name}={had[name]}" for name in changed)
    now = ", ".join(f"{name}={have.get(name)}" for name in changed)
    return f"\nThat run had {then}; this one has {now}"


def _place(
    trainer: MultiGPUTrainer, loader: Loader, saved: int, size: int, epochs_done: int
) -> int:
    """With another global batch than the checkpoint's: the step right behind what it has seen."""
    if may_resume_anyway(trainer.config):  # samples may come twice, or not at all
        return min(trainer.position * saved // size, loader.steps or trainer.position)
    if isinstance(getattr(loader, "dataset", None), FormsBatches):
        # Batches of another size are other batches: only the end of an epoch is in both.
        if epochs_done <= trainer.epoch:
            raise ConfigError(
                f"the checkpoint stands at step {trainer.position} of an epoch of batches of "
                f"{saved}; with global_batch_size={size} this dataset forms other batches: "
                f"continue with global_batch_size={saved}, from the end of an epoch, or with "
                "--resume-anyway"
            )
        return loader.steps or 0
    seen = trainer.position * saved
    samples = getattr(getattr(loader, "source", None), "samples", None)
    if samples is not None and loader.steps is not None and seen >= samples:
        return loader.steps  # the epoch was done
    if seen % size:
        raise ConfigError(
            f"the checkpoint stands {seen} samples into an epoch, which "
            f"global_batch_size={size} does not divide; continue with "
            f"global_batch_size={saved}, as it was, from the end of an epoch, or with "
            "--resume-anyway"
        )
    return seen // size


# Callbacks


class RunCheckpoints:
    """The checkpoints of a run, as the loop knows them."""

    def __init__(self, fault_tolerance: FaultToleranceManager) -> None:
        self._kept = fault_tolerance

    def due(self, step: int) -> bool:
        return self._kept.due(step)

    def poll(self) -> None:
        self._kept.saver.poll()

    def save(self, facts: dict[str, Any], best: bool, wait: bool) -> Path:
        return self._kept.save(facts, best, wait)

    def settle(self) -> None:
        self._kept.saver.settle()

    def recover(self, error: Exception) -> None:
        self._kept.handle_error(error, aloud=False)

    def skips(self, batch: Any) -> bool:
        skipped = self._kept.skipped_batches
        return bool(skipped.places) and skipped.holds(share_of(batch))


def build_log(
    config: MultiGPUConfig,
    trainer: MultiGPUTrainer,
    loader: Loader,
    records: Records,
    epoch_metrics: MetricsCollector,
    global_batch: int,
    fault_tolerance: FaultToleranceManager,
    check_finite: Callable[[dict[str, float]], None],
) -> tuple[IntervalLog, InputWait]:
    """The log of the steps, and the watch on how long they wait for data."""
    resident = isinstance(loader, ResidentLoader)
    wait = InputWait(trainer.placement.device, resident, records.logger.info)
    spikes = LossSpikes(config.on_loss_spike, fault_tolerance.record_fault)
    fault_tolerance.register("loss_spikes", spikes)
    log = IntervalLog(
        config, trainer, trainer.callbacks, epoch_metrics, global_batch, wait, spikes, check_finite
    )
    return log, wait


def add_callbacks(
    callbacks: CallbackList,
    given: Sequence[Callback | Hook],
    log: IntervalLog,
    wait: InputWait,
    records: Records,
    config: MultiGPUConfig,
    trainer: MultiGPUTrainer,
    console: Console,
    loader: Loader,
    loss: SupervisedLoss | None,
) -> None:
    """All callbacks of a run, in the order in which events reach them."""
    if not isinstance(loader, ResidentLoader):  # data on the device are never waited for
        callbacks.add(wait)
    shown = ProgressBar if console.style == "bar" and console.main else ProgressLines
    callbacks.add(shown(console, lambda: trainer.position, lambda: loader.steps))
    callbacks.add(EpochEvents(records.logger))
    if loss is not None:
        callbacks.add(LossAnnouncement(loss, callbacks))
    callbacks.extend(given)
    # What a callback of the user did to the weights is looked at in the same step.
    if config.consistency_check_every:
        callbacks.add(ReplicaCheck(trainer, config.consistency_check_every))
    callbacks.add(records.loggers)
    if config.monitor:
        callbacks.add(StepSampler(trainer, records.logger.record, wait, lambda: log.step_s))
    callbacks.add(log)


def state_keeper(
    fault_tolerance: FaultToleranceManager, epoch_metrics: MetricsCollector
) -> Callable[[], Callable[[], None]]:
    """For recorded steps that may be taken back: what a step changes beside the trainer's own
    state. Returns a function that takes a copy, and returns a function that restores it."""

    def keep() -> Callable[[], None]:
        metrics, states = epoch_metrics.kept(), fault_tolerance.kept()

        def put_back() -> None:
            epoch_metrics.put_back(metrics)
            states()

        return put_back

    return keep


def register_states(
    fault_tolerance: FaultToleranceManager, states: Mapping[str, Any], **own: Any
) -> None:
    """Save and restore these with the run; (object, "per_rank") where ranks differ."""
    taken = sorted(states.keys() & own.keys())
    if taken:
        raise ConfigError(f"states={taken}: the run itself uses these names; choose others")
    for name, item in {**own, **states}.items():
        fault_tolerance.register(name, *(item if isinstance(item, tuple) else (item,)))


def tell_faults(
    trainer: MultiGPUTrainer,
    fault_tolerance: FaultToleranceManager,
    folder: Path,
    callbacks: CallbackList,
) -> None:
    """Let what the step mends by itself be recorded like every other fault, and let callbacks
    know of all of them."""
    trainer.oom.told = partial(fault_tolerance.record_fault, "out_of_memory")
    trainer.nan_guard.told = partial(fault_tolerance.record_fault, "nonfinite")

    def tell(fault: TrainingFault) -> None:
        if fault.kind == "out_of_memory" and fault.action == RESTART:
            leave_oom_hint(folder, trainer.oom)  # for the ranks that will be started again
        for call in callbacks.on_fault:
            call(fault)

    fault_tolerance.on_fault.append(tell)


@contextmanager
def rolling_back(trainer: MultiGPUTrainer) -> Iterator[None]:
    """Drop the step under way before a checkpoint is loaded, and start afresh after it."""
    memory = trainer.oom.state_dict()
    trainer.forget_step()
    yield
    trainer.oom.load_state_dict(memory)  # what was learned since the checkpoint stays
    trainer.execution.went_back()
    trainer.nan_guard.start()
