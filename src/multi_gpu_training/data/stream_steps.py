"""What a reader of a stream gives: this rank's micro-batches, step after step.

Runs in loader workers or in the rank itself. Every reader gives the same steps; they differ in how
much of the stream they must read for it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info

from multi_gpu_training.data.generators import own_generators, seed_own
from multi_gpu_training.data.items import item_parts, takes_item
from multi_gpu_training.data.loader import Feeding, collated
from multi_gpu_training.data.order import Share, cut, derive_seed, seed_everything, without_rest
from multi_gpu_training.data.shard_sources import is_hugging_face
from multi_gpu_training.data.sharded_stream import ShardedStream, ShardPass
from multi_gpu_training.errors import CheckpointError, DataError, ShardError
from multi_gpu_training.state_dicts import pack
from multi_gpu_training.torch_internals import hide_worker_info

# A share, its batch, the samples in that (of an empty share, a stand-in), and what the reader has
# learned meanwhile: its place in a stateful stream, or the lengths of shards.
Window = tuple[Share, Any, int, dict[str, Any] | None]


@runtime_checkable
class StatefulStream(Protocol):
    """A dataset, or its iterator, that can continue where it stood: torchdata's protocol."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class StreamSteps(IterableDataset[Window]):
    """Global batches from (epoch, start) on, cut down to one rank's share.

    steps: length of an epoch in global batches; None: an epoch is one pass, or its first `limit`
        global batches.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        feeding: Feeding,
        epoch: int,
        start: int,
        steps: int | None,
        limit: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.feeding = feeding
        self.epoch = epoch
        self.start = start
        self.steps = steps
        self.limit = limit
        self._last: list[Any] = []  # a sample that was there, for a batch in which none is

    def __iter__(self) -> Iterator[Window]:
        try:
            yield from self.windows()
        except ShardError as error:
            # As data: torch would wrap a worker's error into its traceback.
            yield None, None, 0, {"error": str(error)}  # type: ignore[misc]

    @abstractmethod
    def windows(self) -> Iterator[Window]: ...

    def parts(
        self,
        length: int,
        take: Callable[[int, int], list[Any]],
        epoch: int,
        position: int,
        told: dict[str, Any] | None = None,
        mine: Callable[[int], bool] | None = None,
    ) -> Iterator[Window]:
        """This rank's part of a global batch of `length` samples; `take` gives some of them.
        `mine`: which of its micro-batches this worker makes."""
        feeding = self.feeding
        if feeding.items:
            if takes_item(feeding, position):
                yield from self._item_parts(take(0, 1)[0], epoch, position)
            return
        chunks = max(1, -(-length // feeding.micro_size))
        offset = position * self.global_batch_size
        for chunk in range(chunks):
            if mine is not None and not mine(chunk):
                continue
            first = chunk * feeding.micro_size
            size = min(feeding.micro_size, length - first)
            begin, end = cut(size, feeding.ranks, feeding.rank, feeding.weights)
            share = Share(
                epoch=epoch,
                position=position,
                indices=tuple(range(offset + first + begin, offset + first + end)),
                count=end - begin,
                window_count=length,
                first=chunk == 0,
                last=chunk == chunks - 1,
                key=derive_seed(feeding.seed, epoch, position, chunk, feeding.rank),
                place=offset + first + begin,
            )
            samples = take(first + begin, first + end) if share.count else take(first, first + 1)
            seed_everything(share.key)
            if share.count:
                share, batch = collated(feeding.collate, samples, share)
            if share.count == 0:  # a stand-in; the collate_fn drops what is None
                samples = _there(samples) or _there(take(0, length)) or self._last
                batch = feeding.collate(samples)
            self._last = _there(samples)[:1]
            size = share.count if share.left_out and share.count else len(samples)
            yield share, batch, size, told if share.last else None

    def _item_parts(self, sample: Any, epoch: int, position: int) -> Iterator[Window]:
        feeding = self.feeding
        key = derive_seed(feeding.seed, epoch, position)
        seed_everything(key)
        item = feeding.collate(sample)
        seed = derive_seed(feeding.seed, epoch)
        share = Share(epoch, position, (), 1, 1, True, True, key, seed)
        for part in item_parts(item, feeding, share, position):
            yield *part, None


def _there(samples: list[Any]) -> list[Any]:
    return [sample for sample in samples if sample is not None]


class WholeStream(StreamSteps):
    """Reads every sample of the stream and keeps this rank's share.

    saved: where a stateful stream stood, to begin there instead of reading past all before it.
    initial: the state of such a stream before anybody read it.
    """

    saved: dict[str, Any] | None = None
    initial: dict[str, Any] | None = None

    def windows(self) -> Iterator[Window]:
        saved, steps = self.saved, self.steps
        if isinstance(self.dataset, ShardedStream):
            hide_worker_info()
        if self.initial is not None:
            self.dataset.load_state_dict(copy.deepcopy(self.initial))
        first = self.start if steps is None else self.epoch * steps + self.start
        number = saved["number"] if saved is not None else 0
        begin = self.epoch if steps is None else saved["lap"] if saved is not None else 0
        for lap in count(begin):
            before = number
            for window, told in self._pass(lap, saved):
                if number >= first:
                    epoch, position = divmod(number, steps) if steps else (self.epoch, number)
                    note = {**told, "number": number + 1} if told is not None else None
                    take = self._taker(window)
                    yield from self.parts(len(window), take, epoch, position, note)
                number += 1
                if steps is None and number == self.limit:
                    return
            saved = None
            if isinstance(self.dataset, ShardedStream):
                yield self._lengths()
            if steps is None:
                return
            if number == before:
                raise DataError(
                    f"{type(self.dataset).__name__} gave no sample; an epoch of "
                    f"steps_per_epoch={steps} needs some",
                    code="MGT302",
                )

    def _pass(
        self, lap: int, saved: dict[str, Any] | None
    ) -> Iterator[tuple[list[Any], dict[str, Any] | None]]:
        """The global batches of one pass, with the place behind each in a stateful stream."""
        samples: Iterator[Any]
        cursor: _Cursor | None = None
        if isinstance(self.dataset, ShardedStream):
            self._lap = sharded_pass(self, lap)
            samples = self._lap.all()
        else:
            cursor = _Cursor(self.dataset, self.feeding.seed, lap)
            samples = cursor.samples(saved)
        window: list[Any] = []
        for sample in _without_rest(samples, self.feeding.unit):
            window.append(sample)
            if len(window) == self.global_batch_size:
                yield window, cursor.state(self.global_batch_size) if cursor is not None else None
                window = []
        if window:
            yield window, None

    def _taker(self, window: list[Any]) -> Callable[[int, int], list[Any]]:
        if not isinstance(self.dataset, ShardedStream):
            return lambda begin, end: window[begin:end]
        stream, seed = self.dataset, self._lap.seed
        return lambda begin, end: [stream.sample(raw, seed) for raw in window[begin:end]]

    def _lengths(self) -> Window:
        learned = self._lap.learned
        lengths = [learned.get(shard, 0) for shard in range(len(self.dataset.names))]
        return None, None, 0, {"lengths": lengths}  # type: ignore[return-value]


class LaneSteps(StreamSteps):
    """Reads only the lanes of a ShardedStream that hold this rank's and worker's samples.

    The workers of a rank make its micro-batches in turn; a DataLoader puts them in order again.
    """

    def windows(self) -> Iterator[Window]:
        info = get_worker_info()
        hide_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        stream, size = self.dataset, self.global_batch_size
        samples = without_rest(stream.samples, self.feeding.unit)
        per_pass = -(-samples // size)
        if not per_pass and self.steps is not None:
            raise DataError(
                f"the shards hold {stream.samples} samples; an epoch of "
                f"steps_per_epoch={self.steps} needs at least {self.feeding.unit}",
                code="MGT302",
            )
        steps = self.steps or per_pass
        number, made, lap = self.epoch * steps + self.start, 0, None
        while per_pass and (self.steps is not None or number // steps == self.epoch):
            newest, position = divmod(number, per_pass)
            if self.steps is None and position == self.limit:
                return
            if lap is None or newest != lap[0]:
                lap = newest, sharded_pass(self, newest)
            begin = position * size

            def take(
                first: int, end: int, one: ShardPass = lap[1], begin: int = begin
            ) -> list[Any]:
                found = one.between(begin + first, begin + end)
                return [stream.sample(raw, one.seed) for raw in found]

            def mine(chunk: int, made: int = made) -> bool:
                return (made + chunk) % workers == worker

            length = min(size, samples - begin)
            yield from self.parts(length, take, *divmod(number, steps), mine=mine)
            made += max(1, -(-length // self.feeding.micro_size))
            number += 1


def sharded_pass(steps: StreamSteps, lap: int) -> ShardPass:
    feeding = steps.feeding
    # Batches of an evaluation grow with the number of ranks; its order must not.
    size = 1 if feeding.evaluating else steps.global_batch_size
    found: ShardPass = steps.dataset.one_pass(feeding.seed, lap, size, not feeding.evaluating)
    return found


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


class _Cursor:
    """Reads one pass of a plain stream, each sample drawn with randomness keyed by (seed, lap,
    place). All ranks draw alike, so even a stream that shuffles at random is one stream."""

    def __init__(self, dataset: Any, seed: int, lap: int) -> None:
        self._dataset, self._lap = dataset, lap
        self._seed = derive_seed(seed, lap)
        self._place = 0
        self._owner: Any = None  # whoever knows where the stream stands

    def samples(self, saved: dict[str, Any] | None) -> Iterator[Any]:
        dataset, lap_seed = self._dataset, self._seed
        seed_everything(lap_seed)
        seed_own(dataset, lap_seed)
        set_epoch = getattr(dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._lap)  # last: a seed of its own for the lap holds
        if saved is not None:
            self._place = saved["place"]
            if not saved["in_iterator"]:
                dataset.load_state_dict(saved["state"])
        iterator: Any = iter(dataset)
        if saved is not None and saved["in_iterator"]:
            iterator.load_state_dict(saved["state"])
        if resumable(dataset):
            self._owner = iterator if isinstance(iterator, StatefulStream) else dataset
        for place in count(self._place):
            seed_everything(derive_seed(lap_seed, place))
            try:
                sample = next(iterator)
            except StopIteration:
                return
            self._place = place + 1
            yield sample

    def state(self, batch: int) -> dict[str, Any] | None:
        """Where the stream stands; None where it does not know, or not as plain data."""
        if not isinstance(self._owner, StatefulStream):
            return None
        state = copy.deepcopy(self._owner.state_dict())
        try:
            pack(state, {})
        except CheckpointError:
            self._owner = None
            return None
        in_iterator = self._owner is not self._dataset
        return {
            "state": state,
            "in_iterator": in_iterator,
            "lap": self._lap,
            "place": self._place,
            "batch": batch,
        }


def resumable(dataset: Any) -> bool:
    """Whether the state of a stream is all there is to it. Generators that it keeps are not in
    its state, and Hugging Face streams lose what is in a shuffle buffer: those are read past."""
    return not is_hugging_face(dataset) and not own_generators(dataset)
