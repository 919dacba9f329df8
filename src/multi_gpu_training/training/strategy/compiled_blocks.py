"""Compile a sharded model block by block.

A block gathers its parameters before its forward and frees them afterwards. Compiled code inside
these hooks never sees a parameter come or go; code compiled around them would break at each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from multi_gpu_training.torch_internals import is_compiler_error
from multi_gpu_training.training.activation_checkpointing import recomputed
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.step import StepModule


class CompiledBlocks:
    """Lets blocks run compiled while `step_module` computes a compiled loss.

    Make it before the blocks are sharded. failure: why a block could not be compiled, if so: it
    then runs as it is. Raising instead would leave the other ranks waiting for this one to gather
    the next block.
    """

    def __init__(self, step_module: StepModule, blocks: Sequence[nn.Module]) -> None:
        self.failure: Exception | None = None
        self._step = step_module
        self._failed: set[int] = set()
        self._kinds: dict[type[nn.Module], type[nn.Module]] = {}
        for block in blocks:
            # By class, as for activation checkpointing: hooks and names stay as they are.
            block.__class__ = self._compilable(type(block))

    def compile(self, loss_fn: LossFn) -> LossFn:
        """The same loss, for `StepModule.computing`: what is compiled is the blocks."""
        return lambda model, batch: loss_fn(model, batch)

    def _compilable(self, kind: type[nn.Module]) -> type[nn.Module]:
        """A subclass of `kind` whose forward is compiled when asked."""
        if kind not in self._kinds:
            plain: Callable[..., Any] = kind.forward
            inner = recomputed(kind)
            # The compiler must see what is recomputed: in backward, torch runs the recomputation of
            # a checkpoint around compiled code uncompiled, and it saves other tensors.
            function = plain if inner is None else _recomputed_forward(inner)
            compiled: Callable[..., Any] = torch.compile(function, dynamic=False)

            def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if not self._wanted or id(block) in self._failed:
                    return plain(block, *args, **kwargs)
                try:
                    return compiled(block, *args, **kwargs)
                except Exception as error:
                    if not is_compiler_error(error):
                        raise
                    self.failure = error
                    self._failed.add(id(block))
                    return plain(block, *args, **kwargs)

            self._kinds[kind] = type(kind.__name__, (kind,), {"forward": forward})
        return self._kinds[kind]

    @property
    def _wanted(self) -> bool:
        # A recomputation in backward must decide as its forward did: both have gradients enabled,
        # and a validation has not.
        return self._step.compiled is not self._step.loss_fn and torch.is_grad_enabled()


def _recomputed_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, block, *args, use_reentrant=False, **kwargs)

    return forward
