"""Where the loader of a stream stands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from multi_gpu_training.data.loader import Feeding
from multi_gpu_training.data.stream import StreamLoader


class Numbers(IterableDataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(self.samples)


def loader() -> StreamLoader:
    return StreamLoader(Numbers(100), 2, Feeding(micro_size=2, seed=0), steps_per_epoch=4)


def firsts(batches: Iterator[Tensor]) -> list[int]:
    return [int(batch[0]) for batch in batches]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("start", [0, 2])
def test_a_stream_that_goes_back_gives_the_same_batches_again(epoch: int, start: int) -> None:
    ours = loader()
    for _ in range(epoch):
        list(ours)
    assert len(list(islice(ours, 3))) == 3  # the step that fails is the third
    ours.seek(epoch, start)
    rest = [8 * epoch + 2 * position for position in range(start, 4)]
    assert firsts(iter(ours)) == rest
    assert firsts(iter(ours)) == [8 * (epoch + 1) + 2 * position for position in range(4)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_pass_that_was_broken_off_begins_again(epoch: int) -> None:
    ours = loader()
    for _ in range(epoch):
        list(ours)
    for batch in ours:
        assert int(batch[0]) == 8 * epoch
        break
    assert firsts(iter(ours)) == [8 * epoch + 2 * position for position in range(4)]


class OwnRandomness(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng()  # another one on every rank

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.from_numpy(self.rng.permutation(16))


@pytest.mark.parametrize("steps", [None, 4])
def test_a_stream_with_a_generator_of_its_own_is_one_stream(steps: int | None) -> None:
    def part(rank: int, epoch: int = 0) -> Iterator[list[int]]:
        ours = StreamLoader(OwnRandomness(), 4, Feeding(4, 0, rank, 2), steps_per_epoch=steps)
        ours.seek(epoch)
        while True:
            yield [int(number) for batch in ours for number in batch]

    one, two = part(0), part(1)
    epochs = [next(one) + next(two) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2
    assert epochs[0] != epochs[1]
    assert next(part(0, epoch=1)) + next(part(1, epoch=1)) == epochs[1]
