"""Let a small model learn from a large one: the scores of a teacher are part of the loss.

The student sees what its own loss shows it, augmentation included; a hook on its forward hears the
inputs and hands them to the teacher. So it fits every loss that calls the model once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.training.loss import Loss, LossFn, SupervisedLoss, read_loss

TEMPERATURE = 3.0
SHARE = 0.7


class Teacher:
    """Adds `share` of the teacher's opinion to a loss. Hinton, Vinyals and Dean 2015: at a higher
    temperature, the small scores of wrong classes say what the teacher finds similar."""

    def __init__(
        self, model: nn.Module, temperature: float = TEMPERATURE, share: float = SHARE
    ) -> None:
        if temperature <= 0 or not 0 < share <= 1:
            raise ConfigError(
                f"temperature={temperature:g}, share={share:g}: use a temperature above 0, and a "
                "share of the teacher above 0 and up to 1"
            )
        self.model = model.eval().requires_grad_(False)
        self.temperature, self.share = temperature, share

    def teach(self, student: nn.Module, own_loss: Callable[[], Any]) -> Loss:
        """The loss of one batch; without gradients, as in validation, the student's own alone."""
        device = next(student.parameters()).device
        if not torch.is_grad_enabled():
            return read_loss(own_loss(), device)
        calls: list[tuple[Any, Any, Any]] = []
        hook = student.register_forward_hook(
            lambda _, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
        )
        try:
            loss = read_loss(own_loss(), device)
        finally:
            hook.remove()
        if len(calls) != 1:
            raise ModelError(
                f"distillation needs a loss that calls the model once per batch; this one calls "
                f"it {len(calls)} times"
            )
        args, kwargs, output = calls[0]
        if next(self.model.parameters()).device != device:
            self.model.to(device)
        with torch.no_grad():
            taught = self.model(*args, **kwargs)
        distance = self.distance(scores(output), scores(taught), _counted(output, kwargs))
        mean = self.share * distance + (1 - self.share) * loss.mean
        return Loss(mean, loss.weight, loss.metrics)

    def distance(self, student: Tensor, teacher: Tensor, counted: Tensor | None) -> Tensor:
        """KL divergence of the student's from the teacher's scores, a mean over positions."""
        if student.shape != teacher.shape:
            raise ModelError(
                f"the student's scores have shape {tuple(student.shape)}, the teacher's "
                f"{tuple(teacher.shape)}; they must have the same classes and positions"
            )
        t = self.temperature
        apart = F.kl_div(
            F.log_softmax(student.float() / t, -1),
            F.log_softmax(teacher.float() / t, -1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        # The gradient shrinks with the square of the temperature.
        if counted is None:
            return apart.mean() * t**2
        return torch.where(counted, apart, 0.0).sum() / counted.sum().clamp(min=1) * t**2


class Distillation:
    """Any loss function with a teacher beside it."""

    def __init__(self, loss_fn: LossFn, teacher: Teacher) -> None:
        self.loss_fn, self.teacher = loss_fn, teacher

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        return self.teacher.teach(model, lambda: self.loss_fn(model, batch))


class SupervisedDistillation(SupervisedLoss):
    """The usual loss with a teacher beside it: validation still counts accuracy and F1."""

    def __init__(self, loss_fn: SupervisedLoss, teacher: Teacher) -> None:
        super().__init__(loss_fn.criterion)
        self.teacher = teacher

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        own = super().__call__
        return self.teacher.teach(model, lambda: own(model, batch))


def with_teacher(loss_fn: LossFn, teacher: Teacher) -> LossFn:
    if isinstance(loss_fn, SupervisedLoss):
        return SupervisedDistillation(loss_fn, teacher)
    return Distillation(loss_fn, teacher)


def scores(output: Any) -> Tensor:
    """The scores of classes in what a model returned."""
    found = getattr(output, "logits", output[0] if isinstance(output, tuple | list) else output)
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.ndim < 2:
        raise ModelError(
            f"distillation needs a model that returns scores of classes, not a "
            f"{type(output).__name__}"
        )
    return found


def _counted(output: Any, kwargs: Any) -> Tensor | None:
    """Which positions are no padding: by a model's own lengths, or its attention mask."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor):
        found, lengths = output
        if found.ndim == 3 and lengths.shape == found.shape[:1] and not lengths.is_floating_point():
            inside: Tensor = torch.arange(found.shape[1], device=found.device) < lengths[:, None]
            return inside
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == scores(output).shape[:-1]:
        return mask.bool()
    return None
