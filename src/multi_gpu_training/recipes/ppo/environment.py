"""What PPO asks of environments: many at once, numbered over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.recipes.ppo.policy import Actions

ByEnvironment = dict[str, Tensor | list[Any]]


@dataclass(frozen=True)
class Step:
    """What a step gave, one row an environment.

    observations: where an episode ended, the first of the next one.
    final: where an episode was truncated, its last observation; None where none was.
    ended: whether any episode ended, known without asking the device.
    """

    observations: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final: Tensor | None
    ended: bool


class Environments(Protocol):
    """Environments `numbers` of all. What one of them does depends on its number, the seed and
    the actions it gets, never on the rank that holds it."""

    numbers: range
    observation_size: int
    actions: Actions

    def reset(self) -> Tensor:
        """Begin the first episode of each; (N, observation_size)."""
        ...

    def step(self, actions: Tensor) -> Step: ...

    def mark(self) -> Callable[[], ByEnvironment]:
        """Note where they stand. Asked later, it tells all that is needed to go on from there, by
        environment."""
        ...

    def load(self, state: ByEnvironment) -> Tensor:
        """Go on from `state`, of these environments alone; gives the current observations."""
        ...

    def close(self) -> None: ...


def gather_environments(state: ByEnvironment, placement: Placement, ranks_hold: list[int]) -> Any:
    """`state` of the environments of all ranks, in order of their number, on the host."""
    most = max(ranks_hold)
    whole: dict[str, Any] = {}
    for name, values in state.items():
        if isinstance(values, list):
            parts = placement.gather_json(values)
            whole[name] = [value for part in parts for value in part]
            continue
        # Collectives know no bool and want equal shapes: pad to the rank that holds most.
        kind = torch.uint8 if values.dtype == torch.bool else values.dtype
        rows = values.new_zeros((most, *values.shape[1:]), dtype=kind)
        rows[: len(values)] = values.to(kind)
        gathered = placement.gather(rows).cpu()
        kept = [part[:held] for part, held in zip(gathered, ranks_hold, strict=True)]
        whole[name] = torch.cat(kept).to(values.dtype)
    return whole


def take_environments(whole: Any, numbers: range) -> ByEnvironment:
    """The part of a gathered state that belongs to environments `numbers`."""
    return {name: values[numbers.start : numbers.stop] for name, values in whole.items()}
