"""`mgt evaluate`: how good a trained model is, on all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multi_gpu_training.delivery.checkpoint_source import find_checkpoint
from multi_gpu_training.delivery.loaded_model import load
from multi_gpu_training.delivery.model_folder import is_model_folder
from multi_gpu_training.delivery.own_pipeline import SCRIPT_DATA
from multi_gpu_training.delivery.rank_predictions import ranks
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.safe_files import read_yaml


@dataclass(frozen=True)
class EvaluateFlags:
    run: str
    data: str | None
    part: str | None
    checkpoint: str | None
    num_gpus: int
    batch_size: int | None
    device: str
    dtype: str
    trust: bool
    as_json: bool


def evaluate(flags: EvaluateFlags) -> int:
    where = checked_source(flags.run, flags.checkpoint)
    if _is_of_a_script(Path(where)):  # before its model is missed, which would not be enough
        raise ConfigError(SCRIPT_DATA)
    with ranks(flags.num_gpus, flags.device) as placement:
        loaded = load(where, device=placement.device, trust=flags.trust, dtype=flags.dtype)
        metrics = loaded.evaluate(flags.data, flags.part, flags.batch_size, placement)
        if not placement.is_main:
            return 0
    if flags.as_json:
        facts = {"checkpoint": where, "step": loaded.step, "metrics": metrics}
        print(json.dumps(facts | {"in_training": loaded.metrics}, indent=1))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{where} (step {loaded.step})", markup=False)  # a title would break the path
    table = Table("metric", "now", "in training")
    for name, value in metrics.items():
        before = loaded.metrics.get(name) if flags.data is None else None
        table.add_row(name, f"{value:.6g}", "" if before is None else f"{before:.6g}")
    console.print(table)
    return 0


def checked_source(run: str, checkpoint: str | None) -> str:
    """The checkpoint that is meant: what is wrong with it is said before any rank is started."""
    return run if is_model_folder(Path(run)) else str(find_checkpoint(run, checkpoint))


def _is_of_a_script(checkpoint: Path) -> bool:
    if checkpoint.parent.name != "checkpoints":
        return False
    try:
        recipe = read_yaml(checkpoint.parent.parent / "config.yaml").get("recipe")
    except (OSError, ValueError):
        return False  # it was fetched without its run: loading it will tell
    return isinstance(recipe, str) and recipe not in RECIPES
