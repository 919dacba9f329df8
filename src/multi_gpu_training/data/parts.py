"""A micro-batch cut into smaller ones, and the micro-batches of a step fetched once more."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from multi_gpu_training.data.batch import head, map_tensors, same_mapping, share_of
from multi_gpu_training.data.loader import ShareLoader
from multi_gpu_training.data.order import Share, cut
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.errors import DataError
from multi_gpu_training.torch_internals import version

if TYPE_CHECKING:
    from multi_gpu_training.data.feeding import Loader

Part = tuple[Any, Tensor | None, Share]


def in_parts(
    batch: Any, samples: Tensor | None, share: Share, parts: int, loader: Loader | None
) -> Iterator[Part]:
    """The micro-batch as `parts` smaller ones, which together weigh what it weighs. A part
    without a sample holds a stand-in, and its share says 0."""
    if parts == 1:
        yield batch, samples, share
        return
    refetch = not isinstance(batch, ResidentBatch) and not _can_be_cut(batch, share.count)
    if refetch and (share.changed or not isinstance(loader, ShareLoader) or not loader.refetches):
        raise DataError(
            "a micro-batch is too large for the memory and cannot be cut in two: not every tensor "
            f"in it has {share.count} rows, one a sample; lower batch_size, or yield tensors with "
            "one row a sample",
            code="MGT603",
        )
    for part in range(parts):
        begin, end = cut(share.count, parts, part)
        smaller = replace(
            share,
            indices=share.indices[begin:end],
            count=end - begin,
            first=share.first and part == 0,
            last=share.last and part == parts - 1,
        )
        mine = samples if samples is None else samples[begin:end]
        if isinstance(batch, ResidentBatch):
            yield ResidentBatch(batch.index[begin:end], batch.tensors, smaller), mine, smaller
        elif begin == end:
            yield head(batch, 1, share.count), mine, smaller
        elif refetch:
            assert isinstance(loader, ShareLoader)
            yield loader.fetch_again(smaller), mine, smaller
        else:
            yield _between(batch, begin, end), mine, smaller


def step_batches(loader: Loader, epoch: int, position: int) -> Iterator[Any]:
    """This rank's micro-batches of one step once more, as the loader gave them: what a sample is
    depends on (seed, epoch, sample) alone. Fetched in this process."""
    twin = copy.copy(loader)
    twin.seek(epoch, position)
    for batch in twin.fetched_here():
        yield batch
        share = share_of(batch)
        if share is None or share.last:
            return


def _can_be_cut(batch: Any, count: int, inside: bool = False) -> bool:
    """Whether every part of the batch has one entry a sample."""
    if isinstance(batch, Tensor):
        return batch.ndim == 0 or batch.shape[0] == count
    if inside and isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return len(batch) == count
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return all(_can_be_cut(part, count, inside=True) for part in batch)
    return isinstance(batch, (int, float, str, bool, type(None)))


def _between(batch: Any, begin: int, end: int, inside: bool = False) -> Any:
    """The samples from `begin` to `end` of a batch that can be cut."""
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.ndim else batch
    if inside and isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        parts = {key: _between(batch[key], begin, end, True) for key in batch}
        return same_mapping(batch, parts)
    if isinstance(batch, tuple):
        found = [_between(part, begin, end, True) for part in batch]
        return type(batch)(*found) if hasattr(batch, "_fields") else tuple(found)
    if isinstance(batch, list):
        return [_between(part, begin, end, True) for part in batch]
    return batch


def versions(batch: Any) -> list[int]:
    """How often each tensor of a batch was written to: equal lists, equal contents."""
    found: list[int] = []
    map_tensors(batch, lambda tensor: (found.append(version(tensor)), tensor)[1])  # type: ignore[func-returns-value]
    return found
