"""The order of a sampler or batch sampler that the user brought, drawn alike everywhere.

What it draws in an epoch must depend on (seed, epoch) alone: ranks share it out, and a resume draws
it again. So every generator that it may use is seeded for the epoch, its own as well.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from multi_gpu_training.data.generators import global_generators_kept, seed_own
from multi_gpu_training.data.order import derive_seed, seed_everything, without_rest
from multi_gpu_training.errors import DataError

MOST = 10**8  # that an epoch may have: its order is drawn as a whole, with 40 bytes for each
_MEMORY = (
    "{} returns a different order when asked again for the same epoch: it counts its passes, or "
    "its randomness cannot be seeded. After a resume or a rollback in the middle of an epoch, "
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
        return -(-self.drawn_samples // self.batch_size)

    @property
    def drawn_samples(self) -> int:
        """Samples in an epoch."""
        return without_rest(_length(self.sampler), self.unit)

    def rehearse(self, seed: int) -> str:
        """The first epoch's order in a few letters, the same on every rank that draws alike."""
        return self._epochs.rehearse(seed, 0)

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

    def batch_lengths(self, seed: int, epoch: int) -> list[int]:
        """Samples in each batch of an epoch; the sampler itself stands where it stood."""
        return [len(batch) for batch in self._epochs.drawn(seed, epoch, on_a_copy=True)]

    def rehearse(self, seed: int) -> str:
        """The first epoch's batches in a few letters, the same on every rank that draws alike."""
        return self._epochs.rehearse(seed, 0)

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        yield from self._epochs.drawn(seed, epoch)


class _Epochs:
    """What a sampler gives in an epoch. A copy of it draws the first one twice before, to learn
    whether that can be done."""

    def __init__(self, sampler: Iterable[Any], form: Callable[[Any], Any]) -> None:
        self.sampler = sampler
        self.form = form
        self._tried = False

    def drawn(self, seed: int, epoch: int, on_a_copy: bool = False) -> list[Any]:
        if not self._tried:
            self.rehearse(seed, epoch)
        sampler = _twin(self.sampler) if on_a_copy else self.sampler
        return self._draw(sampler, derive_seed(seed, epoch), epoch)

    def rehearse(self, seed: int, epoch: int) -> str:
        """What the order of an epoch is, in a few letters; warns where it cannot be drawn again.
        The sampler itself stands where it stood."""
        self._tried = True
        twin = _twin(self.sampler)
        # repr and not ==: an index may be an array
        first, again = (repr(self._draw(twin, derive_seed(seed, epoch), epoch)) for _ in range(2))
        if first != again:
            warnings.warn(_MEMORY.format(type(self.sampler).__name__), stacklevel=2)
        return hashlib.blake2b(first.encode(), digest_size=8).hexdigest()

    def _draw(self, sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
        """List it with every generator that it may use seeded; the global ones are put back."""
        set_epoch = getattr(sampler, "set_epoch", None)
        with global_generators_kept():
            seed_everything(seed)
            seed_own(sampler, seed)
            if callable(set_epoch):
                set_epoch(epoch)  # last: a seed of its own for the epoch holds
            told = _length(sampler)
            # Lengths may be estimates, but a sampler that never ends must not fill the memory.
            most = min(MOST, 1000 + 10 * told)
            drawn = [] if told > MOST else [self.form(i) for i in islice(sampler, most + 1)]
        if told > MOST or len(drawn) > most:
            name, found = type(sampler).__name__, f"draws {told:,}"
            if told <= MOST:
                found = f"continues after {most:,} entries, but its __len__ says {told:,}"
            raise DataError(
                f"{name} {found}: the order of an epoch is drawn as a whole, and may have at most "
                f"{MOST:,} entries. Let the sampler end after an epoch of your choice (for "
                "RandomSampler: num_samples = steps x global batch size); the next draws again"
            )
        return drawn


def _twin(sampler: Any) -> Any:
    """A copy, also of the samplers that it draws from, but not of their data."""
    if "set_epoch" in getattr(sampler, "__dict__", {}):
        return sampler  # a function of this very object
    try:
        twin = copy.copy(sampler)
    except Exception:
        return sampler
    for name, value in list(getattr(twin, "__dict__", {}).items()):
        if isinstance(value, Sampler):
            setattr(twin, name, _twin(value))
    return twin


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
