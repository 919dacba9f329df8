"""LoRA: train small matrices beside a model's frozen ones, with the peft library."""

from __future__ import annotations

import importlib
from typing import Any

from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.recipes.hugging_face import first_line
from multi_gpu_training.recipes.transformer.transformer_model import Task

_KINDS = {"causal": "CAUSAL_LM", "masked": None, "classification": "SEQ_CLS"}


def with_adapters(model: Any, task: Task, rank: int, alpha: float | None, targets: str) -> Any:
    """`model` with adapters of `rank` on its linear layers; everything else is frozen, but for a
    classifier's head. `save_pretrained` of the result writes the adapters only."""
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise ConfigError(
            f"lora_rank={rank} needs the peft library, which is not installed; run "
            "pip install peft",
            code="MGT105",
        ) from None
    names: Any = targets if targets == "all-linear" else targets.split(",")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=names,
        task_type=_KINDS[task],
        # GPT-2 keeps its matrices the other way round.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ModelError(
            f"lora_targets={targets!r}: {type(model).__name__} takes no adapters there: "
            f"{first_line(error)}"
        ) from None
