"""Loops with their own backward compute on N ranks what a plain loop computes in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_backward import CASES, every_case, plain
from ranks import run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gan_penalty_actor_critic_and_lbfgs_equal_a_plain_loop_and_resume_bit_for_bit(
    tmp_path: Path, ranks: int
) -> None:
    results = run_ranks(ranks, every_case, tmp_path)
    for kind in CASES:
        expected = plain(kind)
        for found in results:
            whole, again = found[kind.__name__]
            for mine, theirs in zip(whole, expected, strict=False):
                # Sums over ranks are added in another order: a few units in the last place.
                assert (mine - theirs).norm() <= 1e-12 * theirs.norm(), kind.__name__
            assert len(whole) == len(again)
            assert all(map(torch.equal, whole, again)), kind.__name__
    if ranks == 1:
        assert all(map(torch.equal, plain(CASES[0]), results[0][CASES[0].__name__][0]))
