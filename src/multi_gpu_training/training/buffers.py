"""Copies of a model's buffers as they were when a step began: a forward changes BatchNorm's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor, in one kernel for each type: torch goes one by one through a mixed
    list."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = by_type.setdefault(target.dtype, ([], []))
        to.append(target)
        of.append(source)
    with torch.no_grad():
        for to, of in by_type.values():
            torch._foreach_copy_(to, of)


class BufferCopies:
    """On the device, made again at each step's begin where something may have changed."""

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self._trainer = trainer
        self._all: list[Tensor] | None = None
        self._all_kept: list[Tensor] = []
        self._tracked: list[Tensor] = []  # BatchNorm's: torch does not count their changes
        self._tracked_kept: list[Tensor] = []
        self._others: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self._replayed = 0

    def keep(self) -> None:
        replayed = self._trainer.execution.replayed
        if self._all is None or replayed != self._replayed:
            self._keep_all()
            self._replayed = replayed
            return
        if self._tracked:
            copy_each(self._tracked_kept, self._tracked)
        for place, (buffer, kept) in enumerate(self._others):
            if buffer._version != self._versions[place]:
                kept.copy_(buffer)
                self._versions[place] = buffer._version

    def put_back(self) -> None:
        if self._all:
            copy_each(self._all, self._all_kept)
            self._versions = [buffer._version for buffer, _ in self._others]

    def _keep_all(self) -> None:
        model = self._trainer.model
        tracked = {
            id(buffer)
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            for buffer in module.buffers(recurse=False)
        }
        self._all = [buffer.detach() for buffer in model.buffers()]
        self._all_kept = [buffer.clone() for buffer in self._all]
        pairs = list(zip(model.buffers(), self._all, self._all_kept, strict=True))
        mine = [(live, kept) for own, live, kept in pairs if id(own) in tracked]
        self._tracked, self._tracked_kept = [a for a, _ in mine], [b for _, b in mine]
        self._others = [(live, kept) for own, live, kept in pairs if id(own) not in tracked]
        self._versions = [buffer._version for buffer, _ in self._others]
