"""Train a recipe in a test's own process, without output."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from multi_gpu_training.recipes.recipe import Job, find_recipe


def train_recipe(
    name: str,
    folder: Path,
    settings: dict[str, Any],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    optimizer: Any = None,
) -> Any:
    """Metrics, weights and run folder. float64: the model and its first input are converted."""
    recipe = find_recipe(name)
    jobs: list[Job] = []

    def build(config: Any, chosen: Any) -> Job:
        job = recipe.build(config, chosen)
        if optimizer is not None:
            job = dataclasses.replace(job, optimizer=optimizer)
        if dtype is torch.float64:
            job.model.double().register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        jobs.append(job)
        return job

    quiet = {
        "device": "cpu",
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "enable_fault_tolerance": False,
    }
    chosen = recipe.options(**options)
    config = recipe.config({**quiet, **settings}, chosen)
    result = dataclasses.replace(recipe, build=build).train(config, chosen)
    weights = {name: value.detach().clone() for name, value in jobs[0].model.state_dict().items()}
    return result.metrics, weights, result.folder
