"""What the fields of fully sharded training change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ranks import run_ranks
from tiny import FEATURES, line, manager_for, points, squares
from torch import Tensor, nn

from multi_gpu_training import ConfigError, MultiGPUConfig


def gathering(folder: Path, **settings: Any) -> dict[str, Any]:
    """What a loss function sees of a block's parameters while and after the block runs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["type"] = module.weight.dtype
        seen["rows inside"] = module.weight.numel()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss = squares(model, batch)
        local = getattr(model[0].weight, "to_local", lambda: model[0].weight)
        seen["rows outside"] = local().numel()
        return loss

    model[0].register_forward_hook(look)
    manager = manager_for(folder, training_mode="fsdp", batch_size=4, max_steps=2, **settings)
    manager.fit(model, points(), loss_fn=loss_fn)
    return {**seen, "state": {n: v.tolist() for n, v in manager.trainer.full_state().items()}}


def gathered_in_four_ways(folder: Path) -> list[dict[str, Any]]:
    bf16 = {"use_mixed_precision": True, "fsdp_gather_dtype": "bf16"}
    ways: list[dict[str, Any]] = [{}, {"fsdp_reshard": False}, {"fsdp_blocks": ["2"]}, bf16]
    return [gathering(folder, **way) for way in ways]


def test_fsdp_fields_say_what_is_gathered_when_and_in_which_type(tmp_path: Path) -> None:
    usual, kept, second, bf16 = run_ranks(2, gathered_in_four_ways, tmp_path)[0]
    assert (usual["rows inside"], usual["rows outside"]) == (16, 8)
    assert kept["rows outside"] == 16  # gathered once, for forward and backward
    assert second["rows outside"] == 16  # not a block of its own: gathered by the root
    assert (usual["type"], bf16["type"]) == (torch.float32, torch.bfloat16)
    assert usual["state"] == kept["state"] == second["state"] != bf16["state"]


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
        ({"training_mode": "ddp", "fsdp_reshard": False}, "only for training_mode=fully_sharded"),
    ],
)
def test_settings_that_sharding_cannot_follow_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        MultiGPUConfig(**{"training_mode": "fsdp", **settings})
