"""Diagnose a non-finite gradient: which rank, samples, loss and parameters it came from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.parts import step_batches
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training.step_state import StepState

MOST = 1024

# One micro-batch: its loss, its samples, and parameters whose own gradient is not finite.
Finding = tuple[float, list[int], list[str]]


def explain(
    state: StepState,
    error: NonFiniteLossError,
    names: list[str],
    losses: list[tuple[Tensor, Share]],
) -> None:
    """Add to `error` what all ranks know about its step. Collective.

    names: parameters whose summed gradient was not finite. losses: of this rank's micro-batches.
    Both are empty for a step found later; the weights have not moved since, so it can be
    recomputed.
    """
    mine: list[Any] = [
        [float(loss), list(share.indices[:MOST]), []] for loss, share in losses if share.count
    ]
    # A batch made by the user has no sample numbers, and the loader cannot provide it again.
    own = any(share.window_count == 0 for _, share in losses)
    clear = any((samples or own) and not math.isfinite(loss) for loss, samples, _ in mine)
    if state.placement.all_min(-int(clear)) == 0:  # no rank saw a loss that explains it
        mine = [list(finding) for finding in _once_more(state, error)] or mine
    every = state.placement.gather_json([mine, names])
    names = list(dict.fromkeys(name for _, theirs in every for name in theirs))
    error.describe(_findings([theirs for theirs, _ in every]), names, state)


def _findings(by_rank: list[list[Any]]) -> list[tuple[int, Finding]]:
    """(rank, micro-batch) for each that is not finite."""
    return [
        (rank, (float(loss), list(samples), list(names)))
        for rank, found in enumerate(by_rank)
        for loss, samples, names in found
        if names or not math.isfinite(float(loss))
    ]


def _once_more(state: StepState, error: NonFiniteLossError) -> list[Finding]:
    """Recompute this rank's part of the step, without other ranks and without moving weights."""
    loader = state.loader
    if loader is None or error.position < 0 or state.strategy.copies_here > 1:
        return []
    if not state.strategy.computes_alone:
        return []
    batches = list(step_batches(loader, error.epoch, error.position))
    if state.strategy.forward_exchanges:  # every rank must take part, with samples
        shares = [share_of(batch) for batch in batches]
        there = all(share is not None and share.count for share in shares)
        if not state.placement.all_min(int(there)):
            return []
    found: list[Finding] = []
    step, micro = state.step, state.micro
    buffers = [buffer.clone() for buffer in state.trained.buffers()]
    named = [(name, p) for name, p in state.trained.named_parameters() if p.requires_grad]
    try:
        for place, batch in enumerate(batches):
            state.step, state.micro = error.step - 1, place
            state.seed_noise()
            found += _look(state, batch, named)
    finally:
        state.step, state.micro = step, micro
        with torch.no_grad():
            for buffer, before in zip(state.trained.buffers(), buffers, strict=True):
                buffer.copy_(before)
    return found


def _look(state: StepState, batch: Any, named: list[tuple[str, Any]]) -> list[Finding]:
    share = share_of(batch)
    if share is None or share.count == 0:
        return []
    prepared = state.prepare(batch, state.sample_numbers(batch, share))
    result = state.step_module.forward(prepared, share.count, share.window_count, 1)
    gradients = torch.autograd.grad(result.scaled, [p for _, p in named], allow_unused=True)
    bad = [
        name
        for (name, _), grad in zip(named, gradients, strict=True)
        if grad is not None and not bool(grad.isfinite().all())
    ]
    numbers = batch.index if isinstance(batch, ResidentBatch) else torch.tensor(share.indices)
    return [(float(result.mean), numbers[:MOST].tolist(), bad[:MOST])]
