"""How many samples a batch has that no loader of ours has made.

Nothing in a batch says so: this reads it from shapes, and refuses what could mean two things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from multi_gpu_training.data.batch import tensors_of
from multi_gpu_training.errors import DataError

BatchSizeFn = Callable[[Any], int]


def sample_count(batch: Any, batch_size_fn: BatchSizeFn | None = None) -> int:
    """Samples in a batch, by `batch_size_fn` where the user gave one. Raises DataError where
    shapes leave more than one answer."""
    if batch_size_fn is not None:
        return int(batch_size_fn(batch))
    # First the usual batch, which every step of a loop of one's own asks about.
    if type(batch) in (list, tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        length = batch[0].shape[0]
        if all(isinstance(p, Tensor) and p.ndim and p.shape[0] == length for p in batch):
            return length
    found = _seen(batch)
    if found is not None:
        return found
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(batch))
    raise DataError(
        f"cannot see how many samples a {type(batch).__name__} with tensors of shape {shapes} "
        "has: they agree neither in their first dimension nor in exactly one length. Give "
        "setup_training or fit batch_size_fn=lambda batch: ..., or let loss_fn return "
        "(mean, weight) and the samples be any number"
    )


def fits(batch: Any, count: int) -> bool:
    """Whether every tensor that can hold `count` samples has an axis of that length."""
    tensors = [t for t in tensors_of(batch) if t.numel() != 1]
    return bool(tensors) and all(count in tensor.shape for tensor in tensors)


def rows_of(batch: Any) -> int | None:
    """The rows of a batch whose parts are tensors and lists of one length; None for any other."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    parts = [batch] if isinstance(batch, Tensor) else parts
    if not isinstance(parts, (list, tuple)) or not any(isinstance(p, Tensor) for p in parts):
        return None
    sized = [isinstance(p, (list, tuple)) or (isinstance(p, Tensor) and p.ndim > 0) for p in parts]
    lengths = {len(p) for p in parts} if all(sized) else set()
    return lengths.pop() if len(lengths) == 1 else None


def _seen(batch: Any) -> int | None:
    # Graph batches and tensor dicts say it themselves; their tensors have other first dimensions.
    for name in ("num_graphs", "batch_size"):
        told = None if isinstance(batch, Tensor) else getattr(batch, name, None)
        if isinstance(told, int):
            return told
        if isinstance(told, tuple) and told and isinstance(told[0], int):
            return told[0]
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, list) and batch and all(isinstance(part, tuple) for part in batch):
        return len(batch)  # samples as the dataset gave them: default_collate makes no tuples
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, (list, tuple)):
        return 1
    direct = [part for part in parts if isinstance(part, Tensor)]
    lists = [part for part in parts if isinstance(part, (list, tuple))]
    inner = [tensor for part in parts for tensor in tensors_of(part)]
    by_tensors = _common(direct or inner)
    if direct or not inner:
        lengths = {len(part) for part in lists}
        return by_tensors if by_tensors is not None or inner else _only(lengths, default=1)
    # Tensors only further inside: columns of a nested batch, or lists of pictures and boxes.
    lengths = {len(part) for part in lists} or {len(parts)}
    by_length = lengths.pop() if len(lengths) == 1 else None
    if by_tensors is None or by_length is None or by_tensors == by_length:
        return by_length if by_tensors is None else by_tensors
    return None


def _common(tensors: list[Tensor]) -> int | None:
    """The length that all tensors share: of their first axes, or of any in time-major batches.
    Single numbers (a temperature, a step) say nothing, unless there is nothing else."""
    several = [t for t in tensors if t.numel() != 1 and t.ndim] or [t for t in tensors if t.ndim]
    if not several:
        return 1 if tensors else None
    firsts = {tensor.shape[0] for tensor in several}
    if len(firsts) == 1:
        return firsts.pop()
    return _only(set.intersection(*(set(tensor.shape) for tensor in several)))


def _only(found: set[int], default: int | None = None) -> int | None:
    return found.pop() if len(found) == 1 else default
