"""A micro-batch cut into smaller ones, and the micro-batches of a step fetched once more."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from multi_gpu_training.data.batch import attach, head, map_tensors, share_of, to_device
from multi_gpu_training.data.loader import ShareLoader, _Fetch
from multi_gpu_training.data.order import Share, cut
from multi_gpu_training.data.resident import ResidentBatch, ResidentLoader
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
    fetch = None
    if not isinstance(batch, ResidentBatch) and not _can_be_cut(batch, share.count):
        fetch = _fetch_of(loader, share)
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
            yield head(batch, 1), mine, smaller
        elif fetch is not None:
            assert loader is not None
            yield to_device(fetch[smaller][1], loader.feeding.device), mine, smaller
        else:
            yield _between(batch, share.count, begin, end), mine, smaller


def step_batches(loader: Loader, epoch: int, position: int) -> Iterator[Any]:
    """This rank's micro-batches of one step once more, as the loader gave them: what a sample is
    depends on (seed, epoch, sample) alone. Fetched in this process."""
    twin = copy.copy(loader)
    twin.seek(epoch, position)
    if isinstance(twin, ResidentLoader):
        found: Iterator[Any] = twin.batches()
    elif isinstance(twin, ShareLoader):
        fetch = _Fetch(twin.dataset, twin.feeding.collate, True)
        device = twin.feeding.device
        found = (
            attach(
                to_device(fetch[s][1] if s.count else twin.stand_in_on_host(s, 0), device),
                s,
            )
            for s in twin.plan()
        )
    else:
        twin.feeding = replace(twin.feeding, num_workers=0, prefetch_factor=None)
        found = iter(twin)
    for batch in found:
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
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return all(_can_be_cut(part, count, inside=True) for part in batch)
    return isinstance(batch, (int, float, str, bool, type(None)))


def _between(batch: Any, count: int, begin: int, end: int, inside: bool = False) -> Any:
    """The samples from `begin` to `end` of a batch that can be cut."""
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.ndim else batch
    if inside and isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return batch[begin:end]
    if isinstance(batch, dict):
        return {key: _between(part, count, begin, end, True) for key, part in batch.items()}
    if isinstance(batch, tuple):
        parts = [_between(part, count, begin, end, True) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [_between(part, count, begin, end, True) for part in batch]
    return batch


def _fetch_of(loader: Loader | None, share: Share) -> _Fetch:
    """What collates the samples of a part anew, where a batch cannot be cut."""
    if isinstance(loader, ShareLoader) and share.indices:
        return _Fetch(loader.dataset, loader.feeding.collate, True)
    raise DataError(
        "a micro-batch is too large for the memory and cannot be cut in two: not every tensor in "
        f"it has {share.count} rows, one a sample; lower batch_size, or yield tensors with one "
        "row a sample"
    )


def versions(batch: Any) -> list[int]:
    """How often each tensor of a batch was written to: equal lists, equal contents."""
    found: list[int] = []
    map_tensors(batch, lambda tensor: (found.append(version(tensor)), tensor)[1])  # type: ignore[func-returns-value]
    return found
