"""Batches of any structure: move them, cut them, and let them carry their share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share

_ATTRIBUTE = "_mgt_share"


class _List(list[Any]):
    pass


class _Dict(dict[Any, Any]):
    pass


@lru_cache
def _with_attributes(kind: type) -> type:
    return type(kind.__name__, (kind,), {})


def attach(batch: Any, share: Share) -> Any:
    """The same batch, carrying `share`, so that `train_step(batch)` weighs it rightly.

    The user sees the batch as collated: a list stays a list, a dict a dict, a tensor a tensor.
    """
    if type(batch) is list:
        batch = _List(batch)
    elif type(batch) is dict:
        batch = _Dict(batch)
    elif isinstance(batch, tuple):
        kind = _with_attributes(type(batch))
        batch = kind(*batch) if hasattr(batch, "_fields") else kind(batch)
    setattr(batch, _ATTRIBUTE, share)
    return batch


def share_of(batch: Any) -> Share | None:
    share = getattr(batch, _ATTRIBUTE, None)
    return share if isinstance(share, Share) else None


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with `change` applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, tuple):
        parts = [map_tensors(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [map_tensors(part, change) for part in batch]
    if isinstance(batch, dict):
        return {key: map_tensors(part, change) for key, part in batch.items()}
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    if type(batch) in (list, tuple) and all(
        isinstance(part, Tensor) and part.device == device for part in batch
    ):
        return batch  # the usual case of a loop with batches on the device
    move = getattr(batch, "to", None)
    if callable(move) and not isinstance(batch, Tensor):
        return move(device)

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return map_tensors(batch, moved)


def first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(parts, (list, tuple)) or isinstance(batch, Mapping):
        for part in parts:
            found = first_tensor(part)
            if found is not None:
                return found
    return None


def batch_count(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor that has one."""
    if (
        isinstance(batch, (list, tuple))
        and batch
        and isinstance(batch[0], Tensor)
        and batch[0].ndim
    ):
        return batch[0].shape[0]
    tensor = first_tensor(batch)
    return tensor.shape[0] if tensor is not None and tensor.ndim else 1


def head(batch: Any, count: int) -> Any:
    """The first `count` samples of a collated batch."""
    size = batch_count(batch)

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:count] if tensor.ndim and tensor.shape[0] == size else tensor

    return map_tensors(batch, cut)
