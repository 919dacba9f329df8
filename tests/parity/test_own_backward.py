"""Loops with their own backward compute on N ranks what a plain loop computes in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from own_backward import CASES, every_case, numbers, plain
from ranks import run_ranks
from tiny import manager_for
from torch import nn


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gan_penalty_actor_critic_lbfgs_and_sums_equal_a_plain_loop_and_resume_bit_for_bit(
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


def train_without_a_seed(folder: Path) -> list[torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    first = net[0].weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager = manager_for(folder, device="cpu", global_batch_size=4)
    trainer = manager.prepare(net, optimizer)
    begun = net[0].weight.detach().clone()
    with trainer.step(numbers(2, 4, seed=rank)) as batch:
        trainer.backward(net(batch).pow(2).mean(), optimizer=optimizer)
        optimizer.step()
    manager.finish()
    return [first, begun, *(value.clone() for value in net.state_dict().values())]


def test_models_that_no_script_seeded_start_from_rank_0(tmp_path: Path) -> None:
    one, other = run_ranks(2, train_without_a_seed, tmp_path)
    assert not torch.equal(one[0], other[0]) and torch.equal(one[0], one[1])
    for ours, theirs in zip(one[1:], other[1:], strict=True):
        assert torch.equal(ours, theirs)
