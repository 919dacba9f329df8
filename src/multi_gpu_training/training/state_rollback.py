"""Copies of a training's state: to compare two ways of computing a step, and to roll back.

StepStart       what a step changes before its weights move; saved at the start of every step
StateCopies     named copies of model and optimizer, in host memory
Counters        progress of a training, apart from its tensors
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.state_dicts import copied
from multi_gpu_training.torch_internals import (
    RunningStatsBase,
    foreach_copy_,
    foreach_norm,
    foreach_sub,
    version,
    versions,
)
from multi_gpu_training.training.step_state import StepState

SMALL_STATE = 2**26  # bytes: copies of a state up to this size stay on the device


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy a list of tensors with one kernel per type: for a mixed list, torch launches one kernel
    per tensor."""
    with torch.no_grad():
        for to, of in _by_type(targets, sources):
            foreach_copy_(to, of)


def _by_type(ones: list[Tensor], others: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Pairs of tensors, grouped by what torch can handle in one kernel."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(ones, others, strict=True):
        mine, theirs = groups.setdefault((one.dtype, one.device), ([], []))
        mine.append(one)
        theirs.append(other)
    return list(groups.values())


class StepStart:
    """Metrics and buffers as they were when the current step began.

    A forward changes them long before the weights move. Buffers are copied on the device, and
    only if something may have changed them since the last step.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._step: int | None = None
        self._metrics: dict[str, Any] = {}
        self._all: list[Tensor] | None = None
        self._all_kept: list[Tensor] = []
        self._tracked: list[Tensor] = []  # running statistics: torch does not count their changes
        self._tracked_kept: list[Tensor] = []
        self._others: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self._replayed = 0

    def keep(self) -> None:
        """Call when a step begins."""
        state = self._state
        self._step = state.step
        self._metrics = state.metrics.kept()
        # A replay changes buffers without bumping their version.
        if self._all is None or state.replayed != self._replayed:
            self._keep_all()
            self._replayed = state.replayed
            return
        if self._tracked:
            copy_each(self._tracked_kept, self._tracked)
        for place, (buffer, kept) in enumerate(self._others):
            if version(buffer) != self._versions[place]:
                kept.copy_(buffer)
                self._versions[place] = version(buffer)

    def put_back(self) -> None:
        """Undo what the unfinished step changed. The caller must drop its gradients."""
        state = self._state
        state.micro = 0
        if self._step != state.step:
            return
        state.metrics.put_back(self._metrics)
        if self._all:
            copy_each(self._all, self._all_kept)
            self._versions = [version(buffer) for buffer, _ in self._others]

    def _keep_all(self) -> None:
        model = self._state.trained
        tracked = {
            id(buffer)
            for module in model.modules()
            if isinstance(module, RunningStatsBase)
            for buffer in module.buffers(recurse=False)
        }
        self._all = [buffer.detach() for buffer in model.buffers()]
        self._all_kept = [buffer.clone() for buffer in self._all]
        pairs = list(zip(model.buffers(), self._all, self._all_kept, strict=True))
        mine = [(live, kept) for own, live, kept in pairs if id(own) in tracked]
        self._tracked, self._tracked_kept = [a for a, _ in mine], [b for _, b in mine]
        self._others = [(live, kept) for own, live, kept in pairs if id(own) not in tracked]
        self._versions = [version(buffer) for buffer, _ in self._others]


class StateCopies:
    """Model, buffers and optimizer state, kept under names in memory that is reused.

    All but small copies live in pinned host memory, so that device memory does not grow.
    """

    def __init__(self, state: StepState) -> None:
        self.state = state
        self._kept: dict[str, list[Tensor]] = {}
        self._seen: tuple[list[Tensor], list[int]] = ([], [])  # at the last `keep`

    def tensors(self) -> list[Tensor]:
        """All state tensors as they are now, in a fixed order."""
        state = self.state
        found = [p.detach() for p in state.trained.parameters()]
        found += [b.detach() for b in state.trained.buffers()]
        for group in state.optimizer.param_groups:
            for parameter in group["params"]:
                kept = state.optimizer.state.get(parameter, {})
                found += [v for _, v in sorted(kept.items()) if isinstance(v, Tensor)]
        return found + state.extra_tensors

    def size(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def keep(self, name: str) -> None:
        live = self.tensors()
        kept = self._kept.get(name)
        if kept is None or [(k.shape, k.dtype) for k in kept] != [(t.shape, t.dtype) for t in live]:
            small = sum(t.numel() * t.element_size() for t in live) <= SMALL_STATE
            kept = self._kept[name] = list(map(torch.empty_like, live)) if small else _pinned(live)
        self._copy(kept, live)
        self._seen = live, versions(live)

    @property
    def untouched(self) -> bool:
        """Whether nothing but recorded steps can have written to the state since the last `keep`:
        those leave no trace."""
        tensors, then = self._seen
        return versions(tensors) == then

    def restore(self, name: str) -> None:
        self._copy(self.tensors(), self._kept[name])

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        if all(t.device == s.device for t, s in zip(targets, sources, strict=True)):
            copy_each(targets, sources)
            return
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def difference(self, name: str) -> float:
        """The largest relative difference, by norm, of any tensor from its copy."""
        live, kept = self.tensors(), self._kept[name]
        pairs = list(zip(live, kept, strict=True))
        if all(a.device == b.device and not a.is_complex() for a, b in pairs):
            quick = _largest_difference(live, kept)
            if math.isfinite(quick):
                return quick
        worst = []
        for tensor, other in pairs:
            if tensor.numel():
                mine = other.to(tensor.device, non_blocking=True, copy=True)
                worst.append(relative(tensor, mine))
        return float(torch.stack(worst).max()) if worst else 0.0

    def rename(self, old: str, new: str) -> None:
        self._kept[new], self._kept[old] = self._kept[old], self._kept.get(new, [])

    def drop(self) -> None:
        self._kept.clear()


@torch.no_grad()
def _largest_difference(live: list[Tensor], kept: list[Tensor]) -> float:
    """Computed in a few kernels; not finite if a tensor is not."""
    live = [t if t.is_floating_point() else t.double() for t in live]
    kept = [t if t.is_floating_point() else t.double() for t in kept]
    worst = []
    for ones, others in _by_type(live, kept):
        kind = torch.float64 if ones[0].dtype == torch.float64 else torch.float32
        apart = torch.stack(foreach_norm(foreach_sub(ones, others), dtype=kind))
        sizes = torch.stack(foreach_norm(ones, dtype=kind))
        worst.append((apart / sizes.clamp(min=1e-30)).max().double())
    return float(torch.stack(worst).max()) if worst else 0.0


def _pinned(tensors: list[Tensor]) -> list[Tensor]:
    """One block of pinned host memory for all tensors: pinning many small ones is slow."""
    sizes = [-(-t.numel() * t.element_size() // 16) * 16 for t in tensors]
    pinned = any(t.is_cuda for t in tensors)
    room = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    pieces = room.split(sizes)
    return [
        piece[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        for piece, t in zip(pieces, tensors, strict=True)
    ]


def relative(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| / ||a||; overwrites `b`. NaN at the same position counts as equal, NaN in only one
    of them as infinitely different."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
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
    """The progress of a training, apart from its tensors."""

    step: int
    epoch: int
    position: int
    schedule: Any
    rates: list[float]
    metrics: dict[str, Any]

    @classmethod
    def of(cls, state: StepState) -> Counters:
        return cls(
            state.step,
            state.epoch,
            state.position,
            copied(state.schedule.state_dict()),
            [float(group["lr"]) for group in state.optimizer.param_groups],
            state.metrics.kept(),
        )

    def restore(self, state: StepState) -> None:
        state.step, state.epoch, state.position = self.step, self.epoch, self.position
        state.schedule.load_state_dict(copied(self.schedule))
        for group, rate in zip(state.optimizer.param_groups, self.rates, strict=False):
            group["lr"] = rate  # a group added since then keeps its own
        state.metrics.put_back(self.metrics)
