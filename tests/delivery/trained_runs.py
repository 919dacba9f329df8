"""A small trained run of each recipe, trained once per test session."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multi_gpu_training.recipes.recipe import find_recipe

SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image": ({"max_steps": 12, "batch_size": 64}, {"mode": "cnn"}),
    "video": ({"max_steps": 2, "batch_size": 16, "num_workers": 0}, {"videos": 10, "width": 4}),
    "speech": ({"max_steps": 2, "batch_size": 4}, {}),
    "transformer": ({"max_steps": 4}, {"width": 32, "sequence_length": 32}),
    "ppo": (
        {},
        {
            "env": "CartPole-v1",
            "num_envs": 4,
            "rollout_steps": 16,
            "total_steps": 128,
            "hidden": 16,
            "features": 8,
            "eval_episodes": 2,
        },
    ),
}
_kept: dict[str, Path] = {}
_folder = tempfile.TemporaryDirectory(prefix="mgt-test-delivery-")


def train(
    name: str,
    save_dir: Path | str,
    settings: dict[str, Any],
    options: dict[str, Any],
    change: Callable[[Any], Any] = lambda recipe: recipe,
) -> Path:
    """The folder of a new run."""
    quiet = {
        "device": "cpu",
        "progress": "off",
        "tensorboard": False,
        "training_mode": "single",
        "save_dir": str(save_dir),
        "run_name": "small",
    }
    recipe = find_recipe(name)
    chosen = recipe.options(**options)
    result = change(recipe).train(recipe.config({**quiet, **settings}, chosen), chosen)
    return Path(result.folder)


def run_of(name: str) -> Path:
    """The small run of that recipe. Tests must not change it."""
    if name not in _kept:
        _kept[name] = train(name, _folder.name, *SMALL[name])
    return _kept[name]
