"""A stream made of shards, read in one order by any number of ranks and workers.

Shards are dealt to lanes, and the lanes take turns: each gives `block` samples, and one that has
run out is passed by. Which sample stands where depends on the seed, the pass and the lengths of
the shards alone, so a rank or a worker that knows the lengths reads only the lanes it needs.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from multi_gpu_training.data.generators import own_generators, seed_all
from multi_gpu_training.data.order import derive_seed, seed_everything
from multi_gpu_training.data.shard_sources import (
    FunctionShards,
    HuggingFaceShards,
    ParquetShards,
    ShardSource,
    TarShards,
)
from multi_gpu_training.errors import DataError, ShardError

Gather = Callable[[Any], list[Any]]
MOST_LANES = 64
_END: Any = object()


@dataclass(frozen=True)
class Raw:
    """An undecoded sample and where it comes from."""

    shard: int
    index: int
    value: Any


class ShardedStream(IterableDataset[Any]):
    """Samples of many shards as one stream, in the same order on any number of ranks and workers.

    shards, open_shard: your own shards, and a function that yields the samples of one. The class
        methods `from_parquet`, `from_webdataset` and `from_datasets` know theirs.
    decode: turns what was read into a sample; runs only on the rank that trains on it.
    shuffle: changes the order of shards in each pass and mixes `buffer` samples over all lanes.
    lengths: samples per shard, if known. With them, ranks and workers read only their
        own lanes. `count=True` reads every shard once at the start to find out.
    on_bad_shard: "skip" leaves out shards that cannot be opened when the run starts.
    lanes, block: how shards are interleaved; by default up to 64 lanes, and blocks that spread a
        global batch over several of them.
    """

    def __init__(
        self,
        shards: Iterable[Any] | ShardSource,
        open_shard: Callable[[Any], Iterable[Any]] | None = None,
        *,
        decode: Callable[[Any], Any] | None = None,
        shuffle: bool = True,
        buffer: int = 1024,
        lengths: Sequence[int] | None = None,
        count: bool = False,
        on_bad_shard: Literal["error", "skip"] = "error",
        lanes: int | None = None,
        block: int | None = None,
    ) -> None:
        if open_shard is not None:
            self.source: ShardSource = FunctionShards(cast(Iterable[Any], shards), open_shard)
        elif hasattr(shards, "read") and hasattr(shards, "names"):
            self.source = cast(ShardSource, shards)
        else:
            raise DataError(
                "ShardedStream(shards) needs open_shard as well, a function that gives the samples "
                "of one shard; or use from_parquet, from_webdataset or from_datasets"
            )
        self.names = list(self.source.names)
        for name, least, value in (
            ("buffer", 0, buffer),
            ("lanes", 1, lanes),
            ("block", 1, block),
            ("number of shards", 1, len(self.names)),
        ):
            if value is not None and value < least:
                raise DataError(f"{name}={value}: a sharded stream needs at least {least}")
        if lengths is not None and len(lengths) != len(self.names):
            raise DataError(
                f"lengths names {len(lengths)} shards, but there are {len(self.names)}; give one "
                "number per shard, or leave them out"
            )
        if on_bad_shard not in ("error", "skip"):
            raise DataError(f"on_bad_shard={on_bad_shard!r}: use 'error' or 'skip'")
        self.own_decode = decode
        self.shuffle, self.buffer, self.block = shuffle, buffer, block
        self.count, self.on_bad_shard = count, on_bad_shard
        self.lanes = min(lanes or MOST_LANES, len(self.names))
        # Of the shards that are used; None: not known yet. A bad shard has length 0.
        self.lengths = [int(length) for length in lengths] if lengths is not None else None
        self.bad: dict[int, str] = {}
        self._settled = False
        self._own: list[Any] | None = None

    @classmethod
    def from_parquet(
        cls, files: str | Sequence[str], columns: Sequence[str] | None = None, **options: Any
    ) -> ShardedStream:
        """A stream of the rows of Parquet files; names may hold wildcards or be URLs."""
        return cls(ParquetShards(files, columns), **options)

    @classmethod
    def from_webdataset(cls, files: str | Sequence[str], **options: Any) -> ShardedStream:
        """A stream of the samples of tar files, such as "train-{000..127}.tar"."""
        return cls(TarShards(files), **options)

    @classmethod
    def from_datasets(cls, stream: Any, **options: Any) -> ShardedStream:
        """A stream of Hugging Face `datasets`, split by its own shards."""
        return cls(HuggingFaceShards(stream), **options)

    # What is known of the shards

    def settle(self, rank: int, ranks: int, gather: Gather) -> None:
        """Find out how long the shards are, where that is cheap or was asked for, and which of
        them cannot be opened. Each rank looks at its part of them. Collective, once."""
        if self._settled:
            return
        self._settled = True
        asked = self.count or self.on_bad_shard == "skip"
        if self.lengths is not None and self.on_bad_shard == "error":
            return
        mine: dict[str, Any] = {}
        for shard in range(rank, len(self.names), ranks):
            try:
                mine[str(shard)] = self._length_of(shard, asked)
            except Exception as error:  # whatever a file format and its reader may raise
                mine[str(shard)] = _in_words(error)
        found = {int(shard): told for part in gather(mine) for shard, told in part.items()}
        self.bad = {shard: told for shard, told in found.items() if isinstance(told, str)}
        if self.bad and (self.on_bad_shard == "error" or len(self.bad) == len(found)):
            shard = min(self.bad)
            raise DataError(
                f"{len(self.bad)} of {len(found)} shards cannot be read, the first is "
                f"{self.names[shard]} ({self.bad[shard]}); repair or remove it, or train without "
                "such shards by on_bad_shard='skip'"
            )
        if self.lengths is not None:
            self.lengths = [
                0 if shard in self.bad else length for shard, length in enumerate(self.lengths)
            ]
        elif all(told is not None for told in found.values()):
            self.lengths = [0 if s in self.bad else int(found[s]) for s in range(len(found))]

    def _length_of(self, shard: int, asked: bool) -> int | None:
        if self.lengths is not None:
            next(self.source.read(shard, 0), None)  # can it be opened?
            return self.lengths[shard]
        told = self.source.length(shard)
        return sum(1 for _ in self.source.read(shard, 0)) if told is None and asked else told

    @property
    def samples(self) -> int | None:
        """Samples in a pass, once the lengths are known."""
        return None if self.lengths is None else sum(self.lengths)

    def learn(self, lengths: Sequence[int]) -> None:
        """Learn the lengths that a whole pass has shown."""
        self.lengths = list(lengths)

    def describe(self) -> list[str]:
        """Sentences that tell the user how the stream is read."""
        said = []
        if self.bad:
            named = ", ".join(f"{self.names[shard]} ({told})" for shard, told in self.bad.items())
            said.append(
                f"stream: {len(self.bad)} of {len(self.names)} shards cannot be read and are "
                f"left out: {named:.2000}"
            )
        if self.lengths is None:
            said.append(
                "stream: the sizes of the shards are unknown, so during the first pass every rank "
                "reads all shards with one worker and decodes its own share; lengths=[...] or "
                "count=True avoids that"
            )
        return said

    def order_facts(self, batch: int) -> dict[str, Any]:
        """What the order of samples depends on, beside seed and pass."""
        names = hashlib.blake2b("\n".join(self.names).encode(), digest_size=8).hexdigest()
        facts = {"names": names, "shards": len(self.names), "lanes": self.lanes}
        return {
            **facts,
            "block": self.block_for(batch),
            "buffer": self.buffer,
            "shuffle": self.shuffle,
            "skipped": sorted(self.bad),
        }

    def block_for(self, batch: int) -> int:
        """Samples that a lane gives in its turn. A global batch comes from about the square root
        of all lanes: some are then left for other ranks, and some for other workers."""
        if self.block is not None:
            return self.block
        per_batch = 1
        while (2 * per_batch) ** 2 <= 2 * self.lanes:
            per_batch *= 2
        return max(1, -(-batch // per_batch))

    # Reading

    def one_pass(self, seed: int, lap: int, batch: int, shuffle: bool | None = None) -> ShardPass:
        """Pass number `lap`, for global batches of `batch` samples."""
        mixed = self.shuffle if shuffle is None else shuffle and self.shuffle
        return ShardPass(self, derive_seed(seed, lap), self.block_for(batch), mixed)

    def sample(self, raw: Raw, seed: int) -> Any:
        """Decode what was read, with randomness keyed by the pass, the shard and the place."""
        if self._own is None:
            self._own = own_generators(self.own_decode)
        key = derive_seed(seed, raw.shard, raw.index, 1)
        seed_everything(key)
        seed_all(self._own, key)
        try:
            sample = self.source.decode(raw.value)
            return sample if self.own_decode is None else self.own_decode(sample)
        except Exception as error:
            error.add_note(f"decoding sample {raw.index} of shard {self.names[raw.shard]}")
            raise

    def __iter__(self) -> Iterator[Any]:
        """All samples in the order of the first pass, for a look without a manager."""
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise DataError(
                f"each of {info.num_workers} workers of this DataLoader would read the whole "
                "ShardedStream; give it to fit or setup_training, which share it over the workers",
                code="MGT303",
            )
        lap = self.one_pass(0, 0, self.block or 1)
        for raw in lap.all():
            yield self.sample(raw, lap.seed)


class ShardPass:
    """One pass over the shards: which sample is the k-th, and the samples from there on."""

    def __init__(self, stream: ShardedStream, seed: int, block: int, shuffle: bool) -> None:
        self.stream, self.seed, self.block = stream, seed, block
        shards = torch.arange(len(stream.names))
        if shuffle:
            generator = torch.Generator().manual_seed(seed)
            shards = torch.randperm(len(stream.names), generator=generator)
        self.learned: dict[int, int] = {}
        mixed = max(1, stream.buffer // stream.lanes) if shuffle else 1
        self._lanes = [
            _Lane(self, lane, shards[lane :: stream.lanes].tolist(), mixed)
            for lane in range(stream.lanes)
        ]
        known = stream.lengths
        self._sizes = None
        if known is not None:
            self._sizes = np.array([sum(known[s] for s in lane.shards) for lane in self._lanes])

    def all(self) -> Iterator[Raw]:
        """Every sample in order, whether or not the lengths are known."""
        alive, turn = list(self._lanes), 0
        while alive:
            for lane in list(alive):
                for place in range(turn, turn + self.block):
                    raw = lane.get(place)
                    if raw is None:
                        alive.remove(lane)
                        break
                    yield raw
            turn += self.block

    def between(self, begin: int, end: int) -> list[Raw]:
        """Samples `begin` to `end` of the pass; reads no lane that holds none of them. Calls must
        go forward."""
        found: list[Raw] = []
        for lane, place in self._places(begin, end):
            raw = self._lanes[lane].get(place)
            assert raw is not None
            found.append(raw)
        return found

    def _places(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """(lane, place in the lane) of samples `begin` to `end`."""
        sizes, block = self._sizes, self.block
        assert sizes is not None
        low, high = 0, -(-int(sizes.max()) // block)
        while low < high - 1:  # the round in which `begin` stands
            middle = (low + high) // 2
            before = int(np.minimum(sizes, middle * block).sum())
            low, high = (middle, high) if before <= begin else (low, middle)
        at = int(np.minimum(sizes, low * block).sum())
        for turn in range(low, -(-int(sizes.max()) // block)):
            for lane, size in enumerate(sizes.tolist()):
                first = turn * block
                given = max(0, min(size - first, block))
                for offset in range(max(0, begin - at), min(given, end - at)):
                    yield lane, first + offset
                at += given
                if at >= end:
                    return


class _Lane:
    """Some of the shards, one after another, mixed within windows of `mixed` samples.

    A window is permuted as a whole: to stand anywhere in a lane, only its window must be read.
    """

    def __init__(self, lap: ShardPass, number: int, shards: list[int], mixed: int) -> None:
        self.shards = shards
        self._lap, self._number, self._mixed = lap, number, mixed
        self._stream = lap.stream
        self._window: list[Raw] = []
        self._window_number = -1
        self._reader: Iterator[Raw] | None = None
        self._at = 0  # the place of the sample that the reader gives next
        lengths = lap.stream.lengths
        self._ends = list(accumulate(lengths[s] for s in shards)) if lengths is not None else None

    def get(self, place: int) -> Raw | None:
        """The sample at `place`; None past the end of the lane."""
        number, offset = divmod(place, self._mixed)
        if number != self._window_number:
            self._load(number)
        return self._window[offset] if offset < len(self._window) else None

    def _load(self, number: int) -> None:
        target = number * self._mixed
        if self._reader is None or target < self._at or self._in_another_shard(target):
            self._reader, self._at = self._read(target), target
        for _ in range(target - self._at):
            if next(self._reader, None) is None:
                break
        self._window = [raw for _, raw in zip(range(self._mixed), self._reader, strict=False)]
        self._at, self._window_number = target + len(self._window), number
        if self._mixed > 1:
            generator = torch.Generator()
            generator.manual_seed(derive_seed(self._lap.seed, self._number, number))
            order = torch.randperm(len(self._window), generator=generator).tolist()
            self._window = [self._window[place] for place in order]

    def _in_another_shard(self, target: int) -> bool:
        """Whether reading on to `target` would read past the end of a shard for nothing."""
        ends = self._ends
        return ends is not None and bisect_right(ends, target) > bisect_right(ends, self._at)

    def _read(self, start: int) -> Iterator[Raw]:
        """The raw samples of the lane from place `start` on."""
        stream = self._stream
        passed = bisect_right(self._ends, start) if self._ends is not None else 0
        if passed and self._ends is not None:
            start -= self._ends[passed - 1]
        for shard in self.shards[passed:]:
            if shard in stream.bad:
                continue
            index = 0
            for raw in self._read_shard(shard, start if self._ends is not None else 0):
                if raw.index >= start:
                    yield raw
                index = raw.index + 1
            start = max(0, start - index)
            self._lap.learned[shard] = index

    def _read_shard(self, shard: int, start: int) -> Iterator[Raw]:
        """The samples of a shard from `start` on; from its beginning where reading draws random
        numbers, each of which is keyed by its place."""
        stream = self._stream
        draws = stream.source.draws
        index = 0 if draws else start
        told = None if stream.lengths is None else stream.lengths[shard]
        try:
            reader = stream.source.read(shard, index)
            while True:
                if draws:
                    seed_everything(derive_seed(self._lap.seed, shard, index))
                value = next(reader, _END)
                if value is _END or index == told:
                    break
                yield Raw(shard, index, value)
                index += 1
        except Exception as error:
            raise ShardError(
                f"shard {stream.names[shard]} cannot be read past sample {index} "
                f"({_in_words(error)}); repair it, or leave it out of the list of shards"
            ) from error
        if told is not None and (index != told or value is not _END):
            held = f"{index} samples" if value is _END else f"more than {told} samples"
            raise ShardError(
                f"shard {stream.names[shard]} holds {held}, but its length is known as {told}; "
                "correct lengths, or restore the shard if it was cut off or changed"
            )


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
