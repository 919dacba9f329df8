"""The steps since the last verified one, with the batches they were computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.batch import map_tensors
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.training.runner.graph import KeptBatch, leaves
from multi_gpu_training.training.state_rollback import Counters
from multi_gpu_training.training.step_state import StepState

# One micro-batch as a runner takes it: batch, numbers of its samples, share.
Fed = tuple[Any, Tensor | None, Share]


@dataclass
class RollbackWindow:
    """The steps since the last verified one, the learning rates of each, and the training's state
    before them."""

    steps: list[list[Fed]] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    kept_bytes: int = 0
    counters: Counters | None = None
    restore_more: Callable[[], None] | None = None

    def begin(self, state: StepState, restore_more: Callable[[], None] | None) -> None:
        self.steps.clear()
        self.rates.clear()
        self.kept_bytes = 0
        self.counters = Counters.of(state)
        self.restore_more = restore_more

    def add(self, step: list[Fed], rates: list[float], size: int) -> None:
        self.steps.append(step)
        self.rates.append(rates)
        self.kept_bytes += size


def step_bytes(step: list[Fed]) -> int:
    """Memory needed to keep these batches."""
    kept = [batch for batch, _, _ in step if not isinstance(batch, (ResidentBatch, KeptBatch))]
    return sum(t.numel() * t.element_size() for batch in kept for t in leaves(batch))


def fed(batch: Any, samples: Tensor | None, share: Share) -> Fed:
    """A micro-batch that may be recomputed later. A batch without a known window is the user's
    own, who may overwrite its memory with the next one."""
    return (_own_copy(batch) if share.window_count == 0 else batch), samples, share


def _own_copy(batch: Any) -> Any:
    if type(batch) is tuple and all(isinstance(part, Tensor) for part in batch):
        return tuple([part.clone() for part in batch])
    return map_tensors(batch, torch.clone)
