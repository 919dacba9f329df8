"""Activation checkpointing: keep a block's input instead of its activations, and recompute them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multi_gpu_training.errors import ModelError


def use_activation_checkpointing(model: nn.Module) -> int:
    """Recompute the blocks of `model` in backward; returns the number of blocks."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return sum(1 for _ in _blocks(model)) or 1
    blocks = list(_blocks(model))
    if not blocks:
        raise ModelError(
            f"use_gradient_checkpointing=true found no blocks in {type(model).__name__}; put its "
            "layers into an nn.Sequential or nn.ModuleList, or call "
            "torch.utils.checkpoint yourself",
            code="MGT403",
        )
    for block in blocks:
        # By class, not by instance: DataParallel's copies must call their own forward.
        block.__class__ = _recomputing(type(block))
    return len(blocks)


_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` whose forward is recomputed in backward."""
    if kind in _kinds:
        return _kinds[kind]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            super(made, self).forward,
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_contexts, self),
            **kwargs,
        )

    made: Any = type(kind.__name__, (kind,), {"forward": forward})
    _kinds[kind] = made
    return _kinds[kind]


def recomputed(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class whose forward `kind` recomputes in backward, if it does."""
    return next((inner for inner, made in _kinds.items() if made is kind), None)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members, with parameters, of the outermost containers."""
    if isinstance(module, nn.Sequential):
        yield from (block for block in module if any(True for _ in block.parameters()))
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


# A buffer: the module that holds it, its name there, and the tensor.
Buffers = list[tuple[nn.Module, str, Tensor]]


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the forward and its recomputation, which must start from the same buffers."""
    before: Buffers = [
        (module, name, buffer.detach().clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    return nullcontext(), _buffers_as(before)


@contextmanager
def _buffers_as(before: Buffers) -> Iterator[None]:
    """Compute with copies of the buffers as they were `before`: BatchNorm must not count a batch
    twice, and spectral norm must divide by the same number as in the first forward."""
    live = [(module, name, getattr(module, name)) for module, name, _ in before]
    for module, name, kept in before:
        setattr(module, name, kept)
    try:
        yield
    finally:
        for module, name, buffer in live:
            setattr(module, name, buffer)
