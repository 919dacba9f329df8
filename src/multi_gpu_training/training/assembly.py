"""What `setup_training` is given, made ready: records, loaders, model, optimizer, schedule."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import Data, training_loader, validation_loader
from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.monitoring.announce import announce
from multi_gpu_training.monitoring.log import EventFile, StructuredLogger
from multi_gpu_training.monitoring.run_folder import open_run
from multi_gpu_training.monitoring.tensorboard import Curves
from multi_gpu_training.reliability.fault_tolerance import FaultToleranceManager
from multi_gpu_training.training.evaluation import EvalFn
from multi_gpu_training.training.learning_rate import choose_schedule, scale_rate
from multi_gpu_training.training.loss import SupervisedLoss, choose_loss
from multi_gpu_training.training.optimizer import choose_optimizer
from multi_gpu_training.training.recompute import use_recompute
from multi_gpu_training.training.resuming import EpochSums

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager


def open_records(manager: MultiGPUTrainingManager, states: dict[str, Any]) -> None:
    """The run's folder, its events and curves, and everything that is saved with it."""
    identity = manager.placement.identity
    manager.run = open_run(manager.config, manager.placement, manager.recipe_options)
    manager.events = EventFile(
        manager.run.events(identity.rank),
        run=manager.run.path.name,
        attempt=identity.attempt,
        rank=identity.rank,
        world_size=identity.world_size,
    )
    manager.logger = StructuredLogger(manager.console, manager.events)
    curves = manager.run.tensorboard if manager.config.tensorboard and identity.is_main else None
    manager.curves = Curves(curves)
    manager.fault_tolerance = FaultToleranceManager(
        manager.config,
        manager.placement,
        manager.trainer,
        manager.logger,
        manager.run.checkpoints,
        manager.run.disks,
    )
    manager.fault_tolerance.saver.on_saved = manager._checkpoint_is_safe
    manager.trainer.memory.told = partial(manager.fault_tolerance.record_fault, "out_of_memory")
    manager.trainer.finite.told = partial(manager.fault_tolerance.record_fault, "nonfinite")
    manager.fault_tolerance.register("progress", manager.progress)
    manager.fault_tolerance.register("shares", manager.balance)
    manager.fault_tolerance.register(
        "epoch_metrics", EpochSums(manager._epoch_metrics, manager.trainer.metrics), "per_rank"
    )
    for name, item in states.items():
        manager.fault_tolerance.register(name, *(item if isinstance(item, tuple) else (item,)))


def assemble(
    manager: MultiGPUTrainingManager,
    model: Any,
    dataset: Data,
    val_dataset: Data | None,
    loss_fn: Any,
    optimizer: Any,
    scheduler: Any,
    eval_fn: EvalFn | None,
) -> None:
    """Loaders, model, optimizer, schedule: what `setup_training` is given, made ready."""
    config, trainer, placement = manager.config, manager.trainer, manager.placement
    measurement = manager.measurement
    if measurement is not None:
        batch = config.global_batch_size or config.batch_size
        dataset = measurement.shorten(dataset, batch)
        val_dataset = measurement.shorten(val_dataset, batch)
    manager.loss_fn = choose_loss(loss_fn)
    if isinstance(manager.loss_fn, SupervisedLoss):
        manager.loss_fn.look_at(dataset)
    _check_metric(manager.config, manager.loss_fn, eval_fn)
    manager.train_loader, manager.sizes = training_loader(
        dataset, config, placement, trainer.replicas
    )
    if val_dataset is not None:
        manager.val_loader = validation_loader(val_dataset, config, placement, manager.sizes)
    manager.eval_fn = eval_fn
    manager._announce_loss = isinstance(manager.loss_fn, SupervisedLoss) and loss_fn is None
    if not isinstance(model, nn.Module):
        torch.manual_seed(config.seed)
    built = model if isinstance(model, nn.Module) else model()
    if not isinstance(built, nn.Module):
        raise ModelError(f"model is a {type(built).__name__}; give a torch.nn.Module")
    if config.use_gradient_checkpointing:
        use_recompute(built)
    if measurement is not None:
        measurement.prepare(built)
    trainer.loader = manager.train_loader
    trainer.memory.whole = manager.sizes.per_rank
    manager.model = trainer.build(built, manager.loss_fn)
    trainer.take_optimizer(choose_optimizer(optimizer, manager.model, config, manager.console.line))
    if trainer.gate_note:
        manager.console.line(trainer.gate_note)
    manager.scaling = scale_rate(trainer.optimizer, config, manager.sizes.global_batch)
    trainer.schedule = choose_schedule(
        scheduler, trainer.optimizer, config, manager.scaling, manager.train_loader.steps
    )
    announce(manager)


def _check_metric(config: MultiGPUConfig, loss_fn: Any, eval_fn: EvalFn | None) -> None:
    """A metric that the built-in evaluation never gives is an error before training."""
    known = {"loss", "accuracy", "f1"}
    asked = config.best_metric
    if eval_fn is None and isinstance(loss_fn, SupervisedLoss) and asked not in {None, *known}:
        raise ConfigError(
            f"best_metric={asked!r} is unknown; without an eval_fn there are "
            f"{', '.join(sorted(known))}"
        )
