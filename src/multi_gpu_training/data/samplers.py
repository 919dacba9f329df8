"""The order of a sampler or batch sampler that the user brought, drawn alike everywhere.

What it draws in an epoch must depend on (seed, epoch) alone: ranks share it out, and a resume draws
it again. So every generator that it may use is seeded for the epoch, its own as well.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from multi_gpu_training.data.generators import seed_own
from multi_gpu_training.data.order import derive_seed, seed_everything
from multi_gpu_training.errors import DataError

_MEMORY = (
    "{} gives another order when it is asked again for the same epoch: it counts its passes, or "
    "has randomness that cannot be seeded. After a resume or a rollback in the middle of an epoch "
    "some samples would be repeated and others missed. Let its order depend on "
    "set_epoch(epoch), or draw it from a generator that the sampler keeps as an attribute"
)


class SamplerBatches:
    """The order of a sampler, in batches of `batch_size`; the last one may be short."""

    def __init__(self, sampler: Sampler[Any] | Iterable[int], batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self._epochs = _Epochs(sampler, int)

    def __len__(self) -> int:
        return -(-_length(self.sampler) // self.batch_size)

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        order = self._epochs.drawn(seed, epoch)
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


class BatchSamplerBatches:
    """Batches of a batch sampler: each is one global batch."""

    def __init__(self, sampler: BatchSampler | Iterable[Sequence[int]]) -> None:
        self.sampler = sampler
        self._epochs = _Epochs(sampler, list)

    def __len__(self) -> int:
        return _length(self.sampler)

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        yield from self._epochs.drawn(seed, epoch)


class _Epochs:
    """What a sampler gives in an epoch. The first is drawn twice, to learn whether it can be."""

    def __init__(self, sampler: Iterable[Any], form: Callable[[Any], Any]) -> None:
        self.sampler = sampler
        self.form = form
        self._tried = False

    def drawn(self, seed: int, epoch: int) -> list[Any]:
        order = self._draw(derive_seed(seed, epoch), epoch)
        if not self._tried:
            self._tried = True
            again = self._draw(derive_seed(seed, epoch), epoch)
            if repr(again) != repr(order):  # not ==: an index may be an array
                warnings.warn(_MEMORY.format(type(self.sampler).__name__), stacklevel=2)
        return order

    def _draw(self, seed: int, epoch: int) -> list[Any]:
        """List it with every generator that it may use seeded; the global ones are put back."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            seed_everything(seed)
            seed_own(self.sampler, seed)
            if callable(set_epoch):
                set_epoch(epoch)  # last: a seed of its own for the epoch holds
            return [self.form(item) for item in self.sampler]
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise DataError(
            f"{type(sampler).__name__} has no length; give it __len__, so that the number of "
            "steps in an epoch is known"
        ) from None
