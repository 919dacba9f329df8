"""The tensors of model and optimizer by name, worked out anew only when something has changed.

Names, shared memory and the JSON of an optimizer's state are the same from save to save, and
training stands still while they are looked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.state_dicts import (
    Packed,
    model_state,
    pack,
    parameter_names,
)

_PLAIN = {Tensor, nn.Parameter}  # not split over ranks, for example
_SCALARS = {type(None), bool, int, float, str}  # nothing that can change in place


@dataclass(frozen=True)
class LiveState:
    """Tensors as training uses them, by name; names that share memory; the optimizer's state."""

    model: dict[str, Tensor]
    aliases: dict[str, str]
    optimizer: Packed


class LiveTensors:
    """Reads model and optimizer. What is returned must not be changed."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._places: list[Any] | None = None  # where the model's tensors lie
        self._model: tuple[dict[str, Tensor], dict[str, str]] = ({}, {})
        self._optimizer: _KnownOptimizer | None = None

    def read(
        self, state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> LiveState | None:
        """`state` is the model's state_dict. None: this is not plain tensors by name alone."""
        tensors = list(state.values())
        if not {*map(type, tensors)} <= _PLAIN:
            return None
        try:
            # A known tensor keeps its memory, so no other one can have come to lie there.
            places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
        except (RuntimeError, NotImplementedError):  # sparse ones, for example, have no place
            return None
        if self._places is None or places != self._places or [*state] != self._names:
            self._places = self._optimizer = None
            found, aliases, _ = model_state(state)
            self._model, self._names, self._places = (found, aliases), [*state], places
        known = self._optimizer
        if known is None or not known.still(optimizer):
            known = self._optimizer = _KnownOptimizer.of(model, optimizer)
        return None if known is None else LiveState(*self._model, known.packed(optimizer))

    def again(self, optimizer: Optimizer) -> LiveState | None:
        """What `read` has just found, with the optimizer's settings of now."""
        known = self._optimizer
        return None if known is None else LiveState(*self._model, known.packed(optimizer))


@dataclass(frozen=True)
class _KnownOptimizer:
    """The state of an optimizer whose tensors are the same objects as at the last look."""

    optimizer: Optimizer
    parameters: list[Tensor]
    keys: list[tuple[str, ...]]
    values: list[Any]
    members: list[list[Tensor]]  # parameters of each group
    names: list[list[str]]  # and what they are called
    plain: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> _KnownOptimizer | None:
        keys, values = _flat(optimizer)
        others = [value for value in values if type(value) not in _SCALARS]
        if not {*map(type, others)} <= _PLAIN:
            return None  # lists of tensors, for example
        names = parameter_names(model, optimizer)
        tensors: dict[str, Tensor] = {}
        state = {names[p]: dict(state) for p, state in optimizer.state.items()}
        plain = pack(state, tensors, "state")
        # The objects themselves, in place of what `pack` detached: their memory may be exchanged.
        members = [list(group["params"]) for group in optimizer.param_groups]
        return cls(
            optimizer,
            list(optimizer.state),
            keys,
            values,
            members,
            [[names[p] for p in group] for group in members],
            plain,
            dict(zip(tensors, others, strict=True)),
        )

    def still(self, optimizer: Optimizer) -> bool:
        keys, values = _flat(optimizer)
        groups = optimizer.param_groups
        return (
            optimizer is self.optimizer
            and keys == self.keys
            and _same(values, self.values)
            and _same(list(optimizer.state), self.parameters)
            and len(groups) == len(self.members)
            and all(_same(g["params"], m) for g, m in zip(groups, self.members, strict=True))
        )

    def packed(self, optimizer: Optimizer) -> Packed:
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"params": names}
            for group, names in zip(optimizer.param_groups, self.names, strict=True)
        ]
        tensors: dict[str, Tensor] = {}
        plain = {"state": self.plain, "groups": pack(groups, tensors, "groups")}
        return Packed(plain, {**self.tensors, **tensors} if tensors else self.tensors)


def _flat(optimizer: Optimizer) -> tuple[list[tuple[str, ...]], list[Any]]:
    states = list(optimizer.state.values())
    return [tuple(state) for state in states], [v for state in states for v in state.values()]


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
