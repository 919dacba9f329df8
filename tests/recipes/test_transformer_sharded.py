"""The transformer recipe with its parameters split over the ranks, and with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quiet_recipe import find_recipe
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

pytestmark = pytest.mark.engines
# Float32; AdamW turns what rounding leaves of a key bias's gradient, which is zero, into steps.
LIMIT = 1e-4


def train(folder: Path, mode: str, name: str, options: dict[str, Any]) -> None:
    """Four steps of the recipe."""
    recipe = find_recipe("transformer")
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    given = recipe.options(data_dir=str(texts), sequence_length=32, **options)
    config = recipe.config(
        {
            "training_mode": mode, "global_batch_size": 8, "max_steps": 4, "epochs": 1,
            "device": "cpu", "progress": "off", "tensorboard": False, "save_dir": str(folder),
            "run_name": name, "use_mixed_precision": False,
        }
    )  # fmt: skip
    recipe.train(config, given)


def trained(
    ranks: int, folder: Path, mode: str, name: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """The weights that such a training exports."""
    run_ranks(ranks, train, folder, mode, name, options)
    (weights,) = (folder / "transformer" / name / "model").glob("*.safetensors")
    assert weights.name.startswith("adapter") == ("lora_rank" in options)
    return load_file(weights)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_sharded_ranks_train_the_recipe_and_stream_what_it_wrote(tmp_path: Path) -> None:
    alone = trained(1, tmp_path, "single", "alone", {})
    sharded = trained(2, tmp_path, "fsdp", "sharded", {})
    assert apart(alone, sharded) < LIMIT
    model = {"model": str(tmp_path / "transformer" / "alone" / "model")}
    again = trained(1, tmp_path, "single", "alone again", model)
    assert apart(again, trained(2, tmp_path, "fsdp", "streamed", model)) < LIMIT
    assert apart(again, alone) > 10 * LIMIT


def test_adapters_alone_are_trained_and_written(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    lora = {"lora_rank": 2, "lora_targets": "c_attn"}
    alone = trained(1, tmp_path, "single", "alone", lora)
    assert all("lora_" in name for name in alone)
    assert sum(tensor.abs().sum() for name, tensor in alone.items() if "lora_B" in name) > 0
    assert apart(alone, trained(2, tmp_path, "fsdp", "sharded", lora)) < LIMIT
