"""The loader of streams: each rank's share of every global batch.

A plain IterableDataset is read by every rank, with one worker. A ShardedStream whose lengths are
known is split: each worker of each rank reads only the lanes that its batches come from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from multi_gpu_training.data.batch import attach, emptied, stand_in_of, to_device
from multi_gpu_training.data.generators import (
    global_generators_kept,
    own_generators,
    set_states,
    states_of,
)
from multi_gpu_training.data.loader import Feeding, WorkerStart, as_is, started
from multi_gpu_training.data.order import Share, without_rest
from multi_gpu_training.data.passes import EpochLoader
from multi_gpu_training.data.sharded_stream import ShardedStream
from multi_gpu_training.data.stream_steps import (
    LaneSteps,
    StatefulStream,
    StreamSteps,
    WholeStream,
    Window,
    resumable,
)
from multi_gpu_training.errors import CheckpointError, ShardError


class StreamLoader(EpochLoader):
    """This rank's share of a dataset without length or random access.

    Order and batches do not depend on the number of ranks. Memory is bounded by one global batch,
    and the shuffle buffer of a ShardedStream. A resume reads past what was consumed, unless the
    stream is sharded, with known lengths, or stateful.

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
        self.feeding = feeding
        self.asked_steps = steps_per_epoch
        self.limit = limit
        self._template: tuple[int, Any] | None = None  # (samples in it, batch)
        self._next: Iterator[Window] | None = None  # stands where an epoch ended
        self._has_learned = False  # the lengths of shards, from a pass that read all of them
        self._places: list[dict[str, Any]] = []  # where a stateful stream stood, newest last
        self._saved_order: dict[str, Any] | None = None
        self._initial: dict[str, Any] | None = None
        if isinstance(dataset, StatefulStream) and resumable(dataset):
            with suppress(Exception):  # some have no state before they are read
                self._initial = copy.deepcopy(dataset.state_dict())

    @property
    def evaluating(self) -> bool:
        return self.feeding.evaluating

    @property
    def steps(self) -> int | None:
        """Global batches in an epoch, where that is known."""
        if self.asked_steps is None and isinstance(self.dataset, ShardedStream):
            samples = self.dataset.samples
            if samples is not None and not self.evaluating and not self.feeding.items:
                return -(-without_rest(samples, self.feeding.unit) // self.global_batch_size)
        return self.asked_steps

    def seek(self, epoch: int, start: int = 0) -> None:
        """Begin the next pass there: the stream is read anew, for it may stand anywhere."""
        super().seek(epoch, start)
        self._next = None

    def set_shares(self, **how: Any) -> None:
        """Share out batches by other `weights`, or for another `rank`, from the next pass on.
        The stream is read anew up to where it stands."""
        self.feeding = replace(self.feeding, **how)
        self._next = None

    def one_pass(self) -> Iterator[Any]:
        # Taken, not shared: a pass that breaks off leaves nothing half read for the next one.
        windows, self._next = self._next, None
        if windows is None:
            windows = self._windows()
        for share, batch, size, told in windows:
            if told is not None:
                self._learn(told)
            if share is None:
                continue
            # Also of an empty share: a stream may be shorter than there are ranks.
            self._template = (size, batch)
            if share.count or not self.evaluating:
                kept = batch if share.count else emptied(batch)
                yield attach(to_device(kept, self.feeding.device), share)
            steps = self.asked_steps
            if share.last and steps is not None and share.position == steps - 1:
                self.seek(self.epoch + 1)
                # Once the lengths are known, the next epoch is split over ranks and workers.
                self._next = None if self._has_learned else windows
                self._has_learned = False
                return
        if not self.evaluating:
            self.seek(self.epoch + 1)

    def fetched_here(self) -> Iterator[Any]:
        """The same micro-batches, read by this process."""
        self.feeding = replace(self.feeding, num_workers=0, prefetch_factor=None)
        return self.one_pass()

    def stand_in(self, share: Share) -> tuple[Any, int]:
        """Samples for a rank whose share is empty but whose model must run all the same, and how
        many there are."""
        assert self._template is not None
        size, batch = self._template
        found, count = stand_in_of(batch, size)
        return to_device(found, self.feeding.device), count

    def _windows(self) -> Iterator[Window]:
        place = self.epoch, self.start, self.asked_steps, self.limit
        split = isinstance(self.dataset, ShardedStream) and self.dataset.lengths is not None
        windows: StreamSteps
        if split:
            windows = LaneSteps(self.dataset, self.global_batch_size, self.feeding, *place)
        else:
            windows = WholeStream(self.dataset, self.global_batch_size, self.feeding, *place)
            windows.initial, windows.saved = self._initial, self._nearest_place()
        if not self.feeding.num_workers:
            return _read_here(windows)
        # Several workers would each read the whole stream, or the whole item.
        alone = not split or self.feeding.items
        loader = DataLoader(
            windows,
            batch_size=None,
            num_workers=1 if alone else self.feeding.num_workers,
            collate_fn=as_is,
            pin_memory=self.feeding.pin_memory,
            prefetch_factor=self.feeding.prefetch_factor,
            worker_init_fn=WorkerStart(self.feeding.worker_init_fn),
            generator=torch.Generator(),
        )
        return started(loader)

    def describe(self) -> list[str]:
        """What a user should know about how the stream is read."""
        stream, feeding = self.dataset, self.feeding
        if not isinstance(stream, ShardedStream):
            return []
        said = stream.describe()
        readers = feeding.ranks * max(1, feeding.num_workers)
        if stream.lengths is not None and stream.lanes < readers:
            said.append(
                f"stream: {len(stream.names)} shards for {feeding.ranks} ranks x "
                f"{max(1, feeding.num_workers)} workers: some shards are read by several of them, "
                f"and each decodes its own samples; more shards, {readers} or more, avoid that"
            )
        return said

    # What is saved with the run

    def state_dict(self) -> dict[str, Any]:
        order = lengths = None
        if isinstance(self.dataset, ShardedStream):
            order = self.dataset.order_facts(self.global_batch_size)
            lengths = self.dataset.lengths
        return {"order": order, "lengths": lengths, "places": list(self._places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._places = list(state["places"])
        self._saved_order = state["order"]
        if isinstance(self.dataset, ShardedStream) and state["lengths"] is not None:
            self._saved_order = {**(state["order"] or {}), "lengths": state["lengths"]}
            if self.dataset.lengths is None and self._order_changes(["lengths"]) == {}:
                self.dataset.learn(state["lengths"])

    def check_resumed_order(self, at_epoch_end: bool) -> None:
        """Refuse to go on inside a pass over shards that are in another order now."""
        changes = self._order_changes([])
        if not changes or (at_epoch_end and self.asked_steps is None):
            return
        said = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in changes.items())
        raise CheckpointError(
            "the checkpoint was saved in the middle of a pass over shards in another order: "
            f"{said:.1000}. "
            "Samples would be lost or repeated: give the stream as it was, or resume from the end "
            "of an epoch",
            code="MGT703",
        )

    def _order_changes(self, but: list[str]) -> dict[str, tuple[Any, Any]]:
        saved = self._saved_order
        if saved is None or not isinstance(self.dataset, ShardedStream):
            return {}
        now = self.dataset.order_facts(self.global_batch_size)
        if self.dataset.lengths is not None:
            now["lengths"] = self.dataset.lengths
        shared = saved.keys() & now.keys() - set(but)
        return {name: (saved[name], now[name]) for name in shared if saved[name] != now[name]}

    def _learn(self, told: dict[str, Any]) -> None:
        if "error" in told:
            raise ShardError(told["error"])
        if "lengths" in told:
            if isinstance(self.dataset, ShardedStream) and self.dataset.lengths is None:
                self.dataset.learn(told["lengths"])
                self._has_learned = True
            return
        # A checkpoint may stand a step behind what was read last.
        self._places = [*self._places[-1:], {**told, "steps": self.asked_steps}]

    def _nearest_place(self) -> dict[str, Any] | None:
        """The newest known place of a stateful stream that is not past where we begin."""
        steps, size = self.asked_steps, self.global_batch_size
        first = self.start if steps is None else self.epoch * steps + self.start
        fitting = [
            place
            for place in self._places
            if (place["batch"], place["steps"]) == (size, steps)
            and place["number"] <= first
            and (steps is not None or place["lap"] == self.epoch)
        ]
        return max(fitting, key=lambda place: place["number"], default=None)


def _read_here(windows: StreamSteps) -> Iterator[Window]:
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
