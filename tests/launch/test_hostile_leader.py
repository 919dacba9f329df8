"""Whoever leads a run of several machines does not choose where the others write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from multi_gpu_training import ConfigError, MultiGPUConfig
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.monitoring.run_folder import open_run

BAD_NAMES = [
    "../../../x",
    "..",
    ".hidden",
    "/proc/x",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "",
    "x" * 300,
]


def led_by_a_stranger(folder: Path, answer: dict[str, Any], settings: dict[str, Any]) -> str:
    """Rank 0 sends `answer` where it should choose a folder; what the other rank makes of it.

    Each rank believes to be a machine with its own disk.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    identity = Identity(rank, 0, world, 1, True, run_id="this launch")
    placement = Placement(identity, "cpu", dist.group.WORLD)
    if rank == 0:
        placement.broadcast_json(answer)
        return ""
    config = MultiGPUConfig(device="cpu", save_dir=str(folder / "runs"), **settings)
    try:
        return str(open_run(config, placement).path)
    except ConfigError as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    "name", [*BAD_NAMES, 7, None, ["x"]], ids=lambda name: ascii(name)[:20].replace("\\", "_")
)
def test_a_name_that_leaves_the_save_dir_is_refused(tmp_path: Path, name: Any) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "config.yaml").write_text("mine")
    for own in (True, False):
        answer = {"name": name, "path": str(victim), "own": own}
        said = run_ranks(2, led_by_a_stranger, tmp_path, answer, {})[1]
        assert said.startswith("refused: "), said
    assert [file.name for file in victim.iterdir()] == ["config.yaml"]
    assert (victim / "config.yaml").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim"]


def test_another_run_is_not_taken_over_by_its_name(tmp_path: Path) -> None:
    other = tmp_path / "runs" / "custom" / "other"
    (other / "checkpoints" / "step-00000010").mkdir(parents=True)
    for facts in (None, '{"run_id": "another launch"}'):
        if facts:
            (other / "environment.json").write_text(facts)
        said = run_ranks(2, led_by_a_stranger, tmp_path, {"name": "other"}, {})[1]
        assert said.startswith("refused: ") and "another run" in said, said
    asked = {"run_name": "mine"}
    said = run_ranks(2, led_by_a_stranger, tmp_path, {"name": "other"}, asked)[1]
    assert "refused" in said and "run_name='mine'" in said, said
    assert not (other / "config.yaml").exists()


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20].replace("\\", "_"))
def test_run_name_is_one_folder_inside_save_dir(name: str) -> None:
    with pytest.raises(ConfigError, match="run_name="):
        MultiGPUConfig(run_name=name)
    config = MultiGPUConfig(run_name="lr-0.1 é")
    with pytest.raises(ConfigError, match="run_name="):
        config.run_name = name
