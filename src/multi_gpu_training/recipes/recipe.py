"""What a recipe is, and how one is found and run."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from torch import nn

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode, truth_for_number
from multi_gpu_training.data.order import seed_everything
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.run_places import path_problem
from multi_gpu_training.safe_output import brief
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.progress import FitResult

MOST_OPTION = 2**40
PATHS = ("data_dir", "cache_dir", "annotations")


class Options(BaseModel):
    """Settings of one recipe alone, beside those of MultiGPUConfig."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    _not_truth = field_validator("*", mode="before")(truth_for_number)

    @field_validator("*", mode="before")
    @classmethod
    def _is_possible(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse numbers and texts that can only overflow somewhere later."""
        if isinstance(value, int) and abs(value) > MOST_OPTION:
            raise ValueError(f"use at most {MOST_OPTION:,}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("it holds a NUL character")
        problem = None
        if isinstance(value, str) and info.field_name in PATHS:
            problem = path_problem(value)
        if problem is not None:
            raise ValueError(problem)
        return value


@dataclass(frozen=True)
class Job:
    """A recipe's model, data, loss and metrics: the arguments of `MultiGPUTrainingManager.fit`.

    description: what the recipe's `Pipeline` rebuilds and feeds the model from.
    """

    model: nn.Module
    dataset: Any
    val_dataset: Any = None
    loss_fn: Any = None
    optimizer: Any = None
    scheduler: Any = None
    eval_fn: Any = None
    augment: Any = None
    callbacks: Sequence[Callback] = ()
    states: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] | None = None


class Announce(Callback):
    """Shows lines about the recipe's data before training."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def on_setup(self, run: Run) -> None:
        for line in self.lines:
            run.say(line)


@dataclass(frozen=True)
class Recipe:
    """A training by name.

    `defaults` are the MultiGPUConfig fields that it sets where the user does not, `defaults_for`
    those that depend on the recipe's own options. `build` makes the job; it is called on every
    rank, with torch's generators seeded alike. A training that `fit` does not describe, because
    it makes its own data, brings `run` instead: its own loop around `manager.setup_training` and
    `manager.trainer.train_step`.
    """

    name: str
    defaults: Mapping[str, Any]
    options: type[Options]
    build: Callable[[MultiGPUConfig, Any], Job] | None = None
    run: Callable[[MultiGPUTrainingManager, Any], FitResult] | None = None
    defaults_for: Callable[[Any], Mapping[str, Any]] = lambda options: {}

    def __post_init__(self) -> None:
        if (self.build is None) == (self.run is None):
            raise ConfigError(f"recipe {self.name!r} needs either `build` or `run`")

    def config(self, given: Mapping[str, Any], options: Options | None = None) -> MultiGPUConfig:
        chosen = self.defaults_for(options if options is not None else self.options())
        defaults = {**self.defaults, **chosen, "recipe": self.name}
        # Two ways to say one thing: what the user says replaces the recipe's other way.
        for one, other in (("warmup_epochs", "warmup_steps"), ("batch_size", "global_batch_size")):
            if one in given:
                defaults.pop(other, None)
            if other in given:
                defaults.pop(one, None)
        # A warm-up that the user asks for stays as it is; the recipe's gives way to a short run.
        if not {"warmup_epochs", "warmup_steps"} & given.keys():
            defaults["warmup_max_share"] = 0.1
        if given.get("training_mode") in ("dp", TrainingMode.DATA_PARALLEL):
            defaults.pop("sync_bn", None)  # a default must not stand in the way of a mode
        return MultiGPUConfig(**{**defaults, **given})

    def train(self, config: MultiGPUConfig, options: Options) -> FitResult:
        """Run the recipe on all ranks."""
        manager = MultiGPUTrainingManager(config)
        manager.recipe_options = options.model_dump()
        # Every rank builds the same model and data.
        seed_everything(config.seed)
        torch.manual_seed(config.seed)
        if self.run is not None:
            return self.run(manager, options)
        assert self.build is not None
        try:
            job = self.build(config, options)
        except OSError as error:  # data that cannot be read, in a place where nobody expected it
            if error.strerror is None:
                raise
            raise DataError(
                f"{error.filename or 'data'} cannot be read: {error.strerror}"
            ) from error
        manager.recipe_options = options.model_dump()  # with what it chose for itself
        return manager.fit(**vars(job))


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; each lives in recipes/<name>/ and exports `recipe`."""
    if not isinstance(name, str) or name not in RECIPES:
        name = name[:200] if isinstance(name, str) else brief(name)
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(RECIPES)}"
        raise ConfigError(f"unknown recipe {name!r}; {hint}", code="MGT102")
    module = importlib.import_module(f"multi_gpu_training.recipes.{name}")
    found: Recipe = module.recipe
    return found
