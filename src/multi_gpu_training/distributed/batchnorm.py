"""BatchNorm over all ranks, on CPUs and GPUs, correct also for ranks without a sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.torch_internals import BatchNormBase, BatchNormWithCheck, input_check


class Attendance:
    """Whether this rank's samples count in the micro-batch that is being computed."""

    present = True


class SyncBatchNorm(BatchNormWithCheck):
    """Normalises with the mean and variance of the whole micro-batch, over all ranks.

    PyTorch's own refuses CPU tensors, and has no way to leave out a stand-in sample.
    """

    def __init__(self, source: BatchNormBase, placement: Placement, seen: Attendance) -> None:
        super().__init__(
            source.num_features,
            source.eps,
            source.momentum,
            source.affine,
            source.track_running_stats,
        )
        self.placement = placement
        self.seen = seen
        # The same tensors, so that an optimizer built before keeps training them.
        self.weight, self.bias = source.weight, source.bias
        self.running_mean, self.running_var = source.running_mean, source.running_var
        self.num_batches_tracked = source.num_batches_tracked
        self.training = source.training
        self.check_input = input_check(source)  # a BatchNorm2d goes on asking for 4 dimensions

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.track_running_stats:
            return super().forward(input)
        self.check_input(input)
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.placement, self.seen.present
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.num_batches_tracked is None:
            return  # the second forward of a batch, see training/activation_checkpointing.py
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        placement: Placement,
        present: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = input if input.dtype == torch.float64 else input.float()
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        # Mean and squared deviations of each rank, merged: as exact as two passes over all.
        mean = x.mean(axes)
        deviations = (x - mean.view(shape)).square().sum(axes)
        count = x.new_full((1,), x.numel() / x.shape[1] if present else 0.0)
        parts = placement.gather(torch.cat([mean, deviations, count]))
        channels = x.shape[1]
        counts = parts[:, -1:]
        total = counts.sum()
        if total.device.type == "cpu" and float(total) <= 1:  # on a GPU this would stall it
            raise ValueError(
                "BatchNorm saw one value per channel over all ranks; use a larger batch"
            )
        means = parts[:, :channels]
        mean = (means * counts).sum(0) / total
        spread = (counts * (means - mean).square()).sum(0)
        kept = torch.where(counts > 0, parts[:, channels:-1], torch.zeros_like(means))
        variance = (kept.sum(0) + spread) / total
        scale = (variance + eps).rsqrt()
        normal = (x - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.placement, ctx.present, ctx.axes, ctx.shape = placement, present, axes, shape
        output = normal if weight is None else normal * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight, total = ctx.saved_tensors
        g = grad if grad.dtype == torch.float64 else grad.float()
        grad_bias = g.sum(ctx.axes)
        grad_weight = (g * normal).sum(ctx.axes)
        if not ctx.present:
            grad_bias, grad_weight = torch.zeros_like(grad_bias), torch.zeros_like(grad_weight)
        sums = ctx.placement.sum(torch.stack([grad_bias, grad_weight]))
        mean_grad, mean_product = (sums / total).view(2, *ctx.shape)
        inner = scale if weight is None else scale * weight
        grad_input = (g - mean_grad - normal * mean_product) * inner.view(ctx.shape)
        if not ctx.present:
            grad_input = torch.zeros_like(grad_input)
        affine = weight is not None
        return (
            grad_input.to(grad.dtype),
            grad_weight.to(weight.dtype) if affine else None,
            grad_bias.to(weight.dtype) if affine else None,
            None,
            None,
            None,
        )


def synchronise_batchnorm(model: nn.Module, placement: Placement, seen: Attendance) -> nn.Module:
    """Replace every BatchNorm of `model` with one over all ranks; parameters stay the same."""
    if isinstance(model, BatchNormBase):
        return SyncBatchNorm(model, placement, seen)
    for name, child in model.named_children():
        model.add_module(name, synchronise_batchnorm(child, placement, seen))
    return model
