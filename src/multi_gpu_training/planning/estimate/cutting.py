"""Memory of smaller batches, from one that is cut."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from multi_gpu_training.data.batch import attach, head, share_of
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.planning.estimate.anatomy import Anatomy

Step = Callable[[list[Any]], None]


def memory_by_batch(
    anatomy: Anatomy, step: Step, micros: list[Any], whole: int
) -> dict[int, tuple[int, int]]:
    """Peak bytes of `step` with micro-batches of `whole` samples, half and a quarter of it, and of
    its forward and backward alone; empty on CPUs, and where a batch cannot be cut."""
    found: dict[int, tuple[int, int]] = {}
    device, backward = anatomy.device, 0
    if device.type != "cuda" or whole < 2:
        return found

    def note() -> None:
        nonlocal backward
        backward = torch.cuda.max_memory_allocated(device)

    anatomy.after_backward = note
    # Other shapes would be compiled anew, which takes a minute; as it was written the loss keeps
    # no less.
    module = anatomy.trainer.step_module
    module.compiled = module.loss_fn
    try:
        for size in (whole, whole // 2, max(1, whole // 4)):
            cut = [first(batch, size) for batch in micros]
            step(cut)  # new shapes choose their algorithms first
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            step(cut)
            torch.cuda.synchronize(device)
            found[size] = (torch.cuda.max_memory_allocated(device), backward)
    except Exception as error:  # no more is known, and the rest is worth having
        print(f"memory by batch size: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def first(batch: Any, count: int) -> Any:
    """The first `count` samples, as a batch of our loader if it was one."""
    share = share_of(batch)
    if share is None:
        return head(batch, count)
    size = min(count, share.count)
    smaller = replace(share, indices=share.indices[:size], count=size)
    if isinstance(batch, ResidentBatch):
        return ResidentBatch(batch.index[:size], batch.tensors, smaller)
    return attach(head(batch, count), smaller)
