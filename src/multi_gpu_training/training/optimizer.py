"""The optimizer to train with, and whether its step can be recorded as a CUDA graph."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim import AdamW, Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ModelError
from multi_gpu_training.training.learning_rate import holds_doubles


def choose_optimizer(
    given: Any,
    model: nn.Module,
    config: MultiGPUConfig,
    say: Callable[[str], None],
    of_loss: Sequence[nn.Parameter] = (),
) -> Optimizer:
    """`given` may be an optimizer of this model's parameters, a function of them, or None.
    of_loss: parameters of the criterion, trained as well unless `given` leaves them out."""
    parameters = [*(p for p in model.parameters() if p.requires_grad), *of_loss]
    if given is None:
        say(
            f"optimizer: AdamW (the default), lr {config.learning_rate:g}, weight decay "
            f"{config.weight_decay:g}"
        )
        return AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    # No Optimizer is callable, so a callable is a function of the parameters.
    built = given(parameters) if callable(given) else given
    if isinstance(built, (list, tuple, dict)):
        raise ModelError(
            f"optimizer is a {type(built).__name__} of {len(built)}; fit and train_step have one "
            "optimizer: put the parameters into groups of one, or keep them all in your own loop "
            "with manager.prepare(model, *optimizers) and trainer.backward (docs/own-loop.md)"
        )
    if not isinstance(built, Optimizer):
        raise ModelError(f"optimizer gave a {type(built).__name__}, not a torch Optimizer")
    if needs_closure(built):
        raise ModelError(
            f"{type(built).__name__} computes the loss several times per step, in a closure, which "
            "fit and train_step do not support; use an optimizer whose step() takes no closure, or "
            "your own loop with manager.prepare(model, optimizer) (docs/own-loop.md)"
        )
    return built


def check_several(optimizers: Sequence[Optimizer], config: MultiGPUConfig) -> None:
    """Refuse optimizers that a loop with its own backward cannot train exactly."""
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers, 1):
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if seen & own:
            raise ModelError(
                f"optimizer {number} ({type(optimizer).__name__}) holds {len(seen & own)} "
                "parameters of an earlier one; give each parameter to one optimizer"
            )
        seen |= own
        clips = [n for n in ("max_grad_norm", "max_grad_value") if getattr(config, n) is not None]
        if clips and needs_closure(optimizer):
            raise ModelError(
                f"{type(optimizer).__name__} searches along the gradient, which {clips[0]} would "
                f"change under it; drop {clips[0]}"
            )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` requires a closure, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is None:
        return False
    if closure.default is inspect.Parameter.empty or isinstance(optimizer, optim.LBFGS):
        return True
    try:  # the usual SAM has a default that its first line rejects
        source = inspect.getsource(inspect.unwrap(type(optimizer).step))
    except (OSError, TypeError):
        return False
    return bool(re.search(r"assert closure\b|if (not closure|closure is None):\s*raise", source))


# Optimizers whose step never leaves the GPU. SGD only when fused: its other forms read the rate.
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
    if any(g.get("fused") and holds_doubles(g) for g in optimizer.param_groups):
        return f"{kind.__name__}(fused=True) takes its rate in float32, beside weights in float64"
    if kind is optim.SGD and all(group.get("fused") for group in optimizer.param_groups):
        return None
    if kind in _WITH_FLAG and not any(g.get("differentiable") for g in optimizer.param_groups):
        return None
    return f"{kind.__name__} is not known to run without the CPU"


def make_capturable(optimizer: Optimizer) -> None:
    """Keep the counters of an optimizer on the GPU, where a recorded step can advance them.

    Adam computes its bias correction in the counters' type, which must be the parameters'.
    """
    for group in optimizer.param_groups:
        if "capturable" not in group or not group["params"][0].is_cuda:
            continue
        group["capturable"] = True
        kind = torch.float64 if holds_doubles(group) else torch.float32
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim == 0:
                    to = kind if key == "step" else value.dtype
                    optimizer.state[parameter][key] = value.to(parameter.device, to)
