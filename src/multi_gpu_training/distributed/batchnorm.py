"""BatchNorm over all ranks, on CPUs and GPUs, correct also for ranks without a sample."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ModelError
from multi_gpu_training.state_dicts import plain_name
from multi_gpu_training.torch_internals import (
    BatchNormBase,
    BatchNormOfAnyDimensions,
    check_dimensions,
    disable_dynamo,
)


class Attendance:
    """Whether this rank's samples count in the micro-batch that is being computed.

    exchanged: whether ranks talked in a BatchNorm since somebody set it to False.
    width: the most channels of any BatchNorm over all ranks.
    outside_steps: whether a loop with its own backward is between two steps. Ranks may then all
        compute on the same samples.
    """

    present = True
    exchanged = False
    width = 0
    outside_steps = False


# One for the process: the loss of one training may call the model of another.
ATTENDANCE = Attendance()


_DONE = -1.0  # in place of the number of a layer: no layer follows before the backward
_ELSEWHERE = (
    "ranks are in different BatchNorm layers at the same time, or only some are in one: their "
    "samples decide which layers run, and sync_bn needs the same ones on every rank. Call these "
    "layers in every step, or set sync_bn=false"
)


class SyncBatchNorm(BatchNormBase):
    """Normalises with the mean and variance of the whole micro-batch, over all ranks.

    PyTorch's own refuses CPU tensors, and has no way to leave out a stand-in sample. A BatchNorm
    becomes one in place, see `synchronise_batchnorm`.
    """

    placement: Placement
    number = 0  # of this layer in its model, the same on every rank

    @disable_dynamo  # ranks talk in here
    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.track_running_stats:
            return BatchNormBase.forward(self, input)
        check_dimensions(self, input)
        ATTENDANCE.exchanged = True
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            self.eps,
            self.placement,
            ATTENDANCE.present,
            self.number,
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks, stacked. Differentiable as often as one likes: what a rank's
    tensor did to the losses of all ranks is added up.

    present: off on a rank whose tensor counts for nothing. It takes part in all exchanges, and
    gets no gradient: a zero would count as one.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, placement: Placement, present: bool) -> Tensor:
        ctx.placement, ctx.present = placement, present
        return placement.gather(mine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        total = _Summed.apply(grads[0], ctx.placement, ctx.present)  # type: ignore[no-untyped-call]
        wanted = ctx.present or torch.is_grad_enabled()
        return total[ctx.placement.dp_rank] if wanted else None, None, None


class _Summed(torch.autograd.Function):
    """The sum over all ranks, differentiable as often as one likes; `present` as above."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, placement: Placement, present: bool) -> Tensor:
        ctx.placement, ctx.present = placement, present
        return placement.sum(mine.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        total = _Summed.apply(grads[0], ctx.placement, ctx.present)  # type: ignore[no-untyped-call]
        return total if ctx.present or torch.is_grad_enabled() else None, None, None


def _statistics(
    x: Tensor, placement: Placement, present: bool, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance and number of values per channel, over all ranks that are present; and how
    many different values there are.

    number: of the layer. Ranks whose samples decide which layers run may meet here in two layers.
    """
    axes, shape = _axes(x)
    # Mean and squared deviations of each rank, merged: as exact as two passes over all.
    mean = x.mean(axes)
    deviations = (x - mean.view(shape)).square().sum(axes)
    count = x.new_full((1,), x.numel() / x.shape[1] if present else 0.0)
    channels = x.shape[1]
    mine = torch.cat([mean, deviations, count, x.new_full((1,), float(number))])
    if not x.is_cuda:
        # Of the same size and type in every layer, for ranks that are in another one, or in none.
        spare = mine.new_zeros(2 * (ATTENDANCE.width - channels))
        mine = torch.cat([mine[:-2], spare, mine[-2:]]).double()
    parts = _Gathered.apply(mine, placement, present).to(x.dtype)  # type: ignore[no-untyped-call]
    counts, numbers = parts[:, -2:-1].detach(), parts[:, -1:].detach()
    total = counts.sum()
    same = ((numbers == number) | ((counts == 0) & (numbers != _DONE))).all()
    if present and not same.is_cuda and not bool(same):
        raise ModelError(_ELSEWHERE, code="MGT403")
    zeros = torch.zeros_like(parts[:, :channels])
    means = torch.where(counts > 0, parts[:, :channels], zeros)
    mean = (means * counts).sum(0) / total
    if same.is_cuda and present:  # to read it would stall the GPU: the guard against NaN stops
        mean = torch.where(same, mean, torch.full_like(mean, float("nan")))
    spread = (counts * (means - mean).square()).sum(0)
    kept = torch.where(counts > 0, parts[:, channels : 2 * channels], zeros)
    seen = total
    if ATTENDANCE.outside_steps:
        # The same samples on every rank are one batch, however often it is there.
        seen = torch.where((parts == parts[0]).all(), counts[0, 0], total)
    return mean, (kept.sum(0) + spread) / total, total, seen


def refuse_other_layers(placement: Placement) -> None:
    """Raise if another rank is in a BatchNorm while this one goes on to its backward: they would
    wait for each other. Collective. On a GPU, reading the answer would stall every step."""
    mine = torch.zeros(2 * ATTENDANCE.width + 2, dtype=torch.float64)
    mine[-1] = _DONE
    if bool((placement.gather(mine)[:, -1] != _DONE).any()):
        raise ModelError(_ELSEWHERE, code="MGT403")


def _axes(x: Tensor) -> tuple[list[int], list[int]]:
    """What to add up per channel, and the shape of numbers per channel beside `x`."""
    return [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)


def _as_zeros(tensor: Tensor) -> Tensor:
    """Zeros that still depend on `tensor`: a second backward of the other ranks finds this rank
    at the same exchanges. Selected, not multiplied: a stand-in may be NaN."""
    return torch.where(torch.zeros_like(tensor, dtype=torch.bool), tensor, 0.0)


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
        number: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = input if input.dtype == torch.float64 else input.float()
        _, shape = _axes(x)
        mean, variance, total, seen = _statistics(x, placement, present, number)
        if total.device.type == "cpu" and float(total) <= 1:  # on a GPU this would stall it
            raise ValueError(
                "BatchNorm saw one value per channel over all ranks; use a larger batch"
            )
        ctx.save_for_backward(input, weight, mean, variance, total)
        ctx.eps, ctx.placement, ctx.present, ctx.number = eps, placement, present, number
        output = (x - mean.view(shape)) * (variance + eps).rsqrt().view(shape)
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, seen)
        return output.to(input.dtype), mean, variance, seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance, total = ctx.saved_tensors
        placement, present = ctx.placement, ctx.present
        g = grad if grad.dtype == torch.float64 else grad.float()
        x = input if input.dtype == torch.float64 else input.float()
        axes, shape = _axes(x)
        if torch.is_grad_enabled():
            # This backward will be differentiated itself (a gradient penalty), and the statistics
            # depend on the input. All ranks come here: they run the same code.
            mean, variance, total = _statistics(x, placement, present, ctx.number)[:3]
        scale = (variance + ctx.eps).rsqrt()
        normal = (x - mean.view(shape)) * scale.view(shape)
        grad_bias = g.sum(axes)
        grad_weight = (g * normal).sum(axes)
        if not present:
            grad_bias, grad_weight = _as_zeros(grad_bias), _as_zeros(grad_weight)
        inner = scale if weight is None else scale * weight
        mine = torch.stack([grad_bias, grad_weight])
        sums = _Summed.apply(mine, placement, present)  # type: ignore[no-untyped-call]
        if not present and not torch.is_grad_enabled():
            # Nothing, not zero: what only a stand-in used must stay without a gradient.
            return None, None, None, None, None, None, None
        mean_grad, mean_product = (sums / total).view(2, *shape)
        grad_input = (g - mean_grad - normal * mean_product) * inner.view(shape)
        if not present:
            grad_input = _as_zeros(grad_input)
        affine = weight is not None
        return (
            grad_input.to(grad.dtype),
            grad_weight.to(weight.dtype) if affine else None,
            grad_bias.to(weight.dtype) if affine else None,
            None,
            None,
            None,
            None,
        )


@contextmanager
def no_norm_alone() -> Iterator[None]:
    """Refuse, in a `with` block, a BatchNorm that would normalise over this rank's samples alone:
    one outside the model, such as that of a teacher which the loss calls, or a function."""

    def look(module: nn.Module, _: Any) -> None:
        if not isinstance(module, BatchNormBase) or isinstance(module, SyncBatchNorm):
            return
        if module.training or not module.track_running_stats:
            raise ModelError(
                f"sync_bn=true, but the loss calls a {type(module).__name__} of "
                f"{module.num_features} features in training mode that is not part of the model: "
                "each rank would normalise its own samples alone. Call .eval() on the network that "
                "it belongs to, make that a part of the model, or set sync_bn=false",
                code="MGT403",
            )

    handle = register_module_forward_pre_hook(look)
    try:
        with _NoFunctionAlone():
            yield
    finally:
        handle.remove()


class _NoFunctionAlone(TorchFunctionMode):
    """Refuses `F.batch_norm` with the statistics of a batch: only modules are synchronised."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = func in (F.batch_norm, torch.batch_norm)  # `training` is the sixth of both
        if known and (args[5] if len(args) > 5 else kwargs.get("training", False)):
            raise ModelError(
                "sync_bn=true, but the model or the loss calls F.batch_norm in training, which "
                "normalises each rank's samples alone; use nn.BatchNorm1d, 2d or 3d, or set "
                "sync_bn=false",
                code="MGT403",
            )
        return func(*args, **kwargs)


_kinds: dict[type[BatchNormBase], type[SyncBatchNorm]] = {}


def uses_batch_statistics(model: nn.Module, in_eval: Collection[str]) -> bool:
    """Whether a BatchNorm of `model` normalises a rank's samples alone in training. in_eval: the
    modules that stay in eval mode."""
    return any(
        isinstance(module, BatchNormBase)
        and not isinstance(module, SyncBatchNorm)
        and (plain_name(name) not in in_eval or module.running_mean is None)
        for name, module in model.named_modules()
    )


def exchanges_in_evaluation(model: nn.Module) -> bool:
    """Whether ranks talk in the forward of a model in eval mode: a BatchNorm without running
    statistics normalises every batch by itself, in validation too."""
    return any(isinstance(m, SyncBatchNorm) and m.running_mean is None for m in model.modules())


def synchronise_batchnorm(
    model: nn.Module, placement: Placement, only_converted: bool = False
) -> nn.Module:
    """Let every BatchNorm of `model` normalise over all ranks. It stays the same object: under
    every name it is registered by, with its parameters and hooks.

    only_converted: only where the user has made it a SyncBatchNorm of torch, which knows neither
    ranks without samples nor CPUs.
    """
    kind = nn.SyncBatchNorm if only_converted else BatchNormBase
    for number, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, kind):
            if not isinstance(module, SyncBatchNorm):
                module.__class__ = _synchronised(type(module), name)
            assert isinstance(module, SyncBatchNorm)
            module.placement, module.number = placement, number
            ATTENDANCE.width = max(ATTENDANCE.width, module.num_features)
    return model


def _synchronised(kind: type[BatchNormBase], name: str) -> type[SyncBatchNorm]:
    """The class of a BatchNorm that is one over all ranks; the user's own forward stays."""
    if kind not in _kinds:
        # The class that computes: torch's own classes do nothing that ours does not.
        owner = next(k for k in kind.__mro__ if "forward" in vars(k))
        ours_first = owner.__module__.startswith("torch.")
        if not ours_first and "super" not in _names_read(vars(owner)["forward"]):
            raise ModelError(
                f"sync_bn=true, but {name or 'the model'} is a {kind.__name__}, whose forward "
                "normalises by itself; let it call super().forward(input), or set sync_bn=false",
                code="MGT403",
            )
        bases: tuple[Any, ...]
        bases = (SyncBatchNorm, kind) if ours_first else (kind, SyncBatchNorm)
        if kind is nn.SyncBatchNorm:  # DDP accepts instances of it on GPUs alone
            bases = (SyncBatchNorm, BatchNormOfAnyDimensions)
        _kinds[kind] = type(f"Sync{kind.__name__}", bases, {})
    return _kinds[kind]


def _names_read(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return code.co_names if isinstance(code, types.CodeType) else ()
