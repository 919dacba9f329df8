"""Numbers that belong to a sample: evenly spread, independent, and the same in any batch."""

from __future__ import annotations

import pytest
import torch

from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.data.randomness import SampleRandom

SAMPLES = 20_000


def draws(epoch: int, count: int = 3) -> torch.Tensor:
    return SampleRandom(torch.arange(SAMPLES), derive_seed(0, epoch)).uniform(count)


def test_numbers_are_the_samples_own_in_any_batch() -> None:
    everything = draws(1)
    for batch in ([5], [7, 5, 19_999], list(range(100, 200))):
        some = SampleRandom(torch.tensor(batch), derive_seed(0, 1)).uniform(3)
        assert torch.equal(some, everything[batch])


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    for column in draws(1).T:
        counts = torch.histc(column, bins=20, min=0, max=1)
        expected = SAMPLES / 20
        # Chi squared with 19 degrees of freedom exceeds 50 once in 10,000 times.
        assert float(((counts - expected) ** 2 / expected).sum()) < 50
        assert float(column.min()) >= 0
        assert float(column.max()) < 1


def test_samples_draws_and_epochs_are_independent() -> None:
    ways = [(draws(epoch) * 4).long() @ torch.tensor([16, 4, 1]) for epoch in range(4)]
    # 64 ways: one in 64 agrees by chance, within 5 spreads of 0.0009.
    for a in range(4):
        assert float((ways[a][1:] == ways[a][:-1]).double().mean()) == pytest.approx(
            1 / 64, abs=0.0045
        )
        for b in range(a):
            assert float((ways[a] == ways[b]).double().mean()) == pytest.approx(1 / 64, abs=0.0045)


def test_later_draws_differ_from_earlier_ones() -> None:
    random = SampleRandom(torch.arange(SAMPLES), 5)
    first, second = random.uniform(), random.uniform()
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.04


def test_normal_numbers_have_mean_0_and_spread_1() -> None:
    numbers = SampleRandom(torch.arange(SAMPLES), 1).normal(2)
    assert numbers.shape == (SAMPLES, 2)
    assert float(numbers.mean()) == pytest.approx(0, abs=0.03)
    assert float(numbers.std()) == pytest.approx(1, abs=0.03)


def test_integers_reach_both_ends_and_nothing_else() -> None:
    numbers = SampleRandom(torch.arange(SAMPLES), torch.tensor(1)).integers(-2, 3, 4)
    values, counts = numbers.unique(return_counts=True)
    assert values.tolist() == [-2, -1, 0, 1, 2]
    assert float(counts.double().std() / counts.double().mean()) < 0.03
