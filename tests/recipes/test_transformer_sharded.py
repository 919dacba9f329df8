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


def train(folder: Path, mode: str, name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Four steps of the recipe; returns the weights that it exports."""
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
    result = recipe.train(config, given)
    (weights,) = (result.folder / "model").glob("*.safetensors")
    assert weights.name.startswith("adapter") == ("lora_rank" in options)
    return load_file(weights)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_sharded_ranks_train_the_recipe_and_stream_what_it_wrote(tmp_path: Path) -> None:
    alone = train(tmp_path, "single", "alone", {})
    sharded = run_ranks(2, train, tmp_path, "fsdp", "sharded", {})[0]
    assert apart(alone, sharded) < LIMIT
    model = {"model": str(tmp_path / "transformer" / "alone" / "model")}
    again = train(tmp_path, "single", "alone again", model)
    assert apart(again, run_ranks(2, train, tmp_path, "fsdp", "streamed", model)[0]) < LIMIT
    assert apart(again, alone) > 10 * LIMIT


def test_adapters_alone_are_trained_and_written(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    lora = {"lora_rank": 2, "lora_targets": "c_attn"}
    alone = train(tmp_path, "single", "alone", lora)
    assert all("lora_" in name for name in alone)
    assert sum(tensor.abs().sum() for name, tensor in alone.items() if "lora_B" in name) > 0
    assert apart(alone, run_ranks(2, train, tmp_path, "fsdp", "sharded", lora)[0]) < LIMIT
