"""The optimizer to train with: the user's, one built by the user's function, or AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ModelError


def choose_optimizer(
    given: Any, model: nn.Module, config: MultiGPUConfig, say: Callable[[str], None]
) -> Optimizer:
    """`given` may be an optimizer of this model's parameters, a function of them, or None."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if given is None:
        say(
            f"optimizer: AdamW, lr {config.learning_rate:g}, weight decay "
            f"{config.weight_decay:g} (none given)"
        )
        return AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    built = given if isinstance(given, Optimizer) else given(parameters)
    if not isinstance(built, Optimizer):
        raise ModelError(f"optimizer gave a {type(built).__name__}, not a torch Optimizer")
    known = {id(p) for p in model.parameters()}
    strangers = [p for g in built.param_groups for p in g["params"] if id(p) not in known]
    if strangers:
        raise ModelError(
            f"the optimizer holds {len(strangers)} parameters that are not the model's; "
            "build it from this model's parameters, or give a function of them"
        )
    return built
