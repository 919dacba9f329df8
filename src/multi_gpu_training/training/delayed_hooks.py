"""Hooks of the user's on gradients: `parameter.register_hook(lambda g: g.clamp(-1, 1))`.

torch would call them in the backward, with the gradient of this rank's samples, scaled by their
weight. What clamps or normalises would then do so per rank. So they wait until ranks have
exchanged their gradients, and get what one GPU would give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.errors import ModelError
from multi_gpu_training.torch_internals import after_accumulation_hooks, on_gradient_hooks

_LARGE = 1e6  # no clamp leaves gradients alone that are so much larger


class _Gate:
    """Stands where a hook was registered, so that its handle can still remove it."""

    def __init__(self, hook: Callable[[Any], Any], hooks: DelayedHooks) -> None:
        self.hook = hook
        self.hooks = hooks

    def __call__(self, value: Any) -> Any:
        return self.hook(value) if self.hooks.at_once else None


class DelayedHooks:
    """at_once: let torch call them, which is right where one rank adds up several gradients."""

    def __init__(self) -> None:
        self.at_once = False
        self._hooked: list[Tensor] = []
        self._add_up = False  # known: they give the same for a sum as for its parts

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Take over the hooks of these parameters. Called again, it finds new ones."""
        self._hooked = []
        for parameter in parameters:
            for hooks in (on_gradient_hooks(parameter), after_accumulation_hooks(parameter)):
                for key, hook in hooks.items():
                    if not isinstance(hook, _Gate):
                        hooks[key] = _Gate(hook, self)
                if hooks and not any(parameter is one for one in self._hooked):
                    self._hooked.append(parameter)
        self._add_up = False

    def begin(self, alone: bool, whole: bool) -> None:
        """A step begins. alone: on one rank. whole: with all its samples in one micro-batch."""
        self.at_once = alone and not whole

    @torch.no_grad()
    def run(self, whole: bool) -> None:
        """Call them: the gradients are those of the step."""
        if self.at_once:
            return
        for parameter in self._hooked:
            if parameter.grad is None:  # torch would not call them either
                continue
            if not whole and not self._add_up:
                _check(parameter)
            for gate in list(on_gradient_hooks(parameter).values()):
                changed = gate.hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed
            for gate in list(after_accumulation_hooks(parameter).values()):
                gate.hook(parameter)
        self._add_up = True


@contextmanager
def called_by_torch(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let torch call the hooks that were taken over, as in a loop without a trainer."""
    owners = {
        id(gate.hooks): gate.hooks
        for parameter in parameters
        for hooks in (on_gradient_hooks(parameter), after_accumulation_hooks(parameter))
        for gate in hooks.values()
        if isinstance(gate, _Gate)
    }
    before = {key: owner.at_once for key, owner in owners.items()}
    for owner in owners.values():
        owner.at_once = True
    try:
        yield
    finally:
        for key, owner in owners.items():
            owner.at_once = before[key]


def _check(parameter: Tensor) -> None:
    """Refuse a hook that does something else to a sum than to its parts: with several micro-batches
    in a step, torch calls it for each, and here their gradients come added up."""
    grad = parameter.grad
    assert grad is not None
    other = torch.randn_like(grad) * grad.abs().max()
    adds_up = not after_accumulation_hooks(parameter)
    for gate in on_gradient_hooks(parameter).values() if adds_up else ():
        one, two, both, large = (
            given if (found := gate.hook(given.clone())) is None else found
            for given in (grad, other, grad + other, grad * _LARGE)
        )
        adds_up = adds_up and _close(one + two, both) and _close(one * _LARGE, large)
    if not adds_up:
        raise ModelError(
            f"a hook on the gradient of a parameter of shape {tuple(parameter.shape)} changes each "
            "micro-batch's gradient in another way than their sum, and ranks exchange the sum; "
            "train without gradient accumulation, or change gradients in a callback's on_optimizer",
            code="MGT401",
        )


def _close(one: Tensor, other: Tensor) -> bool:
    size = float(torch.maximum(one.abs().max(), other.abs().max()))
    return float((one - other).abs().max()) <= 1e-4 * size
