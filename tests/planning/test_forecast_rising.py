"""What is said about GPU time is true of every row above it."""

from __future__ import annotations

import pytest

from multi_gpu_training.planning.forecast.cost import Rising


@pytest.mark.parametrize(
    ("costs", "lasting", "said"),
    [
        ({2: 1.0, 4: 1.05}, None, "with up to 4 GPUs, no sample costs 10 % more GPU time"),
        ({2: 1.0, 4: 1.2, 8: 1.3}, 4, "with 4 or more GPUs, each sample costs 10 % more GPU time"),
        (
            {2: 1.37, 3: 1.4, 4: 1.52, 8: 1.0, 16: 1.2, 32: 1.02},
            None,
            "with 2-4, 16 GPUs, each sample costs 10 % more GPU time than on one; with 32 it",
        ),
        (
            {2: 1.2, 4: 1.0, 8: 1.1, 16: 1.2},
            8,
            "with 8 or more GPUs, each sample costs 10 % more GPU time than on one; so",
        ),
        ({2: None, 4: 1.2}, 4, "with 4 or more GPUs"),
        ({n: 1 + n % 2 for n in range(2, 21)}, None, "with 3, 5, 7, 9 and other GPUs, each sample"),
        ({}, None, ""),
    ],
)
def test_numbers_of_gpus_that_cost_more_are_named(
    costs: dict[int, float | None], lasting: int | None, said: str
) -> None:
    found = Rising.of(list(costs), lambda count: costs[count])
    assert found.lastingly_from == lasting
    assert found.sentence().startswith(said)
