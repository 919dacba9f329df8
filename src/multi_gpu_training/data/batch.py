"""Batches of any structure: move them, cut them, and let them carry their share."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.errors import CheckpointError

_ATTRIBUTE = "_mgt_share"
_PLAIN = "_mgt_plain"


@lru_cache
def _with_attributes(kind: type) -> type:
    return type(kind.__name__, (kind,), {_PLAIN: kind})


def attach(batch: Any, share: Share) -> Any:
    """The same batch, carrying `share`, so that `train_step(batch)` gives it its weight.

    The user sees the batch as collated: a list stays a list, a dict a dict, a tensor a tensor.
    Its tensors carry the share as well, for loops that unpack: `for x, y in loader`.
    """
    mark(batch, share)
    return carry(batch, share)


def mark(batch: Any, share: Share) -> None:
    """Let the tensors of a batch carry its share."""
    for tensor in tensors_of(batch):
        setattr(tensor, _ATTRIBUTE, share)


def carry(batch: Any, share: Share) -> Any:
    """The same batch, carrying `share` as a whole; its tensors may be the user's own."""
    if type(batch) in (list, dict) or isinstance(batch, tuple):
        kind: Any = type(batch)
        batch = _of_kind(_with_attributes(kind), batch)
    with suppress(AttributeError, TypeError):  # the loader still knows which one it gave last
        setattr(batch, _ATTRIBUTE, share)
    return batch


def as_collated(batch: Any) -> Any:
    """The batch in the very type it was collated in, without its share. Code compiled for one type
    is compiled again for another, which a recording does not allow."""
    plain = getattr(type(batch), _PLAIN, None)
    return batch if plain is None else _of_kind(plain, batch)


def _of_kind(kind: Any, batch: Any) -> Any:
    return kind(*batch) if hasattr(batch, "_fields") else kind(batch)


def share_of(batch: Any) -> Share | None:
    """The share of a batch as the loader gave it; None once it was unpacked or made anew."""
    share = getattr(batch, _ATTRIBUTE, None)
    return share if isinstance(share, Share) else None


def refuse_to_start_over(batches: Iterable[Any], step: int) -> Iterator[Any]:
    """The batches, if they come from a loader of ours, perhaps inside a wrapper of the user's. Any
    other would begin again an epoch that the run is in the middle of."""
    for batch in batches:
        # An unpacked batch still carries its share on its tensors.
        if all(share_of(part) is None for part in (batch, *tensors_of(batch))):
            raise CheckpointError(
                f"the checkpoint of step {step} was saved in the middle of an epoch whose batches "
                "come from your own loader, which would begin it again. Give its data to "
                "setup_training and train_epoch the loader that it returns, or set "
                "checkpoint_frequency above the steps of an epoch: its end is saved anyway"
            )
        yield batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a batch of tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with `change` applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, tuple):
        parts = [map_tensors(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [map_tensors(part, change) for part in batch]
    if isinstance(batch, Mapping):
        return same_mapping(batch, {key: map_tensors(batch[key], change) for key in batch})
    return batch


def same_mapping(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """`parts` in the form of `batch`: a tokenizer's BatchEncoding keeps its methods."""
    if isinstance(batch, UserDict):
        made = copy.copy(batch)
        made.data = parts
        return made
    return parts


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


def rows(batch: Any, size: int, begin: int, end: int) -> Any:
    """Samples `begin` to `end` of a collated batch of `size`. A tensor or list without an entry
    per sample stays whole; in a time-major tensor, the batch is the one axis of that length."""
    if isinstance(batch, Tensor):
        axes = [axis for axis, length in enumerate(batch.shape) if length == size]
        if not axes or (len(axes) > 1 and axes[0] != 0):
            return batch
        return _cut(batch, axes[0], begin, end)
    if isinstance(batch, Mapping):
        return same_mapping(batch, {key: _entries(batch[key], size, begin, end) for key in batch})
    if isinstance(batch, (list, tuple)):
        # A list of samples as a dataset gives them, and not of their collated parts.
        if isinstance(batch, list) and len(batch) == size and _are_samples(batch):
            return batch[begin:end]
        parts = [_entries(part, size, begin, end) for part in batch]
        if isinstance(batch, list):
            return parts
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch


def _cut(tensor: Tensor, axis: int, begin: int, end: int) -> Tensor:
    if tensor.layout is torch.strided:
        return tensor.narrow(axis, begin, end - begin)
    return tensor.index_select(axis, torch.arange(begin, end, device=tensor.device))


def _entries(part: Any, size: int, begin: int, end: int) -> Any:
    """The same of something inside a batch: names, file paths, boxes of a picture."""
    if isinstance(part, list) and len(part) == size and not _are_columns(part, size):
        return part[begin:end]
    return rows(part, size, begin, end)


def _are_samples(batch: list[Any]) -> bool:
    return all(isinstance(part, (tuple, Mapping, str)) for part in batch)


def _are_columns(part: list[Any], size: int) -> bool:
    """Whether each entry is itself a collated column, as default_collate makes of a tuple."""
    return all(isinstance(entry, Tensor) and entry.shape[:1] == (size,) for entry in part)


def head(batch: Any, count: int, size: int) -> Any:
    """The first `count` samples of a collated batch of `size`."""
    return rows(batch, size, 0, min(count, size))


def stand_in_of(batch: Any, size: int) -> tuple[Any, int]:
    """What a rank without samples computes on, of a collated batch of `size`, and how many samples
    that is: one, or all of them where not every tensor has a row per sample. Edges of graphs,
    offsets and nested tensors cannot be cut without knowing what they mean."""
    whole = any(t.ndim and not (_is_plain(t) and len(t) == size) for t in tensors_of(batch))
    return (batch, size) if whole else (head(batch, 1, size), 1)


def emptied(batch: Any) -> Any:
    """The batch with no sample in it, for a rank that has none; nested tensors stay whole."""
    return map_tensors(
        batch, lambda t: _cut(t, 0, 0, 0) if t.ndim and (_is_plain(t) or t.is_sparse) else t
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def alike(batch: Any, other: Any) -> bool:
    """Whether two batches have tensors of the same form, whatever the number of samples; true of
    one that has none at all."""
    forms = [
        [(tensor.dtype, tensor.shape[1:]) for tensor in tensors_of(part)] for part in (batch, other)
    ]
    keys = [list(part) if isinstance(part, Mapping) else None for part in (batch, other)]
    return not forms[0] or (forms[0] == forms[1] and keys[0] == keys[1])


def with_a_row(batch: Any, rows: Iterable[Tensor]) -> Any:
    """The batch with one sample where it has none: of `rows` what has the form, or zeros where the
    user's loop has made something else of it."""
    known, place = list(rows), count()

    def filled(tensor: Tensor) -> Tensor:
        number = next(place)
        if tensor.is_nested or all(tensor.shape):
            return tensor
        shape = [length or 1 for length in tensor.shape]
        for row in (*known[number : number + 1], *known):
            if row.dtype == tensor.dtype and list(row.shape) == shape:
                return row
        return tensor.new_zeros(shape)

    return map_tensors(batch, filled)
