"""The order of a sampler that the user brought."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import line, manager_for, points, sgd, squares
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from multi_gpu_training.data.order import shares
from multi_gpu_training.data.samplers import BatchSamplerBatches, SamplerBatches
from multi_gpu_training.errors import DataError


def test_a_sampler_of_the_user_is_drawn_alike_everywhere_and_leaves_no_trace() -> None:
    weights = torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    one = list(SamplerBatches(WeightedRandomSampler(weights, 50), 8).batches(0, 1))
    two = list(SamplerBatches(WeightedRandomSampler(weights, 50), 8).batches(0, 1))
    assert one == two
    assert one != list(SamplerBatches(WeightedRandomSampler(weights, 50), 8).batches(0, 2))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()


def test_batches_of_a_batch_sampler_are_global_batches() -> None:
    class Buckets(BatchSampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from ([0, 1, 2], [3], [4, 5, 6, 7])

        def __len__(self) -> int:
            return 3

    source = BatchSamplerBatches(Buckets(RandomSampler(range(8)), 4, False))
    assert len(source) == 3
    found = [list(shares(source, 8, 0, 0, rank, 2)) for rank in range(2)]
    assert [s.indices for s in found[0]] == [(0, 1), (3,), (4, 5)]
    assert [s.indices for s in found[1]] == [(2,), (), (6, 7)]


class Shuffled(Sampler[int]):
    """Keeps a generator, as people write it, and draws a new order from it in each pass."""

    def __init__(self, kind: str) -> None:
        self.rng = {
            "torch": torch.Generator,
            "numpy": lambda: np.random.default_rng(5),
            "numpy unseeded": np.random.default_rng,
            "philox": lambda: np.random.Generator(np.random.Philox(5)),
            "random state": lambda: np.random.RandomState(5),
            "python": lambda: random.Random(5),
        }[kind]()

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            yield from torch.randperm(40, generator=self.rng).tolist()
        elif isinstance(self.rng, random.Random):
            yield from self.rng.sample(range(40), 40)
        else:
            yield from self.rng.permutation(40).tolist()


KINDS = ["torch", "numpy", "numpy unseeded", "philox", "random state", "python"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sampler_with_a_generator_of_its_own_is_drawn_alike_after_a_resume(
    kind: str, wrapped: bool
) -> None:
    def source() -> Any:
        sampler = Shuffled(kind)
        if wrapped:
            return BatchSamplerBatches(BatchSampler(sampler, 8, drop_last=False))
        return SamplerBatches(sampler, 8)

    whole = source()
    epochs = [list(whole.batches(3, epoch)) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(i for batch in epoch for i in batch) == list(range(40)) for epoch in epochs)
    resumed = source()
    assert list(resumed.batches(3, 1)) == epochs[1]
    assert list(resumed.batches(3, 2)) == epochs[2]
    assert list(whole.batches(3, 0)) == epochs[0]  # a rollback


class TwoGenerators(Sampler[int]):
    def __init__(self) -> None:
        self.one, self.two = np.random.default_rng(1), np.random.default_rng(2)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        yield from self.one.integers(1000, size=20).tolist()
        yield from self.two.integers(1000, size=20).tolist()


def test_two_generators_of_a_sampler_are_not_seeded_alike() -> None:
    one, two = SamplerBatches(TwoGenerators(), 20).batches(0, 0)
    assert one != two


class Counting(Sampler[int]):
    """Counts its passes: nothing that can be seeded."""

    def __init__(self, told: bool) -> None:
        self.passes = 0
        if told:
            self.set_epoch = lambda epoch: setattr(self, "passes", epoch)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self.passes)
        self.passes += 1
        yield from rng.permutation(40).tolist()


def test_a_sampler_that_counts_its_passes_is_warned_of_once() -> None:
    source = SamplerBatches(Counting(told=False), 8)
    with pytest.warns(UserWarning, match=r"Counting returns a different order .* set_epoch"):
        first = list(source.batches(0, 0))
    assert list(source.batches(0, 1)) != first


def test_a_sampler_may_be_changed_between_two_draws() -> None:
    sampler = WeightedRandomSampler([1.0, 0.0], 8)
    source = SamplerBatches(sampler, 8)
    assert list(source.batches(0, 0)) == [[0] * 8]
    sampler.weights = torch.tensor([0.0, 1.0], dtype=torch.double)
    assert list(source.batches(0, 0)) == [[1] * 8]


def test_a_sampler_that_is_told_the_epoch_is_fine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = SamplerBatches(Counting(told=True), 8)
        epochs = [list(whole.batches(0, epoch)) for epoch in range(2)]
        assert list(SamplerBatches(Counting(told=True), 8).batches(0, 1)) == epochs[1]


class SeedsItself(Shuffled):
    def __init__(self) -> None:
        super().__init__("numpy")

    def set_epoch(self, epoch: int) -> None:
        self.rng = np.random.default_rng(100 + epoch)


def test_a_seed_that_a_sampler_takes_for_the_epoch_holds() -> None:
    (order,) = SamplerBatches(SeedsItself(), 40).batches(0, 2)
    assert order == np.random.default_rng(102).permutation(40).tolist()


class Endless(Sampler[int]):
    """As detection libraries write it: a length for the plan, and no end."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(40))


@pytest.mark.parametrize(
    ("sampler", "found"),
    [
        (RandomSampler(range(40), True, 10**10), "draws 10,000,000,000"),
        (Endless(), "continues after 1,400 entries, but its __len__ says 40"),
    ],
)
def test_an_order_that_fills_the_memory_is_refused_with_a_remedy(
    sampler: Sampler[int], found: str
) -> None:
    with pytest.raises(DataError, match="num_samples = steps x global batch size") as refused:
        SamplerBatches(sampler, 8).rehearse(0)
    assert found in str(refused.value)


@pytest.mark.parametrize(("where", "said"), [("loader", 1), ("sampler", 1), ("unseeded", 0)])
def test_a_seed_that_counts_for_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, said: int
) -> None:
    generator = torch.Generator()
    if where != "unseeded":
        generator.manual_seed(3)
    if where == "sampler":
        loader = DataLoader(points(), sampler=RandomSampler(points(), generator=generator))
    else:
        loader = DataLoader(points(), shuffle=True, generator=generator)
    manager = manager_for(tmp_path, progress="lines", batch_size=4)
    manager.fit(line(), loader, loss_fn=squares, optimizer=sgd)
    assert capsys.readouterr().out.count("data order: set by seed=") == said
