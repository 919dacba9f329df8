"""Sharded ranks on the clock, and what of the state each of them holds."""

from __future__ import annotations

import pytest

from multi_gpu_training.measure.memory_model import MemoryPoint
from multi_gpu_training.planning.estimate.outcome import Outcome
from multi_gpu_training.planning.forecast import predict
from multi_gpu_training.planning.forecast.interconnect import Interconnect, named
from multi_gpu_training.planning.forecast.profile import GradientBucket, StepProfile
from multi_gpu_training.planning.forecast.timeline import sharded_exposed_s

GB = 2**30
PROFILE = StepProfile(
    name="llama", device="NVIDIA H100", per_rank_batch=4, forward_s=0.4, backward_s=0.8,
    optimizer_s=0.02, buckets=(GradientBucket(4 * GB, 0.8),), step_times_s=(1.22,) * 10,
    parameter_bytes=4 * GB, optimizer_bytes=8 * GB, block_bytes=GB // 4, blocks=16,
    memory=(MemoryPoint(2, 20 * GB, 20 * GB), MemoryPoint(4, 24 * GB, 24 * GB)),
    memory_total_bytes=20 * GB,
)  # fmt: skip


def test_gathering_hides_behind_the_block_before_it() -> None:
    # Four blocks of one second forward and two backward; an all-reduce of a block takes one.
    talk, exposed = sharded_exposed_s(4.0, 8.0, 4, 4, 4, lambda size: float(size))
    # The first gather and the last reduction: half a second each, and the gather of backward.
    assert (talk, exposed) == (6.0, 1.5)
    # As slow a network as the forward, and slower than the backward: 4 a block, half each way.
    talk, exposed = sharded_exposed_s(4.0, 8.0, 4, 4, 4, lambda size: 4.0 * size)
    assert talk == 24.0
    assert exposed == (2 + 3 * 2 + 1 - 4) + (2 + 3 * 4 + 2 + 2 - 8)
    # Micro-batches that only accumulate gather all the same, and add up nothing.
    twice = sharded_exposed_s(4.0, 8.0, 4, 4, 4, lambda size: float(size), accumulation=2)
    assert twice == (10.0, 1.5 + 1.0)


def test_sharded_ranks_fit_where_copies_do_not() -> None:
    link: Interconnect = named("h100-nvlink")
    copies, parts = (
        Outcome(PROFILE, predict(PROFILE, link, [1, 8], strategy=way), strategy=way).rows[1]
        for way in ("ddp", "fsdp")
    )
    assert copies["fits"] is False and parts["fits"] is True
    # 16 GB of state on 8 ranks is 2, and three blocks are 0.75.
    assert copies["peak_bytes"] - parts["peak_bytes"] == (16 - 2 - 0.75) * GB
    assert parts["communication_s"] == pytest.approx(1.5 * copies["communication_s"], rel=0.3)
    alone = Outcome(PROFILE, predict(PROFILE, link, [1], strategy="fsdp"), strategy="fsdp").rows[0]
    assert alone["peak_bytes"] == 24 * GB and alone["exposed_communication_s"] == 0


def test_slower_networks_cost_sharded_ranks_more() -> None:
    slow = named("ethernet-10g")
    ddp, fsdp = (
        predict(PROFILE, slow, [2], gpus_per_node=1, strategy=way).rows[0]
        for way in ("ddp", "fsdp")
    )
    assert fsdp.exposed_communication_s > ddp.exposed_communication_s > 0
