"""Unequal ranks: shares follow speed and memory, the result does not change."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tiny import line, manager_for, points, sgd, squares
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig
from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.loader import Feeding, ShareLoader
from multi_gpu_training.data.order import ShuffledBatches, cut
from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.measure.balance import Counts, allot, search
from multi_gpu_training.measure.meter import StepTimes
from multi_gpu_training.measure.rank_speed import RankSpeed, first_batch
from multi_gpu_training.measure.recorder import Recording
from multi_gpu_training.measure.request import MeasureRequest

LIMIT = 1e-5  # the promise; float32 rounds at 6e-8


# What the shares are, by numbers alone


class Machine:
    """Ranks that take `overhead + per_sample * count` seconds and hold `memory` samples."""

    def __init__(
        self, per_sample: Sequence[float], overhead: float = 0.0, memory: Sequence[int] = ()
    ) -> None:
        self.per_sample = per_sample
        self.overhead = overhead
        self.memory = memory
        self.asked: list[Counts] = []

    def __call__(self, counts: Counts) -> list[RankSpeed]:
        self.asked.append(counts)
        found = []
        for rank, count in enumerate(counts):
            limit = self.memory[rank] if self.memory else None
            held = count if limit is None else min(count, limit)
            found.append(RankSpeed(held, self.overhead + self.per_sample[rank] * held, limit))
        return found

    def slowest(self, counts: Counts) -> float:
        return max(self.overhead + s * c for s, c in zip(self.per_sample, counts, strict=True))


def test_twice_as_fast_gets_twice_as_much() -> None:
    assert search(Machine([1.0, 2.0]), (32, 32))[0] == (43, 21)
    assert search(Machine([1.0, 1.0, 3.0, 2.0]), (32,) * 4)[0] == (46, 45, 15, 22)


def test_ranks_within_a_tenth_of_each_other_keep_equal_shares() -> None:
    machine = Machine([1.0, 1.09])
    assert search(machine, (32, 32))[0] == (32, 32)
    assert machine.asked == [(32, 32)]


def test_a_fixed_cost_of_each_step_is_seen_by_measuring_again() -> None:
    machine = Machine([1.0, 3.0], overhead=30.0)
    counts, _ = search(machine, (32, 32))
    best = min(machine.slowest((n, 64 - n)) for n in range(1, 64))
    assert machine.slowest(counts) <= 1.05 * best
    assert search(Machine([1.0, 1.3], overhead=1000.0), (32, 32))[0] == (32, 32)


def test_memory_bounds_a_share_whatever_the_speed() -> None:
    assert search(Machine([1.0, 1.0], memory=(64, 20)), (32, 32))[0] == (44, 20)
    counts, _ = search(Machine([2.0, 1.0], memory=(64, 40)), (32, 32))
    assert counts[1] <= 40 and sum(counts) == 64
    assert allot(10, [1.0, 1.0, 100.0], [None, None, 4]) == (3, 3, 4)


# Real ranks, one of them slow


class Slow(nn.Module):
    """Takes `sample_s` longer for every sample, in which the CPU rests as while a GPU computes:
    what is measured then does not depend on what else runs on the machine."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.sample_s = sample_s
        self.first = nn.Linear(4, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.sample_s * len(inputs) * self.training)
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def labelled(samples: int = 150) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def weighted(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A mean over weights that differ from sample to sample."""
    weight = 1.0 + batch[1].float() * 4
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (each * weight).sum() / weight.sum(), weight.sum()


def train_slowed(folder: Path, sample_s: list[float], settings: dict[str, Any]) -> dict[str, Any]:
    model = Slow(sample_s[int(os.environ.get("RANK", "0"))])
    manager = manager_for(folder, global_batch_size=48, epochs=2, sync_bn=True, seed=4, **settings)
    sizes: list[int] = []

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        sizes.append(len(batch[0]))
        return weighted(model, batch)

    result = manager.fit(
        model, labelled(), val_dataset=labelled(31), loss_fn=loss_fn, optimizer=sgd
    )
    events = [
        json.loads(row)
        for row in (result.folder / "events" / f"rank-{manager.placement.dp_rank}.jsonl")
        .read_text()
        .splitlines()
    ]
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "shares": manager.balance.weights,
        "metrics": result.metrics,
        "sizes": sizes,
        "event": next((event for event in events if event["event"] == "shares"), None),
    }


def apart(ours: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max(
        float((ours[n].double() - others[n].double()).norm())
        / max(float(others[n].double().norm()), 1e-30)
        for n in ours
    )


def test_a_slow_rank_gets_less_and_the_result_stays(tmp_path: Path) -> None:
    equal = run_ranks(2, train_slowed, tmp_path / "a", [5e-4, 2e-3], {"balance": "equal"})
    shared = run_ranks(2, train_slowed, tmp_path / "b", [5e-4, 2e-3], {"balance": "measured"})
    assert equal[0]["shares"] is None and equal[0]["event"]["weights"] is None
    fast, slow = shared[0]["shares"]
    assert fast + slow == 48 and fast > 1.5 * slow  # four times as fast, on any machine
    for ours, others in zip(shared, equal, strict=True):
        assert ours["shares"] == (fast, slow)
        assert ours["event"]["weights"] == [fast, slow] and "speed" in ours["event"]["why"]
        assert apart(ours["weights"], others["weights"]) <= LIMIT
        for name, value in others["metrics"].items():
            assert ours["metrics"][name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"share_weights": [20, 1]},  # of the last, short batch the second rank gets nothing
        {"balance": "measured", "static_graph": True, "gradient_accumulation_steps": 2},
        {"balance": "measured", "find_unused_parameters": True},
    ],
    ids=["empty-share", "static-graph", "unused"],
)
def test_unequal_shares_learn_what_one_rank_learns(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    accumulation = {"gradient_accumulation_steps": settings.get("gradient_accumulation_steps", 1)}
    alone = run_ranks(1, train_slowed, tmp_path / "a", [0.0], accumulation)[0]
    for ours in run_ranks(2, train_slowed, tmp_path / "b", [2e-4, 2e-3], settings):
        assert apart(ours["weights"], alone["weights"]) <= LIMIT


def test_measuring_leaves_no_trace(tmp_path: Path) -> None:
    """Equal ranks that are measured end with the bits of ranks that never were."""
    plain = run_ranks(2, train_traced, tmp_path / "a", "equal")
    probed = run_ranks(2, train_traced, tmp_path / "b", "measured")
    for ours, others in zip(probed, plain, strict=True):
        assert ours["probed"] and not others["probed"]
        for name, value in others["weights"].items():
            assert torch.equal(ours["weights"][name], value), name


def noisy(batch: list[Tensor], random: Any) -> list[Tensor]:
    return [batch[0] + random.uniform(4), batch[1]]


def train_traced(folder: Path, balance: str) -> dict[str, Any]:
    """With dropout, BatchNorm of every rank's own and momentum; shares are kept equal."""
    from multi_gpu_training.measure import balance as module

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
    manager = manager_for(folder, batch_size=8, epochs=2, balance=balance)
    calls: list[int] = []
    before = module.UNEQUAL
    module.UNEQUAL = float("inf")
    try:

        def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
            calls.append(len(batch[0]))
            return F.cross_entropy(model(batch[0]), batch[1])

        manager.fit(model, labelled(64), loss_fn=loss_fn, augment=noisy)
    finally:
        module.UNEQUAL = before
    assert manager.balance.weights is None
    rows = (manager.run.path / "events" / f"rank-{manager.placement.dp_rank}.jsonl").read_text()
    assert balance == "equal" or "measured: ranks are about even" in rows
    return {"probed": len(calls) > 2 * 4, "weights": dict(model.state_dict())}


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.step:
            raise InterruptedError


def train_and_resume(
    folder: Path, name: str, stop: int | None, loss_fn: Any = squares, **settings: Any
) -> Any:
    manager = manager_for(
        folder,
        run_name=name,
        global_batch_size=16,
        epochs=2,
        enable_fault_tolerance=True,
        checkpoint_frequency=1,
        **settings,
    )
    model = line()
    hooks = [StopAt(stop)] if stop else []
    try:
        manager.fit(model, points(60), loss_fn=loss_fn, optimizer=sgd, callbacks=hooks)
    except InterruptedError:
        manager.fault_tolerance.wait()
        return None
    return manager.balance.weights, {n: v.clone() for n, v in model.state_dict().items()}


def measured_twice(folder: Path) -> Any:
    """A run with measured shares; and from its third step on again, with the other rank slow."""

    def loss_fn(slow_rank: int) -> Any:
        slow = int(os.environ["RANK"]) == slow_rank

        def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
            time.sleep((4e-3 if slow else 1e-3) * len(batch[0]))
            return squares(model, batch)

        return loss

    settings = {"balance": "measured", "keep_last": 20}
    whole = train_and_resume(folder, "whole", None, loss_fn(1), **settings)
    third = folder / "custom" / "whole" / "checkpoints" / "step-00000003"
    again = train_and_resume(folder, "again", None, loss_fn(0), resume=str(third), **settings)
    return whole, again


def test_a_resumed_run_repeats_its_shares_bit_for_bit(tmp_path: Path) -> None:
    for (shares, whole), (repeated, again) in run_ranks(2, measured_twice, tmp_path):
        assert repeated == shares and shares[0] > shares[1]
        assert all(torch.equal(again[name], whole[name]) for name in whole)


def shares_of_resumed(folder: Path, run: str, settings: dict[str, Any]) -> Any:
    return train_and_resume(folder, run, None, resume="auto", **settings)[0]


def test_shares_of_other_ranks_or_asked_for_anew_are_not_repeated(tmp_path: Path) -> None:
    run_ranks(2, start_unequal, tmp_path)
    assert run_ranks(3, shares_of_resumed, tmp_path, "started", {}) == [None] * 3
    assert run_ranks(2, shares_of_resumed, tmp_path, "started", {"balance": "equal"}) == [None] * 2


def start_unequal(folder: Path) -> None:
    train_and_resume(folder, "started", 1, share_weights=[3.0, 1.0])


# What goes wrong


def short_of_memory(folder: Path, most: list[int]) -> Any:
    """A rank runs out of memory above `most` samples, as a small GPU does."""
    manager = manager_for(folder, batch_size=16, balance="measured")
    limit = most[manager.placement.dp_rank]
    trained: list[int] = []

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError(f"no room for {len(batch[0])} samples")
        trained.append(len(batch[0]))
        time.sleep(1e-4 * len(batch[0]))
        return squares(model, batch)

    manager.fit(line(), points(64), loss_fn=loss_fn, optimizer=sgd)
    return manager.balance.weights, trained[-2:], manager.trainer.step


def test_a_small_gpu_trains_with_what_fits_into_it(tmp_path: Path) -> None:
    for shares, trained, steps in run_ranks(2, short_of_memory, tmp_path, [100, 10]):
        assert sum(shares) == 32 and shares[1] <= 10
        assert steps == 2 and max(trained) in shares


def broken_probe(folder: Path) -> Any:
    """The loss fails on one rank while it is measured, and works afterwards."""
    manager = manager_for(folder, batch_size=8, balance="measured")
    failing = manager.placement.dp_rank == 1

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal failing
        if failing:
            failing = False
            raise ValueError("not yet")
        return squares(model, batch)

    manager.fit(line(), points(32), loss_fn=loss_fn, optimizer=sgd)
    path = manager.run.path / "events" / f"rank-{manager.placement.dp_rank}.jsonl"
    return manager.balance.weights, manager.trainer.step, path.read_text()


def test_a_rank_that_cannot_be_measured_leaves_shares_equal_and_is_named(tmp_path: Path) -> None:
    for shares, steps, events in run_ranks(2, broken_probe, tmp_path):
        assert shares is None and steps == 2
        assert "rank 1: ValueError: not yet" in events


def test_weights_for_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are for 3 ranks, but world_size=2"):
        manager_for(tmp_path, share_weights=[1, 1, 2], world_size=2)
    with pytest.raises(ConfigError, match="share_weights needs distributed_data_parallel"):
        manager_for(tmp_path, share_weights=[1, 2], training_mode="data_parallel")
    with pytest.raises(ConfigError, match="both say how"):
        manager_for(tmp_path, share_weights=[1, 2], balance="measured")
    with pytest.raises(ConfigError, match="greater than 0"):
        manager_for(tmp_path, share_weights=[1, 0])
    with pytest.raises(ConfigError, match="are for 2 ranks, but there are 1"):
        manager_for(tmp_path, share_weights=[1, 2]).fit(line(), points(), loss_fn=squares)


def test_verify_and_bench_keep_weights_only_where_they_fit(tmp_path: Path) -> None:
    config = MultiGPUConfig(share_weights=[2, 1])
    ddp = MeasureRequest("recorder", str(tmp_path), 2, 5, device="cpu")
    assert Recording(ddp).adapt(config).share_weights == [2, 1]
    alone = Recording(replace(ddp, ranks=1)).adapt(config)
    assert (alone.share_weights, alone.balance) == (None, "equal")
    assert StepTimes(ddp).adapt(config).share_weights == [2, 1]
    for request in (replace(ddp, ranks=1), replace(ddp, mode="data_parallel")):
        assert StepTimes(request).adapt(config).share_weights is None
    measured = MultiGPUConfig(balance="measured")
    assert StepTimes(ddp).adapt(measured).balance == "measured"
    assert StepTimes(replace(ddp, mode="single")).adapt(measured).balance == "auto"
    assert Recording(ddp).adapt(measured).balance == "equal"


# Every way of feeding


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*points(40).tensors, strict=True)


def train_fed(folder: Path, kind: str, settings: dict[str, Any]) -> Any:
    manager = manager_for(folder, batch_size=6, epochs=2, **settings)
    sizes: list[int] = []

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        sizes.append(len(batch[0]))
        return squares(model, batch)

    model = line()
    data = Stream() if kind == "stream" else points(40)
    manager.fit(model, data, loss_fn=loss_fn, optimizer=sgd)
    return sizes, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_any_data_are_cut_by_the_weights(tmp_path: Path, kind: str) -> None:
    accumulated = {"gradient_accumulation_steps": 2}
    equal = run_ranks(2, train_fed, tmp_path / "a", kind, accumulated)
    shared = run_ranks(2, train_fed, tmp_path / "b", kind, {"share_weights": [5, 1], **accumulated})
    bounds = [0, *(stop for _, stop in (cut(12, 2, r, (833, 167)) for r in range(2)))]
    for rank, (sizes, ours) in enumerate(shared):
        assert sizes[0] == [b - a for a, b in pairwise(bounds)][rank] == (10, 2)[rank]
        assert apart(ours, equal[rank][1]) <= LIMIT


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_data_on_the_device_are_cut_as_data_that_are_sent(rank: int) -> None:
    feeding = Feeding(micro_size=7, seed=3, rank=rank, ranks=3, weights=(3, 1, 2))
    source = ShuffledBatches(40, 12)
    sent, resident = (kind(points(40), source, feeding) for kind in (ShareLoader, ResidentLoader))
    resident.seek(0, 1)
    start = first_batch(resident)
    assert len(start[0]) == 3 and (resident.start, resident.feeding) == (1, feeding)
    resident.seek(0)
    for one, other in zip(sent, resident, strict=True):
        assert share_of(one).count == share_of(other).count
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train_dynamic(folder: Path) -> Any:
    """Rank 1 turns slow in the second epoch, as a GPU does when others use it."""
    manager = manager_for(folder, batch_size=16, epochs=3, balance="dynamic")
    by_epoch: list[Any] = []
    slow = 0.0 if manager.placement.dp_rank == 0 else 1e-3

    class Watch(Callback):
        def on_epoch_end(self, manager: Any, epoch: int, metrics: Any) -> None:
            by_epoch.append(manager.balance.weights)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        turned = slow if by_epoch else 0.0
        time.sleep((1e-3 + turned) * len(batch[0]))
        return squares(model, batch)

    manager.fit(line(), points(64), loss_fn=loss_fn, optimizer=sgd, callbacks=[Watch()])
    return by_epoch


def test_dynamic_shares_follow_a_rank_that_turns_slow(tmp_path: Path) -> None:
    one, two = run_ranks(2, train_dynamic, tmp_path)
    assert one == two
    assert one[1] is not None and one[1][0] > 1.5 * one[1][1]
    assert one[2][0] > 1.5 * one[2][1]
