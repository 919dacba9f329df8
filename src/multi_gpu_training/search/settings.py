"""Everything that a search was asked for, kept beside it so that `--resume` needs no flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from multi_gpu_training.config import MultiGPUConfig, unknown_key
from multi_gpu_training.config_file import storable
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.redaction import HIDDEN
from multi_gpu_training.safe_files import read_yaml, write_atomically
from multi_gpu_training.safe_output import brief
from multi_gpu_training.search.objectives import SearchObjective, read_objective
from multi_gpu_training.search.space import Parameter, read_space
from multi_gpu_training.search.study import MEMORY, study_problems

FILE = "search.yaml"
MOST_TRIALS = 10**6
# Those that a resumed search may change.
CHANGEABLE = {
    *("trials", "parallel", "trial_timeout", "hang_timeout", "repeat_best", "seeds", "storage"),
    *("price",),
}


class SearchSettings(BaseModel):
    """One search. `target` is a recipe or a script; empty: a Python function."""

    model_config = ConfigDict(extra="forbid")

    target: str = ""
    words: list[str] = Field([], description="arguments of a script")
    settings: dict[str, Any] = Field({}, description="what every trial of a recipe is set to")
    params: dict[str, Any]
    metric: list[str] = ["val/loss"]
    trials: int = Field(20, ge=1, le=MOST_TRIALS)
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = Field(0, ge=0, lt=2**31)
    storage: str | None = None
    parallel: int | None = Field(None, ge=1, le=1024)
    gpus_per_trial: int = Field(1, ge=1, le=1024)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    value: Literal["last", "best"] = "last"
    trial_timeout: float | None = Field(None, gt=0)
    hang_timeout: float = Field(1800.0, gt=0)
    repeat_best: int = Field(0, ge=0, le=1000)
    seeds: int = Field(0, ge=0, le=1000)
    price: float | None = Field(None, gt=0, description="of a GPU and hour")

    @property
    def is_script(self) -> bool:
        return self.target.endswith(".py")

    def space(self) -> list[Parameter]:
        return read_space(self.params)

    def objectives(self) -> list[SearchObjective]:
        return [read_objective(text) for text in self.metric]

    def grid_size(self) -> int:
        return math.prod(len(one.grid()) for one in self.space())

    def check(self) -> None:
        """Raise one ConfigError with everything that would fail later."""
        problems: list[str] = []
        space = _gather(self.space, problems) or []
        objectives = _gather(self.objectives, problems) or []
        problems += study_problems(self.sampler, self.pruner, objectives, space)
        if self.sampler == "grid" and space:
            _gather(self.grid_size, problems)
        if not self.metric:
            problems.append("a search needs a --metric, such as val/loss")
        if (self.repeat_best > 0) != (self.seeds > 0):
            problems.append(
                "--repeat-best K and --seeds N belong together: the K best, each with N seeds"
            )
        if self.repeat_best and len(self.metric) > 1:
            problems.append("--repeat-best needs one --metric, by which trials are best")
        if self.target and self.storage == MEMORY:
            problems.append(
                "--storage memory would lose the search with this process; leave it out, or give "
                "a URL such as sqlite:///study.db"
            )
        if not problems and self.target:
            problems += self.target_problems(space)
        if problems:
            raise ConfigError(problems)

    def target_problems(self, space: list[Parameter]) -> list[str]:
        """What the recipe or script would refuse."""
        fixed = [one.name for one in space if one.name in self.settings]
        problems = [
            f"{name} is both fixed ({name}={brief(self.settings[name])}) and searched (--param "
            f"{name}); drop one"
            for name in fixed
        ]
        if problems:
            return problems
        if not self.is_script and self.target not in RECIPES:
            return [f"{brief(self.target)} is neither a recipe nor a script; `mgt recipes`"]
        for one in space:
            for value in one.extremes():
                try:
                    self.try_value({one.name: value})
                except ConfigError as error:
                    problems += [f"--param {one.name}={one.words}: {p}" for p in error.problems[:1]]
                    break
        return problems

    def try_value(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError where the recipe, or the config of a script, refuses the values."""
        if self.is_script:
            known = list(MultiGPUConfig.model_fields)
            for name in values:
                if name not in known:
                    raise ConfigError(
                        f"{unknown_key(name, known)}; a script reads a trial's values as fields of "
                        "its MultiGPUConfig, so only those can be searched"
                    )
            MultiGPUConfig(**values)
            return
        from multi_gpu_training.config_file import split
        from multi_gpu_training.recipes.recipe import find_recipe

        recipe = find_recipe(self.target)
        fields, own = split({**self.settings, **values}, recipe.options.model_fields)
        try:
            options = recipe.options(**own)
        except ValidationError as error:
            found = error.errors()[0]
            raise ConfigError(f"{brief(found['input'])}: {found['msg'].lower()}") from None
        recipe.config(fields, options)

    def save(self, folder: Path) -> None:
        kept = storable(self.model_dump())
        # A password in the storage's URL is not for a file; --resume asks for it again.
        write_atomically(folder / FILE, yaml.safe_dump(kept, sort_keys=False))

    @classmethod
    def load(cls, folder: Path, **changes: Any) -> SearchSettings:
        """The settings of a search that `--resume` continues, with what may change."""
        try:
            found = read_yaml(folder / FILE)
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} holds no search ({FILE} is missing); give the folder of one, or start "
                "without --resume"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / FILE} cannot be read: {error}") from None
        changes = {name: value for name, value in changes.items() if value is not None}
        refused = [n for n in changes if n not in CHANGEABLE and found.get(n) != changes[n]]
        if refused:
            raise ConfigError(
                [
                    f"--{name.replace('_', '-')} {brief(changes[name])} would make it another "
                    f"search (it has {brief(found.get(name))}); drop it, or choose another --study"
                    for name in refused
                ]
            )
        settings = read_settings({**found, **changes})
        if HIDDEN in (settings.storage or ""):
            raise ConfigError(
                "the storage's URL holds a password, which is not kept; give --storage again"
            )
        return settings


def read_settings(given: Mapping[str, Any]) -> SearchSettings:
    """Check each setting alone; all problems are reported together."""
    known = list(SearchSettings.model_fields)
    unknown = [unknown_key(str(name), known) for name in given if name not in known]
    if unknown:
        raise ConfigError(unknown)
    if not given.get("params"):
        read_space({})
    try:
        return SearchSettings(**given)
    except ValidationError as error:
        raise ConfigError(
            [
                f"--{str(e['loc'][0]).replace('_', '-')} {brief(e['input'])}: {e['msg'].lower()}"
                for e in error.errors()
            ]
        ) from None


def _gather(read: Callable[[], Any], problems: list[str]) -> Any:
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None
