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
from multi_gpu_training.torch_internals import (
    after_accumulation_hooks,
    gradient_hooks,
    on_gradient_hooks,
)

_LARGE = 1e6  # no clamp leaves gradients alone that are so much larger


class _Gate:
    """Stands where a hook was registered, so that its handle can still remove it."""

    def __init__(self, hook: Callable[[Any], Any], hooks: DelayedHooks) -> None:
        self.hook = hook
        self.hooks = hooks

    def __call__(self, value: Any) -> Any:
        return self.hook(value) if self.hooks.at_once else None


class DelayedHooks:
    """at_once: let torch call them, which is right where one rank adds up several gradients.
    but: a hook of ours, which torch goes on to call."""

    def __init__(self, at_once: bool = False, but: Callable[[Tensor], None] | None = None) -> None:
        self.at_once = at_once
        self._but = but
        self._hooked: list[Tensor] = []
        self._add_up: set[int] = set()  # ids of parameters whose hooks give the same for a sum

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Take over the hooks of these parameters. Called again, it finds new ones."""
        self._hooked = []
        for parameter in parameters:
            if not gradient_hooks(parameter):
                continue
            gates = 0
            for hooks in (on_gradient_hooks(parameter), after_accumulation_hooks(parameter)):
                for key, hook in hooks.items():
                    if self._but is not None and hook == self._but:
                        continue
                    gates += 1
                    if not isinstance(hook, _Gate):
                        hooks[key] = _Gate(hook, self)
                        self._add_up.clear()
            if gates:
                self._hooked.append(parameter)

    def begin(self, alone: bool, whole: bool) -> None:
        """A step begins. alone: on one rank. whole: with all its samples in one micro-batch."""
        self.at_once = alone and not whole

    def run(self, whole: bool) -> None:
        """Call them: the gradients are those of the step."""
        if not self.at_once:
            self.change(self._hooked, whole)
            self.announce(self._hooked)

    @torch.no_grad()
    def change(self, parameters: Iterable[Tensor], whole: bool) -> None:
        """Call those that get a gradient, and may return another one."""
        for parameter in self._of(parameters):
            if not whole and id(parameter) not in self._add_up:
                _check(parameter, _gates(after_accumulation_hooks(parameter)))
                self._add_up.add(id(parameter))
            for gate in _gates(on_gradient_hooks(parameter)):
                changed = gate.hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed

    @torch.no_grad()
    def announce(self, parameters: Iterable[Tensor]) -> None:
        """Call those that get a parameter whose `grad` is complete."""
        for parameter in self._of(parameters):
            for gate in _gates(after_accumulation_hooks(parameter)):
                gate.hook(parameter)

    def _of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        hooked = {id(parameter) for parameter in self._hooked}
        # torch would not call them without a gradient either.
        return [p for p in parameters if id(p) in hooked and p.grad is not None]


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


def _gates(hooks: dict[int, Any]) -> list[_Gate]:
    return [hook for hook in hooks.values() if isinstance(hook, _Gate)]


def _check(parameter: Tensor, after_accumulation: list[_Gate]) -> None:
    """Refuse a hook that does something else to a sum than to its parts: with several micro-batches
    in a step, torch calls it for each, and here their gradients come added up."""
    grad = parameter.grad
    assert grad is not None
    dice = torch.Generator(grad.device).manual_seed(0)  # the user's numbers stay as they are
    other = torch.randn(grad.shape, generator=dice, dtype=grad.dtype, device=grad.device)
    other *= grad.abs().max()
    adds_up = not after_accumulation
    for gate in _gates(on_gradient_hooks(parameter)) if adds_up else ():
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
