"""What the fields of fully sharded training change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ranks import RankError, run_ranks
from tiny import FEATURES, line, manager_for, points, squares
from torch import Tensor, nn

from multi_gpu_training import ConfigError, MultiGPUConfig


def gathering(folder: Path, **settings: Any) -> dict[str, Any]:
    """What a loss function sees of a block's parameters while and after the block runs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    model.tp_plan = {"0": "colwise", "2": "rowwise"}
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["type"] = module.weight.dtype
        inside = getattr(module.weight, "to_local", lambda: module.weight)()
        seen["rows inside"] = inside.numel()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        seen["samples"] = len(batch[0])
        loss = squares(model, batch)
        local = getattr(model[0].weight, "to_local", lambda: model[0].weight)
        seen["rows outside"] = local().numel()
        return loss

    model[0].register_forward_hook(look)
    common = {"batch_size": 4, "max_steps": 2}
    manager = manager_for(folder, training_mode="fsdp", **{**common, **settings})
    manager.fit(model, points(), loss_fn=loss_fn)
    return {**seen, "state": dict(manager.trainer.full_state())}


def gathered_in_six_ways(folder: Path) -> list[dict[str, Any]]:
    bf16 = {"use_mixed_precision": True, "fsdp_gather_dtype": "bf16"}
    ways: list[dict[str, Any]] = [{}, {"fsdp_reshard": False}, {"fsdp_blocks": ["2"]}, bf16]
    ways += [{"fsdp_copy_size": 1}, {"tensor_parallel": 2, "batch_size": 8}]
    return [gathering(folder, **way) for way in ways]


def test_fsdp_fields_say_what_is_gathered_when_and_in_which_type(tmp_path: Path) -> None:
    ways = run_ranks(2, gathered_in_six_ways, tmp_path)[0]
    usual, kept, second, bf16, copies, team = ways
    assert (usual["rows inside"], usual["rows outside"]) == (16, 8)
    assert kept["rows outside"] == 16  # gathered once, for forward and backward
    assert second["rows outside"] == 16  # not a block of its own: gathered by the root
    assert (usual["type"], bf16["type"]) == (torch.float32, torch.bfloat16)
    assert (copies["rows inside"], copies["rows outside"]) == (16, 16)  # a copy on each rank
    assert (team["rows inside"], team["rows outside"]) == (8, 8)  # nobody ever has a whole layer
    assert (usual["samples"], team["samples"]) == (4, 8)  # the team computes one share together
    for other, limit in ((kept, 0.0), (second, 0.0), (copies, 1e-6), (team, 1e-6)):
        assert apart(usual, other) <= limit
    assert apart(usual, bf16) > 0.0


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = [(weight, other["state"][name]) for name, weight in one["state"].items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def two_of_three(folder: Path) -> None:
    gathering(folder, tensor_parallel=2)


def test_teams_that_ranks_cannot_be_divided_into_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="tensor_parallel=2 does not divide the 3 ranks"):
        run_ranks(3, two_of_three, tmp_path)


def chosen(folder: Path) -> list[tuple[str, bool]]:
    """What auto picks where the state takes 80 bytes, with plenty of memory and with little."""
    found = []
    for free in (1e6, 100.0):
        with pytest.MonkeyPatch.context() as patch:
            memory = SimpleNamespace(available=2 * free, total=2**40)
            patch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
            manager = manager_for(folder, training_mode="auto", batch_size=4, max_steps=2)
            manager.fit(line, points(), loss_fn=squares)
        split = hasattr(next(manager.model.parameters()), "to_local")
        found.append((manager.config.training_mode.value, split))
    return found


def test_auto_shards_what_does_not_fit_and_nothing_else(tmp_path: Path) -> None:
    assert run_ranks(1, chosen, tmp_path)[0] == [("single", False)] * 2
    fits, too_large = run_ranks(2, chosen, tmp_path)[0]
    assert fits == ("distributed_data_parallel", False)
    assert too_large == ("fully_sharded", True)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fp16_compression": True}, "drop fp16_compression"),
        ({"static_graph": True}, "static_graph"),
        ({"balance": "measured"}, "give share_weights"),
        ({"ema_decay": 0.99}, "average whole weights"),
        ({"mixed_precision_dtype": "fp16"}, "use bf16"),
        ({"fsdp_gather_dtype": "bf16"}, "needs use_mixed_precision=true"),
        ({"tensor_parallel": 2, "fsdp_copy_size": 2}, "cannot be combined"),
        ({"training_mode": "auto", "tensor_parallel": 2}, "tensor_parallel: only for"),
        ({"training_mode": "ddp", "fsdp_reshard": False}, "only for training_mode=fully_sharded"),
    ],
)
def test_settings_that_sharding_cannot_follow_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        MultiGPUConfig(**{"training_mode": "fsdp", **settings})
