"""What measurements do to a trainer, one function each, so that nothing else reaches into it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from multi_gpu_training.distributed.batchnorm import SyncBatchNorm
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.trainer import MultiGPUTrainer

BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.SyncBatchNorm, SyncBatchNorm),
)
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def keep_gradients_local(trainer: MultiGPUTrainer) -> None:
    """Exchange no gradients from now on; replicas drift apart, as they must."""
    trainer.strategy.keep_gradients_local()


def watch_buckets(trainer: MultiGPUTrainer, ready: Callable[[int], None]) -> None:
    """Call `ready(bytes)` when a bucket of gradients is ready, and send nothing from now on."""
    trainer.strategy.watch_buckets(ready)


def run_eagerly(trainer: MultiGPUTrainer) -> None:
    """Compute every later step operation by operation, and free what recorded steps held."""
    if trainer.execution.active:
        trainer.execution.give_up("its steps are taken apart")


def leave_compiled(trainer: MultiGPUTrainer) -> None:
    """Run the loss as the user wrote it: every other shape would be compiled anew."""
    trainer.step_module.compiled = trainer.step_module.loss_fn


def watch_loss(trainer: MultiGPUTrainer, compute: Callable[[LossFn, nn.Module, Any], Any]) -> None:
    """Let `compute(loss_fn, model, batch)` run in place of the loss function, which it is given."""
    trainer.step_module.compiled = functools.partial(compute, trainer.step_module.loss_fn)


def execution_facts(trainer: MultiGPUTrainer) -> dict[str, Any]:
    """How steps are executed, and how many of them were replayed so far."""
    found = trainer.execution
    return {
        "mode": found.mode,
        "replayed": found.replayed,
        "steps": found.steps,
        "reason": found.reason,
    }


def ddp_times(trainer: MultiGPUTrainer) -> dict[str, float]:
    """Seconds that DDP itself logged; empty without DDP, or where it logged nothing."""
    return trainer.strategy.logged_times()


def loss_of(trainer: MultiGPUTrainer, batch: Any, samples: Tensor | None, count: int) -> Tensor:
    """The loss of `count` samples of this rank alone, ready for backward; no rank is talked to.

    `samples` are the numbers that augmentations draw their randomness from.
    """
    prepared = trainer.state.prepare(batch, samples)
    return trainer.step_module.forward(prepared, count, count, 1).scaled
