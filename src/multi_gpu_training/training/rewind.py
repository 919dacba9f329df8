"""Copies of a run's state in host memory: to compare two ways of computing, and to go back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multi_gpu_training.data.batch import map_tensors
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.training.capture import KeptBatch, leaves

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer

# One micro-batch as a trainer takes it: batch, numbers of its samples, share.
Fed = tuple[Any, Tensor | None, Share]


class StateCopies:
    """Model, buffers and optimizer state, kept under names in host memory that is used again.

    Device memory stays as it is: copies live on the host, pinned.
    """

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self.trainer = trainer
        self._kept: dict[str, list[Tensor]] = {}

    def tensors(self) -> list[Tensor]:
        """All state tensors as they are now, in a fixed order."""
        trainer = self.trainer
        found = [p.detach() for p in trainer.model.parameters()]
        found += [b.detach() for b in trainer.model.buffers()]
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                state = trainer.optimizer.state.get(parameter, {})
                found += [v for _, v in sorted(state.items()) if isinstance(v, Tensor)]
        return found + trainer.finite.tensors()

    def size(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def keep(self, name: str) -> None:
        live = self.tensors()
        kept = self._kept.get(name)
        if kept is None or [(k.shape, k.dtype) for k in kept] != [(t.shape, t.dtype) for t in live]:
            kept = self._kept[name] = _host_copies(live)
        for copied, tensor in zip(kept, live, strict=True):
            copied.copy_(tensor, non_blocking=True)

    def restore(self, name: str) -> None:
        with torch.no_grad():
            for tensor, copied in zip(self.tensors(), self._kept[name], strict=True):
                tensor.copy_(copied, non_blocking=True)

    def difference(self, name: str) -> float:
        """The largest relative difference of a tensor, by norm, from the copy."""
        worst = []
        for tensor, copied in zip(self.tensors(), self._kept[name], strict=True):
            if tensor.numel():
                mine = copied.to(tensor.device, non_blocking=True, copy=True)
                worst.append(relative(tensor, mine))
        return float(torch.stack(worst).max()) if worst else 0.0

    def rename(self, old: str, new: str) -> None:
        self._kept[new], self._kept[old] = self._kept[old], self._kept.get(new, [])

    def drop(self) -> None:
        self._kept.clear()


def _host_copies(tensors: list[Tensor]) -> list[Tensor]:
    """Room for the tensors in one piece of host memory: pinning many small ones takes long."""
    sizes = [-(-t.numel() * t.element_size() // 16) * 16 for t in tensors]
    pinned = any(t.is_cuda for t in tensors)
    room = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    pieces = room.split(sizes)
    return [
        piece[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        for piece, t in zip(pieces, tensors, strict=True)
    ]


def relative(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| / ||a||, where `b` is overwritten. NaN in the same place counts as equal; NaN in
    one of them alone as far apart as can be."""
    kind = torch.float64 if a.dtype == torch.float64 else torch.float32
    a = a.to(kind)
    both = a.isnan() & b.isnan()
    b = b.to(kind).sub_(a)  # in place: comparing must not cost memory
    b.masked_fill_(both, 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    size = a.square().nansum(dtype=torch.float64).sqrt()
    apart: Tensor = b.norm().double() / size.clamp(min=1e-30)
    return apart


@dataclass
class Counters:
    """Where a trainer stands, apart from its tensors."""

    step: int
    epoch: int
    position: int
    schedule: Any
    rates: list[float]
    metrics: dict[str, Any]

    @classmethod
    def of(cls, trainer: MultiGPUTrainer) -> Counters:
        return cls(
            trainer.step,
            trainer.epoch,
            trainer.position,
            copy.deepcopy(trainer.schedule.state_dict()),
            [float(group["lr"]) for group in trainer.optimizer.param_groups],
            trainer.metrics.kept(),
        )

    def restore(self, trainer: MultiGPUTrainer) -> None:
        trainer.step, trainer.epoch, trainer.position = self.step, self.epoch, self.position
        trainer.schedule.load_state_dict(copy.deepcopy(self.schedule))
        for group, rate in zip(trainer.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        trainer.metrics.put_back(self.metrics)


@dataclass
class Window:
    """The steps since the last one that was verified, with what they were computed from."""

    steps: list[list[Fed]] = field(default_factory=list)
    kept_bytes: int = 0
    counters: Counters | None = None
    restore_more: Callable[[], None] | None = None

    def begin(self, trainer: MultiGPUTrainer, restore_more: Callable[[], None] | None) -> None:
        self.steps.clear()
        self.kept_bytes = 0
        self.counters = Counters.of(trainer)
        self.restore_more = restore_more

    def add(self, step: list[Fed], size: int) -> None:
        self.steps.append(step)
        self.kept_bytes += size


def step_bytes(step: list[Fed]) -> int:
    """Memory that keeping these batches takes."""
    kept = [batch for batch, _, _ in step if not isinstance(batch, (ResidentBatch, KeptBatch))]
    return sum(t.numel() * t.element_size() for batch in kept for t in leaves(batch))


def own_copy(batch: Any) -> Any:
    """The batch in memory of its own: its giver may fill the old one anew."""
    if type(batch) is tuple and all(isinstance(part, Tensor) for part in batch):
        return tuple([part.clone() for part in batch])
    return map_tensors(batch, torch.clone)
