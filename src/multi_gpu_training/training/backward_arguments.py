"""What `trainer.backward` of a loop with its own backward accepts, and how it refuses the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from multi_gpu_training.errors import ModelError
from multi_gpu_training.training.gradient_exchange import OptimizerGradients
from multi_gpu_training.training.metrics import Number


def checked_loss(loss: Any, needs_gradient: bool = True) -> Tensor:
    """The loss as a scalar, with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            f"trainer.backward got {found}; give a scalar loss, the mean over this rank's samples",
            code="MGT401",
        )
    if needs_gradient and not loss.requires_grad:
        raise ModelError(
            "the loss has no gradient; compute it from a model's output without .detach(), .item() "
            "or torch.no_grad()",
            code="MGT401",
        )
    return loss.reshape(())


def is_sum(reduction: str, weight: Any, slots: Sequence[OptimizerGradients]) -> bool:
    """Whether the loss is a sum over the samples, as all micro-batches of its step must be."""
    if reduction not in ("mean", "sum"):
        raise ModelError(f"trainer.backward got reduction={reduction!r}; give 'mean' or 'sum'")
    summed = reduction == "sum"
    if summed and weight is not None:
        raise ModelError(
            "trainer.backward got a weight with reduction='sum'; a weight is what a mean was "
            "divided by, so give the weight with a mean, or the sum alone"
        )
    if any(slot.open and slot.summed != summed for slot in slots):
        raise ModelError(
            "trainer.backward got a mean and a sum as micro-batches of one step (last=False); "
            "give all of them the same reduction, or end the first with last=True"
        )
    return summed


def plain_weight(weight: Number) -> Number:
    """A weight as a number if reading it does not wait for a GPU, otherwise as a double tensor."""
    try:
        if isinstance(weight, Tensor) and weight.is_cuda:
            return weight.detach().double().reshape(())
        found = float(weight)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not 0 <= found < math.inf:
        raise ModelError(
            f"trainer.backward(loss, weight={weight!r:.60}): give a number, 0 or more: what the "
            "mean was divided by, such as the number of tokens; or a tensor of the part of a batch "
            "that it is a mean over, as the loader or manager.shard gave it"
        )
    return found


def chosen_slots(
    optimizer: Optimizer | Sequence[Optimizer] | None, slots: list[OptimizerGradients]
) -> list[OptimizerGradients]:
    """The gradients that a backward for these optimizers adds to; without one, all."""
    if optimizer is None:
        return slots
    wanted = [optimizer] if not isinstance(optimizer, Sequence) else list(optimizer)
    if not all(isinstance(one, Optimizer) for one in wanted):
        raise ModelError(
            f"trainer.backward(loss, optimizer={optimizer!r:.60}): give an optimizer that "
            "manager.prepare got, or a list of them; a weight goes by its name, weight=..."
        )
    found = [slot for slot in slots if any(slot.optimizer is one for one in wanted)]
    if len(found) != len(wanted):
        raise ModelError(
            "trainer.backward got an optimizer that manager.prepare did not; give prepare all "
            f"of them (it has {', '.join(type(slot.optimizer).__name__ for slot in slots)})"
        )
    return found
