"""Real ranks with something wrong in them: their phases, and what the report makes of these."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import FEATURES, manager_for, points, sgd, squares
from torch import Tensor, nn
from torch.utils.data import Dataset

from multi_gpu_training.monitoring import sampling
from multi_gpu_training.monitoring.phase_names import PHASES
from multi_gpu_training.monitoring.phases import PhaseClock
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.monitoring.report.verdict import judge

LATE_S = 0.03


class Late(Dataset[Any]):
    def __init__(self, samples: int, wait_s: float) -> None:
        self.inputs, self.targets = points(samples).tensors
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        return self.inputs[index], self.targets[index]


class Normed(nn.Module):
    """With running values, which rank 0 sends to the others before each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def late_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    time.sleep(LATE_S)
    return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(state, bucket)


late_hook.__annotations__.clear()  # DDP wants the types themselves, not their names


def train(folder: Path, case: str, **settings: Any) -> Path:
    """25 steps of 16 samples a rank, in which rank 0 or the network is late."""
    given = {"batch_size": 16, "log_every": 5, "run_name": case, **settings}
    manager = manager_for(folder, **given)
    late = manager.placement.dp_rank == 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if case == "compute" and late:
            time.sleep(LATE_S)
        return squares(model, batch)

    wait_s = LATE_S / 16 if case == "data" and late else 0.0
    data = Late(25 * 16 * manager.placement.dp_size, wait_s)
    manager.setup_training(Normed(), data, loss_fn=loss_fn, optimizer=sgd)
    if case == "network":
        manager.trainer.wrapped.register_comm_hook(None, late_hook)  # type: ignore[operator]
    manager.train_epoch(manager.train_loader, 0)
    manager.finish()
    return manager.run.path


@pytest.mark.parametrize(("case", "ranks"), [("data", (0,)), ("compute", (0,)), ("network", ())])
def test_the_cause_and_its_rank_are_named(
    tmp_path: Path, case: str, ranks: tuple[int, ...]
) -> None:
    path = run_ranks(2, train, tmp_path, case)[0]
    verdict = judge(read_run(path))
    assert (verdict.kind, verdict.causes[0].ranks) == (case, ranks), verdict
    assert verdict.causes[0].seconds == pytest.approx(LATE_S, rel=0.9)


def own_loop(folder: Path, case: str) -> Path:
    """60 steps of two micro-batches, called by a loop of one's own, in which rank 1 may be late."""
    manager = manager_for(folder, batch_size=16, gradient_accumulation_steps=2, run_name=case)
    manager.setup_training(Normed(), points(), loss_fn=squares, optimizer=sgd)
    inputs, targets = points(16).tensors
    for _ in range(120):
        manager.trainer.train_step((inputs, targets))
        if case == "hooks" and manager.placement.dp_rank == 1:
            time.sleep(LATE_S / 2)
    manager.finish()
    return manager.run.path


def test_a_loop_of_ones_own_is_timed_as_well(tmp_path: Path) -> None:
    path = run_ranks(2, own_loop, tmp_path, "hooks")[0]
    verdict = judge(read_run(path))
    assert (verdict.kind, verdict.causes[0].ranks) == ("hooks", (1,)), verdict
    assert verdict.causes[0].seconds == pytest.approx(LATE_S, rel=0.5)
    timed = [events(path, rank, "phases") for rank in range(2)]
    assert [event["step"] for event in timed[0]] == [event["step"] for event in timed[1]]
    for event in timed[1]:
        assert event["input_s"] == 0 and event["forward_s"] > 0 and event["other_s"] > LATE_S / 2


def events(path: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    lines = (path / "events" / f"rank-{rank}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_phases_add_up_and_ranks_time_the_same_steps(tmp_path: Path) -> None:
    path = run_ranks(2, accumulated, tmp_path)[0]
    by_rank = [events(path, rank, "phases") for rank in range(2)]
    steps = [[event["step"] for event in found] for found in by_rank]
    assert steps[0] == steps[1] and len(steps[0]) >= 3
    for event in by_rank[0]:
        total = sum(event[f"{phase}_s"] for phase in PHASES)
        assert total == pytest.approx(event["step_s"], rel=1e-3, abs=1e-5)
        assert min(event[f"{phase}_s"] for phase in PHASES) >= 0.0
        assert event["forward_s"] > 0 and event["backward_s"] > 0 and event["optimizer_s"] > 0
    intervals = sum(event["interval_steps"] for event in by_rank[0])
    assert intervals == by_rank[0][-1]["step"]


def accumulated(folder: Path) -> Path:
    return train(folder, "none", gradient_accumulation_steps=2, batch_size=8)


def test_timed_steps_fall_into_every_place_of_a_cycle() -> None:
    for stride in (5, *map(sampling.out_of_step, (8, 20, 21, 64, 200, 312))):
        for cycle in (2, 3, 4, 6, 8, 12, 16):
            assert len({(stride * n + 1) % cycle for n in range(cycle)}) == cycle, (stride, cycle)


def test_counting_the_work_of_a_step_changes_nothing(tmp_path: Path) -> None:
    on, off = run_ranks(2, both_ways, tmp_path)[0]
    assert on == off  # bit for bit


def both_ways(folder: Path) -> list[list[float]]:
    found = []
    for monitor in (True, False):
        manager = manager_for(folder, monitor=monitor, batch_size=2, epochs=3, log_every=2)
        manager.fit(Normed(), points(), loss_fn=squares, optimizer=sgd)
        found.append([v.item() for p in manager.model.parameters() for v in p.flatten()])
        if monitor:
            [work] = events(manager.run.path, 0, "work")
            # Three products of each layer, but for the input's gradient of the first.
            assert work["flops"] == 2 * 2 * (2 * FEATURES * 8 + 3 * 8 * 1)
    return found


def test_a_checkpoint_is_no_computing(tmp_path: Path) -> None:
    settings = {"enable_fault_tolerance": True, "checkpoint_frequency": 1}
    path = run_ranks(1, single, tmp_path, settings)[0]
    timed = events(path, 0, "phases")
    assert sum(event["interval_checkpoint_s"] for event in timed) > 0
    assert any(event["checkpoint_s"] > 0 for event in timed)


def single(folder: Path, settings: dict[str, Any]) -> Path:
    manager = manager_for(folder, training_mode="single", batch_size=2, epochs=2, **settings)
    with mock.patch.dict(sampling.COST_S, cpu=0.0):  # steps as short as these are timed, too
        manager.fit(Normed(), points(), loss_fn=squares, optimizer=sgd)
    return manager.run.path


def test_the_clock_is_gone_after_an_error(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single", batch_size=2, log_every=1, epochs=2)
    calls = 0

    def failing(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise ValueError("no")
        return squares(model, batch)

    with pytest.raises(ValueError, match="no"):
        manager.fit(Normed(), points(), loss_fn=failing, optimizer=sgd)
    assert not any(isinstance(m, PhaseClock) for m in manager.callbacks.members)
    [end] = events(manager.run.path, 0, "run_end")
    assert end["error"].startswith("ValueError: no")
    assert read_run(manager.run.path).state == "failed"
