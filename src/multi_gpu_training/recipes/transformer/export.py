"""The trained model as a folder that `from_pretrained` loads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.recipes.hugging_face import no_progress_bar, weights_to_keep
from multi_gpu_training.recipes.transformer.tokens import Tokens
from multi_gpu_training.training.callbacks import Callback, Run

FOLDER = "model"


@dataclass(eq=False)
class Export(Callback):
    """Writes `model/` into the run folder at the end: the best weights, config and tokenizer."""

    tokens: Tokens
    text: str

    def on_setup(self, run: Run) -> None:
        run.say(self.text)

    def on_end(self, run: Run) -> None:
        if not run.placement.is_main or sys.exception() is not None:
            return  # a run that failed or was stopped leaves its checkpoints, not a result
        folder = run.folder / FOLDER
        weights, which = weights_to_keep(run)
        save(run.model, self.tokens, folder, weights)
        run.say(f"{which} weights for from_pretrained: {folder}")


def save(model: Any, tokens: Tokens, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """Write `model` with `weights`, or those it has, and its tokenizer."""
    with no_progress_bar():
        model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
    tokens.save(folder)
