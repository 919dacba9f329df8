"""One micro-batch: from a batch to a loss scaled for the whole step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multi_gpu_training.accelerator import wide_float
from multi_gpu_training.distributed.batchnorm import ATTENDANCE
from multi_gpu_training.training.loss import LossFn, Pairs, read_loss
from multi_gpu_training.training.precision import Precision


class MicroResult(NamedTuple):
    """scaled: the loss to run backward on. tally: its gradient is this micro-batch's weight; None
    if it is not needed."""

    scaled: Tensor
    tally: Tensor | None
    mean: Tensor
    weight: Tensor | None
    metrics: Pairs


class StepResult:
    """The result of one `train_step` call.

    loss: mean over this rank's micro-batch; stays on the device until you read it.
    grad_norm: norm of the gradient before clipping, if clipping is on.
    moved: true if the weights moved, false if the micro-batch was only accumulated.
    """

    __slots__ = ("__weakref__", "_loss", "_norm", "_shared", "moved", "step")

    def __init__(
        self, loss: Tensor, step: int, moved: bool, norm: Tensor | None, shared: bool
    ) -> None:
        self._loss = loss
        self._norm = norm
        self._shared = shared
        self.step = step
        self.moved = moved

    @property
    def loss(self) -> Tensor:
        self.keep()
        return self._loss

    @property
    def grad_norm(self) -> Tensor | None:
        self.keep()
        return self._norm

    def keep(self) -> None:
        """Copy the numbers out of memory that the next recorded step overwrites."""
        if self._shared:
            self._shared = False
            self._loss = self._loss.clone()
            self._norm = None if self._norm is None else self._norm.clone()

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


class _Zero(torch.autograd.Function):
    """A zero that depends on a parameter and gives it a zero gradient, whatever its values."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sparse: bool) -> Tensor:
        ctx.like, ctx.sparse = parameter, sparse
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        like = ctx.like
        if ctx.sparse:  # the other ranks send theirs as a list of rows: send an empty one
            rows = torch.zeros((1, 0), dtype=torch.int64, device=like.device)
            values = like.new_zeros((0, *like.shape[1:]))
            return torch.sparse_coo_tensor(rows, values, like.shape, check_invariants=False), None
        return torch.zeros_like(like), None


class _NoGradient(torch.autograd.Function):
    """Passes the value through; its gradient is None, which is not the same as zero.

    The backward below it still runs, including any communication between ranks.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class StepModule(nn.Module):
    """What DDP or DataParallel wraps: the user's loss function around the user's model.

    The loss function gets the raw model. Calling a wrapped model's `.module` would bypass the
    wrapper's bookkeeping, and replicas would silently drift apart.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.compiled = loss_fn  # what actually runs: the same function, possibly compiled
        self.precision = precision
        self.replicated = False
        self.sharded = False  # parameters are not whole outside the modules that use them
        self.silent = False  # the latest micro-batch gives no parameter a gradient
        self.finds_unused = False  # ranks tell each other which parameters they used
        self.needs_graph = False  # every micro-batch must go through model and loss, backward too
        self.rows: int | None = None  # samples of the micro-batch, if fewer than planned
        self.beside: nn.Module | None = None  # what else the optimizer moves, such as a criterion
        parameters = [p for p in model.parameters() if p.requires_grad]
        exact = all(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        # Its gradient carries the step's total weight along with the model's gradients, so
        # uneven weights need no extra collective.
        self.tally = nn.Parameter(
            torch.zeros(
                (),
                dtype=torch.float64 if exact else torch.float32,
                # Weights that are not materialised yet have no device.
                device=next((p.device for p in parameters if not p.is_meta), precision.device),
            )
        )

    @contextmanager
    def computing(self, compiled: LossFn | None) -> Iterator[None]:
        """Within a `with` block, use the compiled loss; None means the plain one."""
        before, self.compiled = self.compiled, compiled or self.loss_fn
        try:
            yield
        finally:
            self.compiled = before

    def forward(self, batch: Any, count: int, window_count: int, ranks: int) -> MicroResult:
        """This rank's part of a step: `count` of `window_count` samples. Without samples, the batch
        is a stand-in or None.

        A mean over samples is scaled right here. A mean over other weights is scaled as if the
        step's weight were its sample count; the tally adds up the real weight, and
        `Strategy.weigh` corrects the difference. So one step may mix both kinds.
        """
        self.silent = count == 0
        if count == 0:
            return self.absent(batch)
        with self.precision.autocast():
            loss = read_loss(self.compiled(self.model, batch), self.tally.device)
        if self.rows is not None and loss.rows is None:
            loss = replace(loss, rows=self.rows)
        mean, weight = loss.mean, loss.weight_beside(count)
        if weight is None and window_count:
            factor = count * ranks / window_count
            scaled = mean if factor == 1.0 else mean * factor
            tally = self.tally * float(count) if self.replicated else None
            return MicroResult(scaled, tally, mean.detach(), None, loss.metrics)
        if weight is None:
            weight = mean.new_full((), count, dtype=wide_float(mean.device))
        # A batch in which nothing counts has a mean of 0/0: select zero, as 0 x NaN is NaN. The
        # gradient of 0/0 is NaN too: where that can be read, parameters get zeros
        # instead, as from a mean over at least one sample.
        zeros = None
        if weight.device.type == "cpu" and float(weight) == 0 and not mean.isfinite():
            mean = no_gradient(mean)
            zeros = self.zero_gradients()
            self.silent = True
        else:
            mean = torch.where(weight != 0, mean, torch.zeros_like(mean))
        share = weight.to(self.tally.dtype)
        scaled = mean * (share * (ranks / window_count) if window_count else share)
        scaled = scaled if zeros is None else scaled + zeros
        return MicroResult(scaled, self.tally * share, mean.detach(), weight, loss.metrics)

    @property
    def trained(self) -> nn.Module:
        """All modules whose parameters are trained, to look up parameters and buffers by name."""
        return self.model if self.beside is None else TrainedModules(self.model, self.beside)

    # Skip torch's own __call__: it only adds hooks, and nobody has hooks on this module.
    __call__ = forward

    def absent(self, batch: Any = None) -> MicroResult:
        """Take part in a step without samples: zero loss, zero gradient for every parameter.

        If DDP looks for unused parameters, None instead of zero: a parameter that no rank uses
        must have no gradient. `batch` is a stand-in: model and loss run as often as on every
        other rank, so whatever they count in Python stays in step.
        """
        nothing = self.tally * 0.0
        mean = None if batch is None else self._rehearse(batch)
        if mean is None:
            scaled = nothing + self.zero_gradients()
        else:
            # None runs through its backward, not zero: the stand-in's loss may be a mean over
            # nothing, and zero times the gradient of 0/0 is NaN.
            silent = self.finds_unused or self.sharded
            zeros = torch.zeros_like(nothing) if silent else self.zero_gradients()
            scaled = no_gradient(mean) + zeros
        return MicroResult(scaled, nothing, torch.zeros_like(nothing), None, {})

    def _rehearse(self, batch: Any) -> Tensor | None:
        """Compute a stand-in. Returns its loss if the other ranks also wait for this one's
        backward."""
        ATTENDANCE.exchanged = False
        try:
            with self.precision.autocast():
                result = self.loss_fn(self.model, batch)
        except Exception:
            # A stand-in has one sample, which some losses and layers reject. Nobody waits for it.
            if self.needs_graph or ATTENDANCE.exchanged:
                raise
            return None
        if self.needs_graph or ATTENDANCE.exchanged:
            return read_loss(result, self.tally.device).mean
        return None

    def zero_gradients(self) -> Tensor:
        """A zero that gives every parameter a zero gradient; if DDP looks for unused parameters,
        only those that DDP always expects."""
        total = torch.zeros_like(self.tally)
        if self.sharded:
            return total  # ranks send zeros for parameters without a gradient
        found = self.sparse
        for parameter in self.trained.parameters():
            sparse = id(parameter) in found
            if parameter.requires_grad and (sparse or not self.finds_unused):
                total = total + _Zero.apply(parameter, sparse)  # type: ignore[no-untyped-call]
        return total

    @property
    def sparse(self) -> set[int]:
        """Ids of the parameters whose gradients are sparse, found as DDP finds them."""
        return {
            id(module.weight)
            for module in self.trained.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }


class TrainedModules(nn.Module):
    """The model plus trained modules and parameters of the loss. The model's names stay as they
    are; the others begin with `loss_fn`."""

    def __init__(self, model: nn.Module, beside: nn.Module) -> None:
        super().__init__()
        self.model, self.beside = model, beside

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        # torch looks up everything else by name through here.
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        name = "loss_fn"
        while name in dict(self.model.named_children()):
            name += "_"
        inside = f"{prefix}.{name}" if prefix else name
        yield from self.beside.named_modules(memo, inside, remove_duplicate)


def zero_loss(loss: Tensor) -> Tensor:
    """The loss with all gradients zero. Selected, not multiplied, because it may be NaN."""
    never = torch.zeros((), dtype=torch.bool, device=loss.device)
    return torch.where(never, loss, torch.zeros_like(loss))


def no_gradient(loss: Tensor) -> Tensor:
    """A zero whose backward runs through the loss's graph and gives no parameter a gradient."""
    nothing: Tensor = _NoGradient.apply(loss)  # type: ignore[no-untyped-call]
    return nothing
