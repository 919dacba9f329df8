"""The optimizer to train with, and whether its step can be recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
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


# Those with a step that never leaves the GPU. SGD only as one kernel: its others read the rate.
_WITH_FLAG = (
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)


def optimizer_obstacle(optimizer: Optimizer) -> str | None:
    """Why an optimizer's step cannot be recorded; None if it can."""
    kind = type(optimizer)
    if kind is optim.SGD and all(group.get("fused") for group in optimizer.param_groups):
        return None
    if kind in _WITH_FLAG and not any(g.get("differentiable") for g in optimizer.param_groups):
        return None
    return f"{kind.__name__} is not known to run without the CPU"


def make_capturable(optimizer: Optimizer) -> None:
    """Keep the counters of an optimizer on the GPU, where a recorded step can move them."""
    for group in optimizer.param_groups:
        if "capturable" not in group or not group["params"][0].is_cuda:
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor):
                optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)
