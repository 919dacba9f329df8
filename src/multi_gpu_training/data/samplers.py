"""The order of a sampler or batch sampler that the user brought, drawn alike everywhere.

What it draws in an epoch must depend on (seed, epoch) alone: ranks share it out, and a resume draws
it again. So every generator that it may use is seeded for the epoch, its own as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from multi_gpu_training.data.generators import global_generators_kept, seed_own
from multi_gpu_training.data.order import derive_seed, seed_everything, without_rest
from multi_gpu_training.errors import DataError

_MEMORY = (
    "{} gives another order when it is asked again for the same epoch: it counts its passes, or "
    "has randomness that cannot be seeded. After a resume or a rollback in the middle of an epoch "
    "some samples would be repeated and others missed. Let its order depend on "
    "set_epoch(epoch), or draw it from a generator that the sampler keeps as an attribute"
)


class SamplerBatches:
    """The order of a sampler, in batches of `batch_size`; the last one may be short.

    unit: samples that do not fill a batch of this size are left out at the end (`drop_last`).
    """

    def __init__(
        self, sampler: Sampler[Any] | Iterable[int], batch_size: int, unit: int = 1
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.unit = unit
        self._epochs = _Epochs(sampler, _place)

    def __len__(self) -> int:
        return -(-without_rest(_length(self.sampler), self.unit) // self.batch_size)

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        order = self._epochs.drawn(seed, epoch)
        order = order[: without_rest(len(order), self.unit)]
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


class BatchSamplerBatches:
    """Batches of a batch sampler: each is one global batch."""

    def __init__(self, sampler: BatchSampler | Iterable[Sequence[int]]) -> None:
        self.sampler = sampler
        self._epochs = _Epochs(sampler, lambda batch: [_place(index) for index in batch])

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
        with global_generators_kept():
            seed_everything(seed)
            seed_own(self.sampler, seed)
            if callable(set_epoch):
                set_epoch(epoch)  # last: a seed of its own for the epoch holds
            return [self.form(item) for item in self.sampler]


def _place(index: Any) -> Any:
    """A sample's place as a plain number; any other key (a name, a pair) as it is."""
    try:
        return index.__index__()
    except (AttributeError, TypeError):
        return index


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise DataError(
            f"{type(sampler).__name__} has no length; give it __len__, so that the number of "
            "steps in an epoch is known"
        ) from None
