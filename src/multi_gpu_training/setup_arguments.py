"""What the user gives to set up a training: the arguments of `setup_training` and `prepare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import Data, ValData
from multi_gpu_training.data.sample_count import BatchSizeFn
from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.monitoring.loggers import Logger
from multi_gpu_training.safe_output import brief
from multi_gpu_training.training.activation_checkpointing import use_activation_checkpointing
from multi_gpu_training.training.callbacks import Callback, Hook
from multi_gpu_training.training.loss import takes
from multi_gpu_training.training.step_state import Augment
from multi_gpu_training.training.strategy.deferred_init import build_deferred


@dataclass(frozen=True)
class Given:
    """The arguments of `setup_training`, which explains them."""

    model: Any
    dataset: Data | None
    val_dataset: ValData | None
    loss_fn: Any
    optimizer: Any
    scheduler: Any
    eval_fn: Any
    augment: Augment | None
    callbacks: Sequence[Callback | Hook]
    loggers: Sequence[Logger]
    states: Mapping[str, Any]
    batch_size_fn: BatchSizeFn | None = None
    description: Mapping[str, Any] | None = None
    optimizers: Sequence[Optimizer] = ()  # where the user's loop calls backward
    schedulers: Sequence[LRScheduler] = ()  # which that loop advances


def check_given(given: Given) -> None:
    """Refuse what would fail much later, or under a name that says nothing."""
    model, augment, states = given.model, given.augment, given.states
    if not isinstance(model, nn.Module) and not (callable(model) and takes(model, 0)):
        kind = f"the class {model.__name__}" if isinstance(model, type) else brief(model)
        raise ModelError(
            f"{kind} is not a model; give a torch.nn.Module, or a function without arguments that "
            "builds one",
            code="MGT404",
        )
    if augment is not None and not (callable(augment) and takes(augment, 2)):
        raise ConfigError(f"augment={brief(augment)}: give a function augment(batch, random)")
    if not isinstance(states, Mapping) or not all(isinstance(name, str) for name in states):
        raise ConfigError(f"states={brief(states)}: give a dict of names and objects")


def build_model(model: Any, config: MultiGPUConfig, in_parts: bool = False) -> nn.Module:
    """The user's model, or what the user's function gives: the same on every rank. in_parts: large
    weights may be left to be computed later."""
    if not isinstance(model, nn.Module):
        torch.manual_seed(config.seed)
        model = build_deferred(model) if in_parts and callable(model) else model()
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if config.use_gradient_checkpointing:
        use_activation_checkpointing(model)
    return model
