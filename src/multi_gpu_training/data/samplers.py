"""The order of a sampler or batch sampler that the user brought, drawn alike everywhere.

What it draws in an epoch must depend on (seed, epoch) alone: ranks share it out, and a resume draws
it again. So every generator that it may use is seeded for the epoch, its own as well.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from multi_gpu_training.data.order import derive_seed, seed_everything
from multi_gpu_training.errors import DataError

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class SamplerBatches:
    """The order of a sampler, in batches of `batch_size`; the last one may be short."""

    def __init__(self, sampler: Sampler[Any] | Iterable[int], batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self._epochs = _Epochs(sampler)

    def __len__(self) -> int:
        return -(-_length(self.sampler) // self.batch_size)

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        order = [int(i) for i in self._epochs.drawn(seed, epoch)]
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


class BatchSamplerBatches:
    """Batches of a batch sampler: each is one global batch."""

    def __init__(self, sampler: BatchSampler | Iterable[Sequence[int]]) -> None:
        self.sampler = sampler
        self._epochs = _Epochs(sampler)

    def __len__(self) -> int:
        return _length(self.sampler)

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        yield from (list(batch) for batch in self._epochs.drawn(seed, epoch))


class _Epochs:
    """What a sampler gives in an epoch. The epoch drawn last is kept: a sampler with a memory would
    give another one when a step is fetched once more, or on the one rank that asks again."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self._asked: tuple[int, int] | None = None
        self._drawn: list[Any] = []

    def drawn(self, seed: int, epoch: int) -> list[Any]:
        if self._asked != (seed, epoch):
            first = self._asked is None
            self._drawn = _draw(self.sampler, derive_seed(seed, epoch), epoch)
            self._asked = seed, epoch
            if first:
                self._warn_of_memory(seed, epoch)
        return self._drawn

    def _warn_of_memory(self, seed: int, epoch: int) -> None:
        again = _draw(self.sampler, derive_seed(seed, epoch), epoch)
        if repr(again) != repr(self._drawn):  # not ==: an index may be an array
            warnings.warn(
                f"{type(self.sampler).__name__} gives another order when it is asked again for the "
                "same epoch: it counts its passes, or has randomness that cannot be seeded. A "
                "resume in the middle of an epoch would repeat some samples and miss others. Let "
                "its order depend on set_epoch(epoch), or draw from a generator that it keeps as "
                "an attribute",
                stacklevel=2,
            )


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise DataError(
            f"{type(sampler).__name__} has no length; give it __len__, so that the number of "
            "steps in an epoch is known"
        ) from None


def _draw(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """List the sampler with every generator it may use seeded; the global ones are put back."""
    set_epoch = getattr(sampler, "set_epoch", None)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        seed_everything(seed)
        for number, generator in enumerate(_generators(sampler)):
            _seed(generator, derive_seed(seed, number) if number else seed)
        if callable(set_epoch):
            set_epoch(epoch)  # last: a seed of its own for the epoch holds
        return list(sampler)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _generators(sampler: Any) -> list[Any]:
    """The generators in attributes of a sampler, and of samplers that it draws from."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def look_at(one: Any) -> None:
        seen.add(id(one))
        own = getattr(one, "__dict__", {})
        for value in (getattr(one, "generator", None), *own.values()):
            if isinstance(value, _GENERATORS):
                found.setdefault(id(value), value)
        for name, value in own.items():
            within = isinstance(value, Sampler) or name in ("sampler", "batch_sampler")
            if within and id(value) not in seen:
                look_at(value)

    look_at(sampler)
    return list(found.values())


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)
