"""Ready-made batches: a DataLoader with `batch_size=None`, whose every item is one step.

Every rank reads every item and takes its rows. An item that cannot be cut into rows, such as a
graph or a single picture, is computed whole by one rank after the other: right, but no faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from multi_gpu_training.data.batch import emptied, rows, tensors_of
from multi_gpu_training.data.loader import Feeding, Fetch, ShareLoader, started
from multi_gpu_training.data.order import Share, cut, derive_seed, seed_everything
from multi_gpu_training.data.sample_count import BatchSizeFn, sample_count
from multi_gpu_training.errors import DataError

_WHOLE = (
    "DataLoader(batch_size=None): items of {} cannot be cut into rows, so each is computed by one "
    "rank while the others wait. Let every tensor of an item have one row per sample, or give "
    "setup_training or fit batch_size_fn=lambda batch: ..."
)


class ItemLoader(ShareLoader):
    """This rank's rows of every item of a dataset."""

    refetches = False

    def make_fetch(self, in_main_process: bool) -> Fetch:
        return _FetchItem(self.dataset, self.feeding.collate, in_main_process)

    def __len__(self) -> int:
        return self.steps * max(1, self.feeding.items)

    def plan(self) -> Iterator[Share]:
        feeding = self.feeding
        for position, batch in enumerate(self.source.batches(feeding.seed, self.epoch)):
            if position < self.start or not takes_item(feeding, position):
                continue
            yield Share(
                epoch=self.epoch,
                position=position,
                indices=(batch[0],),
                count=1,
                window_count=1,
                first=True,
                last=True,
                # Without the rank: all of them must see the same item.
                key=derive_seed(feeding.seed, self.epoch, position),
                sample_seed=derive_seed(feeding.seed, self.epoch),
            )

    def host_batches(
        self, fetched: Iterable[tuple[Share, Any]] | None = None
    ) -> Iterator[tuple[Share, Any]]:
        for share, item in started(self._loader) if fetched is None else fetched:
            index = share.indices[0]
            number = index if isinstance(index, int) else share.position
            told = len(index) if isinstance(index, (list, tuple)) else None
            for mine, batch, size in item_parts(item, self.feeding, share, number, told):
                self._template = (size, batch)
                yield mine, batch if mine.count else emptied(batch)


class _FetchItem(Fetch):
    def collated(self, share: Share) -> tuple[Share, Any]:
        item = self.sample(share, share.indices[0])
        seed_everything(share.key)
        return share, self.collate(item)


def takes_item(feeding: Feeding, position: int) -> bool:
    """Validation deals whole items to the ranks: sums and weights need no rows."""
    return not feeding.evaluating or position % feeding.ranks == feeding.rank


def item_parts(
    item: Any, feeding: Feeding, share: Share, number: int, told: int | None = None
) -> Iterator[tuple[Share, Any, int]]:
    """A rank's micro-batches of one item: share, batch, and samples in the batch. The batch of an
    empty share is a stand-in. `told`: the samples of the item, where the sampler says so."""
    size, cuttable = _size(item, told, feeding.batch_size_fn)
    whole = feeding.evaluating or not cuttable
    if whole and feeding.ranks > 1 and not feeding.evaluating and feeding.rank == 0:
        warnings.warn(_WHOLE.format(_form(item)), stacklevel=2)
    chunks = 1 if whole else max(1, min(size, max(feeding.items, -(-size // feeding.micro_size))))
    for chunk in range(chunks):
        first, stop = cut(size, chunks, chunk)
        begin, end = cut(stop - first, feeding.ranks, feeding.rank, feeding.weights)
        if whole:
            mine = feeding.evaluating or share.position % feeding.ranks == feeding.rank
            begin, end = 0, size if mine else 0
        count = end - begin
        held = rows(item, size, first + begin, first + end) if count and not whole else item
        yield (
            Share(
                epoch=share.epoch,
                position=share.position,
                indices=tuple((number << 32) + first + row for row in range(begin, end)),
                count=count,
                window_count=size,
                first=chunk == 0,
                last=chunk == chunks - 1,
                key=share.key,
                sample_seed=share.sample_seed,
                place=(share.position << 32) + first + begin,
            ),
            held,
            count or size,
        )


def _size(item: Any, told: int | None, batch_size_fn: BatchSizeFn | None) -> tuple[int, bool]:
    """Samples in an item, and whether they are its rows."""
    tensors = list(tensors_of(item))
    if batch_size_fn is not None:
        told = int(batch_size_fn(item))
    if told is not None:
        return told, bool(tensors) and all(told in tensor.shape for tensor in tensors)
    direct = isinstance(item, (Tensor, list, tuple, dict)) or hasattr(item, "keys")
    firsts = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors}
    # One picture and its label, or one sequence, are no batches: more than one axis, no scalars.
    if direct and len(firsts) == 1 and -1 not in firsts and any(t.ndim > 1 for t in tensors):
        return firsts.pop(), True
    try:
        return sample_count(item), False
    except DataError:
        return 1, False


def _form(item: Any) -> str:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(item))
    return f"{type(item).__name__} ({shapes})"
