"""Which samples form a step, and which of them are whose.

A global batch is an ordered list of sample indices that depends on (seed, epoch, position) alone.
It is cut into global micro-batches, and each of these is shared out over the ranks, so that the
same samples meet in the same micro-batch whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
import torch


class GlobalBatchSource(Protocol):
    """Anything that says which samples form each step of an epoch.

    Must return the same batches on every rank and every time for the same seed and epoch.
    Batches may differ in size: length buckets, token budgets, weighted sampling.
    """

    def batches(self, seed: int, epoch: int) -> Iterable[Sequence[int]]: ...

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...


@runtime_checkable
class FormsBatches(Protocol):
    """A dataset that says itself which of its samples meet in a step: by length, by source.

    It may have `collate(samples) -> batch` as well, and `subset(indices)` for a shorter one of
    its kind.
    """

    def global_batches(self, batch_size: int) -> GlobalBatchSource:
        """Batches of about `batch_size` samples over all ranks."""
        ...


@dataclass(slots=True)
class Share:
    """What a rank must know about one micro-batch to give it its weight. Never changed once made.

    count: samples that this rank holds; 0 where there are fewer samples than ranks.
    window_count: samples of the whole step, over all micro-batches and ranks.
    key, sample_seed: where this micro-batch's and its samples' randomness comes from.
    changed: the user unpacked or changed the batch, so that fetching it again gives another one.
    place: of the first of these samples, counted from the start of the pass over all ranks.
    left_out: samples that the plan gave this rank and its collate_fn dropped; not in `count`.
    """

    epoch: int
    position: int
    indices: tuple[int, ...]
    count: int
    window_count: int
    first: bool
    last: bool
    key: int
    sample_seed: int = 0
    changed: bool = False
    place: int = 0
    left_out: int = 0

    @property
    def planned(self) -> int:
        """Samples that the plan gave this rank."""
        return self.count + self.left_out


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from whole numbers, far apart for neighbouring inputs."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def step_seed(base: int, step: int, micro_batch: int) -> int:
    """A 63-bit seed for one micro-batch: a quick mixture, for it is made at every step."""
    value = (base + step * 0x9E3779B97F4A7C15 + micro_batch * 0xD1342543DE82EF95) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (value ^ (value >> 27)) >> 1


def cut(count: int, parts: int, part: int, weights: Sequence[int] | None = None) -> tuple[int, int]:
    """Start and stop of `part` when `count` things are shared over `parts`, none left over.

    Equal parts, or parts in proportion to `weights`, whole numbers of which there are `parts`.
    """
    if weights is None:
        small, extra = divmod(count, parts)
        start = part * small + min(part, extra)
        return start, start + small + (part < extra)
    sizes = proportional(count, tuple(weights))
    start = sum(sizes[:part])
    return start, start + sizes[part]


@lru_cache(maxsize=1024)
def proportional(count: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of parts that follow `weights`: rounded down, and what is left goes to the largest
    remainders, the first of equal ones. Whole numbers only, so that every machine says the same.
    The first part is never empty: where buffers are broadcast, its rank's are the model's.
    """
    total = sum(weights)
    sizes = [count * weight // total for weight in weights]
    remainders = [count * weight % total for weight in weights]
    order = sorted(range(len(weights)), key=lambda part: (-remainders[part], part))
    for part in order[: count - sum(sizes)]:
        sizes[part] += 1
    if count and not sizes[0]:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    return tuple(sizes)


def without_rest(samples: int, unit: int) -> int:
    """How many of `samples` fill whole batches of `unit`: what `drop_last` keeps."""
    return samples - samples % unit


class ShuffledBatches:
    """Every sample once an epoch, in batches of `batch_size`; the last one may be short.

    unit: samples that do not fill a batch of this size are left out at the end (`drop_last`).
    """

    def __init__(self, samples: int, batch_size: int, shuffle: bool = True, unit: int = 1) -> None:
        self.all_samples = samples
        self.samples = without_rest(samples, unit)
        self.batch_size = batch_size
        self.shuffle = shuffle

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    @property
    def drawn_samples(self) -> int:
        return self.samples

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        order = self.order(seed, epoch)
        for start in range(0, self.samples, self.batch_size):
            yield order[start : start + self.batch_size].tolist()

    @property
    def sizes(self) -> list[int]:
        """Of the batches."""
        whole, rest = divmod(self.samples, self.batch_size)
        return [self.batch_size] * whole + [rest] * (rest > 0)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """All samples of an epoch."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        return torch.randperm(self.all_samples, generator=generator)[: self.samples]


class FirstBatches:
    """The first `count` batches of another source."""

    def __init__(self, source: GlobalBatchSource, count: int) -> None:
        self.source = source
        self.count = count

    def __len__(self) -> int:
        return min(self.count, len(self.source))

    def batches(self, seed: int, epoch: int) -> Iterable[Sequence[int]]:
        return islice(self.source.batches(seed, epoch), self.count)


def shares(
    source: GlobalBatchSource,
    micro_size: int,
    seed: int,
    epoch: int,
    rank: int,
    ranks: int,
    start: int = 0,
    weights: Sequence[int] | None = None,
) -> Iterator[Share]:
    """The micro-batches of `rank`, from step `start` of the epoch on.

    `micro_size` is the size of a micro-batch over all ranks. Every rank gets the same number of
    micro-batches; one whose part is empty still takes part, with count 0. With `weights` the
    parts follow them instead of being equal.
    """
    before = 0  # samples of the global batches up to this one
    for position, batch in enumerate(source.batches(seed, epoch)):
        before += len(batch)
        if position < start:
            continue
        chunks = max(1, -(-len(batch) // micro_size))
        for chunk in range(chunks):
            part = batch[chunk * micro_size : (chunk + 1) * micro_size]
            begin, end = cut(len(part), ranks, rank, weights)
            yield Share(
                epoch=epoch,
                position=position,
                indices=tuple(part[begin:end]),
                count=end - begin,
                window_count=len(batch),
                first=chunk == 0,
                last=chunk == chunks - 1,
                key=derive_seed(seed, epoch, position, chunk, rank),
                sample_seed=derive_seed(seed, epoch),
                place=before - len(batch) + chunk * micro_size + begin,
            )


def seed_everything(seed: int) -> None:
    """Seed the global CPU generators of torch, numpy and Python, cheaply."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
