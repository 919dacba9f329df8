"""Nodes with disks of their own: each keeps the run, and one without a checkpoint receives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.checkpoint.store import CheckpointStore, load
from multi_gpu_training.checkpoint.sync import (
    CheckpointHosts,
    agree_on_newest,
    best_offer,
    bring_to_all,
    find_checkpoint_hosts,
    newest_history,
)
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError


def went(*attempts: tuple[int, int]) -> list[dict[str, int]]:
    return [{"attempt": attempt, "from_step": step} for attempt, step in attempts]


def test_a_node_that_was_away_follows_those_that_went_on() -> None:
    short, long = went((1, 10)), went((1, 10), (2, 15))
    # Though it has trained further before it was lost: the run went back before that.
    assert newest_history({0: short, 1: long}, [20, 16]) == long
    assert newest_history({0: long, 1: short}, [16, 20]) == long


def test_of_two_histories_that_went_apart_the_one_with_more_steps_wins() -> None:
    one, other = went((1, 10)), went((1, 12))
    assert newest_history({0: one, 1: other}, [30, 40]) == other
    assert newest_history({0: one, 1: other}, [40, 30]) == one


def test_the_newest_checkpoint_is_taken_from_the_lowest_rank_that_has_it() -> None:
    assert best_offer([{"step": 5}, None, {"step": 10}, {"step": 10}]) == 2
    assert best_offer([{"step": -1}, None]) is None


def on_a_node(
    folder: Path, *, shared: bool = False, kind: type[Placement] = Placement
) -> tuple[Placement, Path]:
    """Every rank a node of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    placement = kind(Identity(rank, 0, world, 1, True), "cpu", dist.group.WORLD)
    disk = folder / ("disk" if shared else f"disk-{rank}") / "run"
    (disk / "events").mkdir(parents=True, exist_ok=True)
    return placement, disk


def snapshot(step: int, value: float) -> Snapshot:
    return Snapshot(step, 0, {"w": torch.full((300,), value)}, {}, {}, {})


def writers(folder: Path) -> list[Any]:
    answers = []
    for shared in (False, True):
        placement, disk = on_a_node(folder, shared=shared)
        found = find_checkpoint_hosts(placement, disk)
        answers += [found.writers, found.writes]
        placement.barrier()
        answers.append(sorted(path.name for path in disk.iterdir()))
    return answers


def test_every_disk_has_one_writer(tmp_path: Path) -> None:
    first, second = run_ranks(2, writers, tmp_path)
    assert first == [(0, 1), True, ["events"], (0,), True, ["events"]]
    assert second == [(0, 1), True, ["events"], (0,), False, ["events"]]


def resume(folder: Path, steps: dict[int, list[int]], damaged: bool = False) -> tuple[Any, ...]:
    """What a rank goes on from, where each has saved so many steps."""
    placement, disk = on_a_node(folder)
    store = CheckpointStore(disk / "checkpoints")
    rank = placement.identity.rank
    for step in steps[rank]:
        store.save(snapshot(step, float(step)))
    if damaged and rank == 1:
        with (store.path_of(steps[1][-1]) / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
    placement.barrier()
    disks = CheckpointHosts((0, 1), True, True)
    found = agree_on_newest(placement, disks, store)
    value = None if found.path is None else float(load(found.path).model["w"][0])
    ours = found.path is None or disk in found.path.parents
    return value, ours, found.damaged, found.said


def test_a_node_without_the_newest_checkpoint_receives_it(tmp_path: Path) -> None:
    for number, steps in enumerate(({0: [], 1: [5, 10]}, {0: [5, 10], 1: [5]})):
        answers = run_ranks(2, resume, tmp_path / str(number), steps)
        assert [answer[:2] for answer in answers] == [(10.0, True), (10.0, True)]
        assert "step-00000010 was sent" in answers[0][3][0]


def test_the_intact_copy_of_another_node_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    answers = run_ranks(2, resume, tmp_path, {0: [5, 10], 1: [5, 10]}, True)
    assert [answer[0] for answer in answers] == [10.0, 10.0]
    assert "step-00000010 is damaged" in answers[0][2][0]


def test_nothing_is_sent_where_all_have_it_and_nothing_found_where_none_has(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, resume, tmp_path / "a", {0: [5], 1: [5]})[1] == (5.0, True, [], [])
    assert run_ranks(2, resume, tmp_path / "b", {0: [], 1: []})[0] == (None, True, [], [])


def strangers(folder: Path) -> tuple[Any, ...]:
    """Node 1 has a run of the same name that has nothing to do with this one."""
    placement, disk = on_a_node(folder)
    store = CheckpointStore(disk / "checkpoints")
    rank = placement.identity.rank
    store.save(snapshot(5 if rank == 0 else 100, 1.0))
    found = agree_on_newest(placement, CheckpointHosts((0, 1), True, known=rank == 0), store)
    assert found.path is not None
    kept = [path.name for path in disk.iterdir() if path.name.startswith("checkpoints-before-")]
    return load(found.path).step, len(kept), [path.name for path in store.folders()]


def test_another_runs_checkpoints_are_neither_used_nor_lost(tmp_path: Path) -> None:
    first, second = run_ranks(2, strangers, tmp_path)
    assert first == (5, 0, ["step-00000005"])
    assert second == (5, 1, ["step-00000005"])


class Noisy(Placement):
    """A byte changes on its way."""

    def broadcast_from(self, source: int, tensor: torch.Tensor) -> torch.Tensor:
        got = super().broadcast_from(source, tensor)
        if not self.is_main:
            got[-1] ^= 1
        return got


def noisy(folder: Path) -> list[Any]:
    placement, disk = on_a_node(folder, kind=Noisy)
    store = CheckpointStore(disk / "checkpoints")
    if placement.is_main:
        store.save(snapshot(5, 1.0))
    try:
        agree_on_newest(placement, CheckpointHosts((0, 1), True, True), store)
        said = ""
    except CheckpointError as error:
        said = str(error)
    return [said, [path.name for path in store.folder.iterdir()]]


def test_what_does_not_arrive_intact_is_not_taken(tmp_path: Path) -> None:
    first, second = run_ranks(2, noisy, tmp_path)
    assert "did not arrive intact" in first[0] == second[0]
    assert first[1] == ["step-00000005"] and second[1] == []


def given(folder: Path) -> tuple[int, bool]:
    """`--resume PATH` where only node 0 has that path."""
    placement, disk = on_a_node(folder)
    elsewhere = CheckpointStore(folder / f"elsewhere-{placement.identity.rank}")
    path = elsewhere.path_of(7)
    if placement.is_main:
        elsewhere.save(snapshot(7, 1.0))
    store = CheckpointStore(disk / "checkpoints")
    found = bring_to_all(placement, CheckpointHosts((0, 1), True, True), store, path)
    return load(found).step, found == path


def test_a_checkpoint_that_was_named_reaches_every_node(tmp_path: Path) -> None:
    assert run_ranks(2, given, tmp_path) == [(7, True), (7, False)]
