"""Sum gradients over ranks right after a backward, without a wrapper around the model.

DDP expects one backward per forward and the same parameters in each. A loop with several losses and
optimizers guarantees neither, so its gradients are exchanged here, per optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ModelError
from multi_gpu_training.training.metrics import Number

BUCKET = 2**24  # elements sent at a time, which bounds the size of the gradients' copy


class GradientExchange:
    """Sums of gradients over the ranks of a placement. Every rank must make the same calls."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def mean(
        self, parameters: Sequence[Tensor], unit: Number, weight: Number, numbers: Sequence[Number]
    ) -> Tensor:
        """Replace each gradient by the sum over ranks of `unit` x gradient, divided by the sum of
        `weight`. Returns the sums of `numbers`.

        A gradient that is None on every rank stays None. If only some ranks have one, the others
        count as zero. Counters sent along say which case it is, and only a rank that lacks a
        gradient reads them.
        """
        present = [parameter.grad is not None for parameter in parameters]
        sparse = sum(p.grad is not None and p.grad.is_sparse for p in parameters)
        if sparse:
            raise ModelError(
                f"{sparse} gradients are sparse (nn.Embedding(sparse=True)), which a loop with its "
                "own backward cannot exchange between ranks; use sparse=False, or train_step",
                code="MGT403",
            )
        # Added in float32 at least: sums over many ranks would be rounded again and again in bf16.
        exact = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        kind = torch.float64 if exact else torch.float32
        device = self._placement.device
        tail = torch.stack([as_double(value, device) for value in (weight, *numbers)])
        # Which gradients exist travels with the first bucket, instead of in a collective of its
        # own.
        flags = torch.tensor(present, dtype=torch.float64).to(device, non_blocking=True)
        tail = torch.cat([tail, flags]).to(kind)
        factor: Tensor | None = None
        with torch.no_grad():
            for bucket in _buckets(parameters):
                flat = torch.cat([_values(p, kind) for p in bucket])
                flat.mul_(unit.to(kind) if isinstance(unit, Tensor) else unit)
                if factor is None:  # the first bucket carries the numbers that the rest need
                    both = self._sum(torch.cat([flat, tail]))
                    flat, tail = both[: flat.numel()], both[flat.numel() :]
                    factor = torch.where(tail[0] > 0, 1.0 / tail[0], torch.ones_like(tail[0]))
                else:
                    flat = self._sum(flat)
                _give_back(bucket, flat.mul_(factor))
        if not all(present):
            counts = tail[1 + len(numbers) :].tolist()
            for parameter, count in zip(parameters, counts, strict=True):
                if not count:
                    parameter.grad = None
        return tail[1 : 1 + len(numbers)].double()

    def _sum(self, flat: Tensor) -> Tensor:
        wire = self._placement.wire
        return self._placement.sum(flat.to(wire)).to(flat.device)


class OptimizerGradients:
    """The gradients of one optimizer's parameters, between two of its steps.

    due: a backward ran since the optimizer last moved. open: not exchanged yet, the sum of this
    rank's micro-batches with `weight` and `loss`. summed: the user asked for their sum, not their
    mean. earlier: gradients of previous losses, already exchanged. used: a backward ran in this
    step. skipped: they were not finite, or the loop threw them away, so the optimizer did not move
    in this step. parts: micro-batches that are not exchanged yet.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.optimizer = optimizer
        self.number = number
        self.parameters: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        self.due = self.used = self.open = self.skipped = self.summed = False
        self.weight: Number = 0.0
        self.loss: Number = 0.0
        self.parts = 0
        self.earlier: list[Tensor | None] = []

    def find_parameters(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        self.parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        return self.parameters

    def open_up(self, plain: bool) -> None:
        """Prepare for a backward. plain: it may simply add to the existing gradients."""
        if self.open and any(p.grad is not None for p in self.parameters):
            return
        if not self.open:
            self.find_parameters()
            if not self.due:
                for parameter in self.parameters:
                    parameter.grad = None
            if not plain:
                self.earlier = [parameter.grad for parameter in self.parameters]
                for parameter in self.parameters:
                    parameter.grad = None
        self.weight, self.loss, self.parts = 0.0, 0.0, 0

    def close(self) -> None:
        """The gradients now cover all ranks: add those of earlier losses."""
        for parameter, before in zip(self.parameters, self.earlier, strict=True):
            if before is not None:
                grad = parameter.grad
                parameter.grad = before if grad is None else before.add_(grad)
        self.open, self.earlier = False, []


def ratio(one: Number, other: Number, like: Tensor) -> Tensor | float:
    """one / other, in the type of `like`; 1 if both are zero."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        divisor = as_double(other, like.device)
        safe = torch.where(divisor > 0, divisor, torch.ones_like(divisor))
        kind = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
        return (as_double(one, like.device) / safe).to(kind)
    return one / other if other > 0 else 1.0


def as_double(value: Number, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(())


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    yield bucket


def _values(parameter: Tensor, kind: torch.dtype) -> Tensor:
    """A parameter's gradient as a flat tensor of real numbers."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    return real.reshape(-1).to(kind)


def _give_back(parameters: Sequence[Tensor], flat: Tensor) -> None:
    start = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # in the parameter's memory layout
        real = parameter.grad
        real = torch.view_as_real(real) if real.is_complex() else real
        real.copy_(flat[start : start + real.numel()].view(real.shape))
        start += real.numel()
