"""Activation checkpointing: keep a block's input instead of its activations, and recompute them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from multi_gpu_training.errors import ModelError
from multi_gpu_training.torch_internals import RunningStatsBase


def use_activation_checkpointing(model: nn.Module) -> int:
    """Recompute the blocks of `model` in backward; returns how many blocks."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return sum(1 for _ in _blocks(model)) or 1
    blocks = list(_blocks(model))
    if not blocks:
        raise ModelError(
            f"use_gradient_checkpointing=true found no blocks in {type(model).__name__}; put its "
            "layers into an nn.Sequential or nn.ModuleList, or call torch.utils.checkpoint yourself"
        )
    for block in blocks:
        # By class, not by instance: the copies that DataParallel makes must use themselves.
        block.__class__ = _recomputing(type(block))
    return len(blocks)


_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` with a forward that is computed again in backward."""
    if kind in _kinds:
        return _kinds[kind]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            functools.partial(kind.forward, self),
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_contexts, self),
            **kwargs,
        )

    _kinds[kind] = type(kind.__name__, (kind,), {"forward": forward})
    return _kinds[kind]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost containers that hold parameters."""
    if isinstance(module, nn.Sequential):
        yield from (block for block in module if any(True for _ in block.parameters()))
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_held(block)


@contextmanager
def _statistics_held(block: nn.Module) -> Iterator[None]:
    """The second forward must not count a batch twice in BatchNorm's running statistics."""
    norms = [
        m
        for m in block.modules()
        if isinstance(m, RunningStatsBase) and m.track_running_stats and m.training
    ]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # Momentum 0 leaves the running mean and variance as they are.
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
