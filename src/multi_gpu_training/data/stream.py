"""The loader of iterable datasets: one stream, read by every rank, each keeping its share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from multi_gpu_training.data.batch import attach, emptied, head, to_device
from multi_gpu_training.data.generators import (
    global_generators_kept,
    own_generators,
    seed_own,
    set_states,
    states_of,
)
from multi_gpu_training.data.items import item_parts, takes_item
from multi_gpu_training.data.loader import Feeding, WorkerStart, as_is
from multi_gpu_training.data.order import Share, cut, derive_seed, seed_everything
from multi_gpu_training.data.passes import EpochLoader
from multi_gpu_training.errors import DataError

# A share, its batch, and the samples in that: of an empty share, a stand-in.
Window = tuple[Share, Any, int]


class StreamLoader(EpochLoader):
    """This rank's share of a dataset without length or random access.

    Every rank reads the one stream, with at most one worker, and keeps its own part of each
    global batch: order and batches do not depend on the number of ranks. Memory is bounded by
    one global batch. A resume reads past what was consumed.

    Without `steps_per_epoch` an epoch is one pass over the stream. With it, an epoch is that
    many steps: an endless stream is read on, one that ends is begun again. A pass reads `limit`
    global batches at most.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        global_batch_size: int,
        feeding: Feeding,
        steps_per_epoch: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        # Several workers would each read the whole stream.
        self.feeding = replace(feeding, num_workers=min(1, feeding.num_workers))
        self.steps = steps_per_epoch
        self.limit = limit
        self._template: tuple[int, Any] | None = None  # (samples in it, batch)
        self._next: Iterator[Window] | None = None  # stands where an epoch ended

    @property
    def evaluating(self) -> bool:
        return self.feeding.evaluating

    def seek(self, epoch: int, start: int = 0) -> None:
        """Begin the next pass there: the stream is read anew, for it may stand anywhere."""
        super().seek(epoch, start)
        self._next = None

    def set_shares(self, **how: Any) -> None:
        """Cut batches otherwise from the next pass on: other `weights`, or another `rank`.
        The stream is read anew up to where it stands."""
        self.feeding = replace(self.feeding, **how)
        self._next = None

    def one_pass(self) -> Iterator[Any]:
        # Taken, not shared: a pass that breaks off leaves nothing half read for the next one.
        windows, self._next = self._next, None
        if windows is None:
            windows = self._windows()
        for share, batch, size in windows:
            # Also of an empty share: a stream may be shorter than there are ranks.
            self._template = (size, batch)
            if share.count or not self.evaluating:
                kept = batch if share.count else emptied(batch)
                yield attach(to_device(kept, self.feeding.device), share)
            if share.last and self.steps is not None and share.position == self.steps - 1:
                self.seek(self.epoch + 1)
                self._next = windows
                return
        if not self.evaluating:
            self.seek(self.epoch + 1)

    def fetched_here(self) -> Iterator[Any]:
        """The same micro-batches, read by this process."""
        self.feeding = replace(self.feeding, num_workers=0, prefetch_factor=None)
        return self.one_pass()

    def stand_in(self, share: Share) -> Any:
        """A sample for a rank whose share is empty but whose model must run all the same."""
        assert self._template is not None
        size, batch = self._template
        return to_device(head(batch, 1, size), self.feeding.device)

    def _windows(self) -> Iterator[Window]:
        windows = _Windows(
            self.dataset,
            self.global_batch_size,
            self.feeding,
            self.epoch,
            self.start,
            self.steps,
            self.limit,
        )
        if not self.feeding.num_workers:
            return _read_here(windows)
        loader = DataLoader(
            windows,
            batch_size=None,
            num_workers=1,
            collate_fn=as_is,
            pin_memory=self.feeding.pin_memory,
            prefetch_factor=self.feeding.prefetch_factor,
            worker_init_fn=WorkerStart(self.feeding.worker_init_fn),
            generator=torch.Generator(),
        )
        return iter(loader)


def _read_here(windows: _Windows) -> Iterator[Window]:
    """Read in this process, beside a training that draws numbers too, and perhaps beside another
    pass over the same object, which may draw from the same generators."""
    own = own_generators(windows.dataset)
    iterator, inside = iter(windows), states_of(own)
    while True:
        outside = states_of(own)
        set_states(own, inside)
        with global_generators_kept():
            window = next(iterator, None)
        inside = states_of(own)
        set_states(own, outside)
        if window is None:
            return
        yield window


class _Windows(IterableDataset[Any]):
    """Global batches of the stream from (epoch, start) on, cut down to one rank's share."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        global_batch_size: int,
        feeding: Feeding,
        epoch: int,
        start: int,
        steps: int | None,
        limit: int | None,
    ) -> None:
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.feeding = feeding
        self.epoch = epoch
        self.start = start
        self.steps = steps
        self.limit = limit

    def __iter__(self) -> Iterator[Window]:
        if self.steps is None:
            for position, window in enumerate(islice(self._pass(self.epoch), self.limit)):
                if position >= self.start:
                    yield from self._parts(window, self.epoch, position)
            return
        number = 0
        first = self.epoch * self.steps + self.start
        for lap in count():
            before = number
            for window in self._pass(lap):
                if number >= first:
                    yield from self._parts(window, *divmod(number, self.steps))
                number += 1
            if number == before:
                raise DataError(
                    f"{type(self.dataset).__name__} gave no sample; an epoch of "
                    f"steps_per_epoch={self.steps} needs some"
                )

    def _pass(self, lap: int) -> Iterator[list[Any]]:
        window: list[Any] = []
        samples = _keyed_stream(self.dataset, self.feeding.seed, lap)
        for sample in _without_rest(samples, self.feeding.unit):
            window.append(sample)
            if len(window) == self.global_batch_size:
                yield window
                window = []
        if window:
            yield window

    def _parts(self, window: list[Any], epoch: int, position: int) -> Iterator[Window]:
        feeding = self.feeding
        if feeding.items:
            yield from self._item_parts(window[0], epoch, position)
            return
        chunks = max(1, -(-len(window) // feeding.micro_size))
        offset = position * self.global_batch_size
        for chunk in range(chunks):
            first = chunk * feeding.micro_size
            part = window[first : first + feeding.micro_size]
            begin, end = cut(len(part), feeding.ranks, feeding.rank, feeding.weights)
            share = Share(
                epoch=epoch,
                position=position,
                indices=tuple(range(offset + first + begin, offset + first + end)),
                count=end - begin,
                window_count=len(window),
                first=chunk == 0,
                last=chunk == chunks - 1,
                key=derive_seed(feeding.seed, epoch, position, chunk, feeding.rank),
                place=offset + first + begin,
            )
            seed_everything(share.key)
            yield share, feeding.collate(part[begin:end] or part[:1]), max(1, end - begin)

    def _item_parts(self, sample: Any, epoch: int, position: int) -> Iterator[Window]:
        feeding = self.feeding
        if not takes_item(feeding, position):
            return
        key = derive_seed(feeding.seed, epoch, position)
        seed_everything(key)
        item = feeding.collate(sample)
        seed = derive_seed(feeding.seed, epoch)
        share = Share(epoch, position, (), 1, 1, True, True, key, seed)
        yield from item_parts(item, feeding, share, position)


def _without_rest(samples: Iterator[Any], unit: int) -> Iterator[Any]:
    """The samples that fill whole batches of `unit`."""
    if unit == 1:
        yield from samples
        return
    batch: list[Any] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == unit:
            yield from batch
            batch.clear()


def _keyed_stream(dataset: Iterable[Any], seed: int, lap: int) -> Iterator[Any]:
    """The stream's samples, each drawn with randomness keyed by (seed, lap, place).

    All ranks draw alike, so even a stream that shuffles at random is one stream.
    """
    lap_seed = derive_seed(seed, lap)
    seed_everything(lap_seed)
    seed_own(dataset, lap_seed)
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(lap)  # last: a seed of its own for the lap holds
    iterator = iter(dataset)
    for place in count():
        seed_everything(derive_seed(lap_seed, place))
        try:
            sample = next(iterator)
        except StopIteration:
            return
        yield sample
