"""A language model's last layer and its cross entropy in one piece, a part of the tokens at a time.

The scores of a vocabulary of 50,000 are by far the largest tensor of a small language model: with
32,768 tokens a step 3.3 GB in bf16, and cross entropy of the usual kind adds two copies in
float32. Here the scores of a part of the tokens are computed, turned into their own gradient, used
for the gradients of the layer and forgotten: nothing of the vocabulary's size is kept for the
backward pass. The exponentials, the sums and the loss are float32 (float64 for a float64 model).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
ALIGNMENT = 64  # matrix products on tensor cores want rows of a multiple of 8 numbers or more


def scores_budget_bytes() -> int:
    """How large the scores of one part may be: a 64th of the smallest GPU's memory."""
    if not torch.cuda.is_available():
        return 64 * 2**20
    devices = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(i).total_memory for i in devices) // 64


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    budget_bytes: int = 64 * 2**20,
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of `hidden @ weight.T + bias` over the labels that count, and how many do.

    Under autocast the products are computed in its type, as those of nn.Linear are.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    kind = hidden.device.type
    product = hidden.dtype
    if torch.is_autocast_enabled(kind) and product != torch.float64:
        product = torch.get_autocast_dtype(kind)
    scores_bytes = len(hidden) * len(weight) * product.itemsize
    parts = max(1, -(-scores_bytes // budget_bytes))
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(kind, enabled=False):
        if training:
            total = _Sum.apply(hidden, weight, bias, labels, product, parts)  # type: ignore[no-untyped-call]
        else:
            total = _sum(hidden, weight, bias, labels, product, parts)
    count = (labels != IGNORED).sum()
    return total / count.clamp(min=1), count


class _Head(NamedTuple):
    """The layer in the type of the products, with columns for words that do not exist added."""

    weight: Tensor
    bias: Tensor | None
    words: int

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of every word for each token, in float32 or better; minus infinity for the added
        columns."""
        scores = hidden @ self.weight.t()
        if scores.dtype != torch.float64:
            scores = scores.float()
        if self.bias is not None:
            scores = scores + self.bias
        if len(self.weight) > self.words:
            real = torch.arange(len(self.weight), device=scores.device) < self.words
            scores = torch.where(real, scores, -torch.inf)
        return scores


def _head(weight: Tensor, bias: Tensor | None, product: torch.dtype) -> _Head:
    words = len(weight)
    extra = -words % ALIGNMENT
    padded = F.pad(weight.to(product), (0, 0, 0, extra)) if extra else weight.to(product)
    if bias is not None:
        bias = F.pad(bias, (0, extra))
    return _Head(padded, bias, words)


def _sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    product: torch.dtype,
    parts: int,
) -> Tensor:
    """The summed loss alone, for validation."""
    head = _head(weight, bias, product)
    losses = []
    for tokens, wanted in zip(hidden.to(product).chunk(parts), labels.chunk(parts), strict=True):
        scores = head.scores(tokens)
        counts, wanted = wanted != IGNORED, wanted.clamp(min=0)[:, None]
        loss = torch.logsumexp(scores, 1) - scores.gather(1, wanted)[:, 0]
        losses.append(torch.where(counts, loss, 0.0).sum())
    return torch.stack(losses).sum()


class _Sum(torch.autograd.Function):
    """The summed loss; its gradients are made in the forward pass, while the scores are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        product: torch.dtype,
        parts: int,
    ) -> Tensor:
        head = _head(weight, bias, product)
        losses, to_hidden = [], []
        to_weight: Tensor | None = None
        to_bias: Tensor | None = None
        pieces = zip(hidden.to(product).chunk(parts), labels.chunk(parts), strict=True)
        for tokens, wanted in pieces:
            loss, slope = _loss_and_slope(head.scores(tokens), wanted)
            losses.append(loss)
            if bias is not None:
                to_bias = _add(to_bias, slope.sum(0))
            slope = slope.to(product)
            to_hidden.append(slope @ head.weight)
            # One part: rounded once, as nn.Linear does. Several: added up in float32.
            piece = slope.t() @ tokens
            to_weight = _add(to_weight, piece if parts == 1 else piece.to(loss.dtype))
        assert to_weight is not None
        gradients = [
            torch.cat(to_hidden).to(hidden.dtype),
            to_weight[: head.words].to(weight.dtype),
        ]
        if bias is not None and to_bias is not None:
            gradients.append(to_bias[: head.words].to(bias.dtype))
        ctx.save_for_backward(*gradients)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight, *to_bias = (saved * grads[0] for saved in ctx.saved_tensors)
        return to_hidden, to_weight, to_bias[0] if to_bias else None, None, None, None


def _loss_and_slope(scores: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of some tokens, and its gradient with respect to their scores."""
    counts, wanted = (wanted != IGNORED)[:, None], wanted.clamp(min=0)[:, None]
    norm = torch.logsumexp(scores, 1, keepdim=True)
    loss = torch.where(counts, norm - scores.gather(1, wanted), 0.0).sum()
    if torch.compiler.is_compiling():
        # One kernel, which reads the scores once more and writes the slope.
        hit = torch.arange(scores.shape[1], device=scores.device) == wanted
        slope = torch.exp(scores - norm) - hit.to(scores.dtype)
        return loss, torch.where(counts, slope, 0.0)
    slope = scores.sub_(norm).exp_()  # in place: the scores are needed no more
    slope.scatter_(1, wanted, slope.gather(1, wanted) - 1.0)
    return loss, slope.mul_(counts)


def _add(before: Tensor | None, value: Tensor) -> Tensor:
    return value if before is None else before.add_(value)
