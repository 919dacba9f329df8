"""What measurements do to a trainer, one function each, so that nothing else reaches into it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

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


def leave_compiled(trainer: MultiGPUTrainer) -> None:
    """Run the loss as the user wrote it: every other shape would be compiled anew."""
    trainer.state.step_module.compiled = trainer.state.step_module.loss_fn


def watch_loss(trainer: MultiGPUTrainer, compute: Callable[[LossFn, nn.Module, Any], Any]) -> None:
    """Let `compute(loss_fn, model, batch)` run in place of the loss function, which it is given."""
    step_module = trainer.state.step_module
    step_module.compiled = functools.partial(compute, step_module.loss_fn)


def execution_facts(trainer: MultiGPUTrainer) -> dict[str, Any]:
    """How steps are executed, and how many of them were replayed so far."""
    found = trainer.execution
    return {
        "mode": found.mode,
        "replayed": found.replayed,
        "steps": found.steps,
        "reason": found.reason,
    }
