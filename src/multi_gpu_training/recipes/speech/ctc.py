"""Connectionist temporal classification (Graves et al. 2006) without a look at the host.

torch's own loss on CUDA reads the lengths on the host: the GPU runs dry in the middle of every
step, and the step cannot be captured as a graph. Here forward and backward variables come from one
scan of tensor operations over time, and the gradient is written down instead of derived. On a CPU
it computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.recipes.speech.features import inside
from multi_gpu_training.torch_internals import disable_dynamo

BLANK = 0
NEVER = -1e30  # the logarithm of zero, finite so that no difference of two is NaN


@disable_dynamo
def ctc_loss(logits: Tensor, lengths: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
    """Minus log likelihood of each utterance; 0 for one with too few frames for its text.

    logits (batch, time, classes), of which `lengths` frames count; targets (batch, labels), of
    which `sizes` count. Class 0 is the blank. Computed in float32, or float64 where logits are.
    `torch.compile` leaves it alone: unrolled, its scan would take minutes to compile.
    """
    with torch.autocast(logits.device.type, enabled=False):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = torch.log_softmax(wide, dim=2)
        loss: Tensor = _Likelihood.apply(log_probs, lengths, targets, sizes)  # type: ignore[no-untyped-call]
        return loss


def frames_needed(targets: Tensor, sizes: Tensor) -> Tensor:
    """Frames that each text takes at least: one a label, and a blank between two alike."""
    repeats = torch.zeros_like(targets, dtype=torch.bool)
    repeats[:, 1:] = targets[:, 1:] == targets[:, :-1]
    return sizes + (repeats & inside(sizes, targets.shape[1])).sum(1)


def possible(lengths: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
    """Which utterances have enough frames for their text."""
    return lengths >= frames_needed(targets, sizes).clamp(min=1)


class _Likelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, lengths: Tensor, targets: Tensor, sizes: Tensor
    ) -> Tensor:
        batch, time, classes = log_probs.shape
        states = _states(targets)
        ends = (2 * sizes).unsqueeze(1)  # the last state: the blank behind the last label
        emitted = log_probs.gather(2, states.unsqueeze(1).expand(batch, time, -1))
        # Backward variables are forward variables of the sequence read from its end.
        places = torch.arange(states.shape[1], device=states.device)
        turned = (ends - places).clamp(min=0)
        moments = torch.arange(time, device=states.device)
        late = (lengths.unsqueeze(1) - 1 - moments).clamp(min=0)
        back = emitted.gather(1, late.unsqueeze(2).expand_as(emitted))
        back = back.gather(2, turned.unsqueeze(1).expand_as(emitted))
        both = _scan(torch.cat([emitted, back]), torch.cat([states, states.gather(1, turned)]))
        alpha, beta = both.split(batch)
        beta = beta.gather(1, late.unsqueeze(2).expand_as(beta))
        beta = beta.gather(2, turned.unsqueeze(1).expand_as(beta))
        last = alpha.gather(1, late[:, :1].unsqueeze(2).expand(batch, 1, alpha.shape[2])).squeeze(1)
        at_blank = last.gather(1, ends)
        at_label = torch.where(ends > 0, last.gather(1, (ends - 1).clamp(min=0)), NEVER)
        log_likelihood = torch.logaddexp(at_blank, at_label).squeeze(1)
        fine = possible(lengths, targets, sizes)
        # How likely a state is at a moment, given the text: what the gradient is made of.
        counts = (places <= ends).unsqueeze(1) & (moments < lengths.unsqueeze(1)).unsqueeze(2)
        counts &= fine.view(-1, 1, 1)
        share = (alpha + beta - emitted - log_likelihood.view(-1, 1, 1)).clamp(max=0.0).exp()
        share = torch.where(counts, share, 0.0)
        # In float64 no TF32 rounds it, and a product of matrices adds in a fixed order.
        chosen = states.unsqueeze(2) == torch.arange(classes, device=states.device)
        ctx.save_for_backward(torch.bmm(share.double(), chosen.double()).to(log_probs.dtype))
        return torch.where(fine, -log_likelihood, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (expected,) = ctx.saved_tensors
        return -expected * grads[0].view(-1, 1, 1), None, None, None


def _scan(emitted: Tensor, states: Tensor) -> Tensor:
    """(batch, time, states): log likelihood of all ways to be in a state at a moment."""
    batch, time, size = emitted.shape
    # A label may follow the label before last at once, unless it is the same: a repeat needs its
    # blank, and blanks are not skipped to.
    allowed = torch.zeros_like(states, dtype=torch.bool)
    allowed[:, 2:] = (states[:, 2:] != BLANK) & (states[:, 2:] != states[:, :-2])
    jump = torch.where(allowed, 0.0, NEVER).to(emitted.dtype)
    # Two columns in front stand for "before the first state", so that shifts are plain slices.
    ways = emitted.new_full((time, batch, size + 2), NEVER)
    moments = emitted.transpose(0, 1).contiguous()
    ways[0, :, 2:4] = moments[0, :, :2]
    for t in range(1, time):
        before = ways[t - 1]
        stay_or_next = torch.logaddexp(before[:, 2:], before[:, 1:-1])
        reached = torch.logaddexp(stay_or_next, before[:, :-2] + jump)
        torch.add(reached, moments[t], out=ways[t, :, 2:])
    return ways[:, :, 2:].transpose(0, 1)


def _states(targets: Tensor) -> Tensor:
    """blank, label, blank, label, ..., blank."""
    batch, labels = targets.shape
    states = targets.new_full((batch, 2 * labels + 1), BLANK, dtype=torch.int64)
    states[:, 1::2] = targets
    return states
