"""Ranks that break their group in the middle of exchanges connect again at once."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import run_ranks

from multi_gpu_training.distributed.recoverable_group import RecoverableGroup

# Far beyond the time that the ranks of these tests may take.
FORGOTTEN = timedelta(seconds=600)
SIZES = (9, 200, 700_000, 9, 700_000, 200, 700_000, 9)  # the largest fill a socket's buffer


def break_off(rebuilds: int) -> list[float]:
    """Rank 1 stops after some exchanges; the others wait for all. What a last exchange gives."""
    group, sums = RecoverableGroup(FORGOTTEN), []
    for number in range(rebuilds):
        mine = SIZES[: 1 + number % len(SIZES)] if dist.get_rank() == 1 else SIZES
        with suppress(RuntimeError):
            works = [
                dist.all_reduce(torch.ones(size), group=group.group, async_op=True) for size in mine
            ]
            if dist.get_rank() == 1:
                time.sleep(number * 1e-4)
            else:
                for work in works:
                    work.wait()
                dist.all_reduce(torch.ones(1), group=group.group)  # rank 1 never comes to it
        group = group.renew()
        last = torch.ones(1)
        dist.all_reduce(last, group=group.group)
        sums.append(float(last))
    group.release()
    return sums


def test_a_group_broken_while_messages_travel_is_rebuilt_at_once() -> None:
    assert run_ranks(3, break_off, 8, timeout_s=60) == [[3.0] * 8] * 3
