"""The trained model as a folder that `from_pretrained` loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from multi_gpu_training.recipes.transformer.model import no_progress_bar
from multi_gpu_training.recipes.transformer.tokens import Tokens
from multi_gpu_training.training.hooks import Hook
from multi_gpu_training.training.manager import MultiGPUTrainingManager

FOLDER = "model"


class Export(Hook):
    """Writes `model/` into the run folder at the end: the best weights, config and tokenizer."""

    def __init__(self, tokens: Tokens, text: str) -> None:
        self.tokens = tokens
        self.text = text

    def on_run_start(self, manager: MultiGPUTrainingManager) -> None:
        manager.console.line(self.text)

    def on_run_end(self, manager: MultiGPUTrainingManager) -> None:
        if not manager.placement.is_main or sys.exception() is not None:
            return  # a run that failed or was stopped leaves its checkpoints, not a result
        folder = manager.run.path / FOLDER
        best = manager.run.checkpoints / "best" / "model.safetensors"
        weights, which = None, "the last"
        if manager.config.enable_fault_tolerance and best.is_file():
            weights, which = load_file(best), "the best"
        save(manager.model, self.tokens, folder, weights)
        manager.console.line(f"{which} weights for from_pretrained: {folder}")


def save(model: Any, tokens: Tokens, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """Write `model` with `weights`, or those it has, and its tokenizer."""
    with no_progress_bar():
        model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
    tokens.save(folder)
