"""A load hashes each file once for all ranks that share it, and no rank reads a damaged one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import line, manager_for, points, sgd, squares, weights

from multi_gpu_training.checkpoint.resume import read_together
from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError

FILES = ("model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json")
SETTINGS = {
    "global_batch_size": 4,
    "run_name": "run",
    "enable_fault_tolerance": True,
    "checkpoint_frequency": 2,
    "keep_last": 9,
}


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def start(folder: Path, **more: Any) -> Any:
    manager = manager_for(folder, **SETTINGS, **more)
    model = line()
    manager.setup_training(model, points(), loss_fn=squares, optimizer=sgd)
    return manager, model


def train(folder: Path) -> None:
    """Four steps, saved at 2 and 4."""
    manager = manager_for(folder, **SETTINGS)
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)


def resume(folder: Path, where: str = "auto") -> tuple[int, Any, dict[str, int]]:
    """The step a rank resumed from, its weights, and which files it hashed how often."""
    manager, model = start(folder, resume=where)
    hashed = manager.fault_tolerance.store.verifier.hashed
    counts = {f"{file.parent.name}/{file.name}": count for file, count in hashed.items()}
    step = manager.trainer.step
    manager.finish()
    return step, weights(model), counts


def total(answers: list[tuple[int, Any, dict[str, int]]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for _, _, counts in answers:
        found.update(counts)
    return found


@pytest.mark.parametrize("where", ["auto", "path"])
def test_three_ranks_that_share_a_disk_hash_each_file_once(tmp_path: Path, where: str) -> None:
    run_ranks(1, train, tmp_path)
    path = tmp_path / "custom/run/checkpoints/step-00000004"
    answers = run_ranks(3, resume, tmp_path, str(path) if where == "path" else "auto")
    assert [step for step, _, _ in answers] == [4, 4, 4]
    assert total(answers) == {f"step-00000004/{name}": 1 for name in FILES}
    for _, ours, _ in answers:
        assert all(torch.equal(ours[key], value) for key, value in answers[0][1].items())


def test_all_ranks_fall_back_together_and_hash_nothing_twice(tmp_path: Path) -> None:
    run_ranks(1, train, tmp_path)
    flip(tmp_path / "custom/run/checkpoints/step-00000004/state.json")
    answers = run_ranks(3, resume, tmp_path)
    assert [step for step, _, _ in answers] == [2, 2, 2]
    found = total(answers)
    assert set(found.values()) == {1}
    assert {name for name in found if name.startswith("step-00000002")} == {
        f"step-00000002/{name}" for name in FILES
    }


def damaged_after_it_was_found(folder: Path) -> str:
    """Between the search, which verifies, and the load another process changes a byte."""
    manager, model = start(folder, resume="auto")
    path = manager.fault_tolerance.find("auto")
    if manager.placement.is_main:
        flip(path / "model.safetensors")
    manager.placement.barrier()
    before = weights(model)
    with pytest.raises(CheckpointError) as told:
        manager.fault_tolerance.resume(path)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    manager.finish()
    return str(told.value)


def test_damage_that_comes_after_the_search_is_found_on_every_rank(tmp_path: Path) -> None:
    run_ranks(1, train, tmp_path)
    for text in run_ranks(3, damaged_after_it_was_found, tmp_path):
        assert "step-00000004 is damaged: model.safetensors was changed" in text


def on_its_own_disk(folder: Path, damaged: bool) -> tuple[Any, int]:
    """Every rank is a host with its own disk and its own copy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    placement = Placement(Identity(rank, 0, world, 1, True), "cpu", dist.group.WORLD)
    disk = folder / f"disk-{rank}"
    written = Snapshot(5, 0, {"w": torch.ones(3)}, {}, {}, {})
    path = CheckpointStore(disk).save(written)
    if damaged and rank == 1:
        flip(path / "model.safetensors")
    store = CheckpointStore(disk)  # which has not written it
    try:
        found: Any = read_together(path, placement, store).step
    except CheckpointError as error:
        found = str(error)
    return found, store.verifier.hashed[path / "model.safetensors"]


def test_hosts_with_their_own_disks_verify_their_own_copies(tmp_path: Path) -> None:
    assert run_ranks(2, on_its_own_disk, tmp_path / "intact", False) == [(5, 1), (5, 1)]
    for text, hashed in run_ranks(2, on_its_own_disk, tmp_path / "damaged", True):
        assert "step-00000005 is damaged: model.safetensors was changed" in text
        assert hashed == 1
