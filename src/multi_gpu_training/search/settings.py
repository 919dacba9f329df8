"""Everything that a search was asked for, kept beside it so that `--resume` needs no flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from multi_gpu_training.config import MultiGPUConfig, unknown_key
from multi_gpu_training.config_fields import truth_for_number
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
    *("price", "trials_per_gpu", "ray_address"),
}


# What a run that continues another one's checkpoint may change.
CONTINUED = ("learning_rate", "weight_decay", "max_grad_norm", "max_grad_value")
# With pbt the search itself says how long a trial trains and how its rate moves.
OF_POPULATIONS = {"schedule": "constant", "warmup_epochs": 0.0, "warmup_steps": 0}


class SearchSettings(BaseModel):
    """One search. `target` is a recipe or a script; empty: a Python function."""

    model_config = ConfigDict(extra="forbid")

    target: str = ""
    words: list[str] = Field([], description="arguments of a script")
    study: str | None = Field(None, description="its name in the storage; default: the folder's")
    working_dir: str | None = Field(None, description="of the trials; default: where it began")
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
    trials_per_gpu: int = Field(1, ge=1, le=64)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: str = "local"
    ray_address: str | None = None
    value: Literal["last", "best"] = "last"
    trial_timeout: float | None = Field(None, gt=0)
    hang_timeout: float = Field(1800.0, gt=0)
    repeat_best: int = Field(0, ge=0, le=1000)
    seeds: int = Field(0, ge=0, le=1000)
    price: float | None = Field(None, gt=0, allow_inf_nan=False, description="of a GPU and hour")
    population: int = Field(5, ge=2, le=1000, description="pbt: members")
    generation_epochs: int = Field(1, ge=1, le=10**6, description="pbt: epochs of a generation")

    _not_truth = field_validator("*", mode="before")(truth_for_number)

    @property
    def is_script(self) -> bool:
        return self.target.endswith(".py")

    def trials_dir(self) -> Path:
        """Where relative paths of the trials begin, also for a resumed search."""
        kept = Path(self.working_dir or ".").absolute()
        return kept if kept.is_dir() else Path.cwd()

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
        if self.repeat_best and not self.target:
            problems.append(
                "--repeat-best trains runs with other seeds, and a function takes none; give a "
                "recipe or a script, or drop it"
            )
        if self.repeat_best and len(self.metric) > 1:
            problems.append("--repeat-best needs one --metric, by which trials are best")
        problems += self.engine_problems()
        if self.trials_per_gpu > 1 and self.gpus_per_trial > 1:
            problems.append(
                f"--trials-per-gpu {self.trials_per_gpu} and --gpus-per-trial "
                f"{self.gpus_per_trial} contradict each other; drop one"
            )
        if self.target and self.storage == MEMORY:
            problems.append(
                "--storage memory would lose the search with this process; leave it out, or give "
                "a URL such as sqlite:///study.db"
            )
        if self.sampler == "pbt":
            problems += self.population_problems(space)
        else:
            useless = {"population", "generation_epochs"} & self.model_fields_set
            problems += [
                f"--{name.replace('_', '-')} is for --sampler pbt; add that, or drop it"
                for name in sorted(useless)
                if getattr(self, name) != type(self).model_fields[name].default
            ]
        problems += [
            f"--metric {brief(text)}: a name has no comma; give --metric again for each"
            for text in self.metric
            if "," in text
        ]
        if self.storage == "":
            problems.append("--storage '' is empty; give a URL, or leave it out for SQLite")
        if not problems and self.target:
            problems += self.target_problems(space)
        if problems:
            raise ConfigError(problems)

    def engine_problems(self) -> list[str]:
        """What the trials' engine cannot do."""
        if self.engine == "slurm":
            return [
                "--engine slurm: a job would outlive a search that is killed, and train its trial "
                "twice; use --engine ray, or start the search inside an allocation (salloc)"
            ]
        if self.engine not in ("local", "ray"):
            return [f"--engine {brief(self.engine)}: trials run with local or ray"]
        if self.engine == "local":
            given = self.ray_address is not None
            return ["--ray-address belongs to --engine ray; add that, or drop it"] if given else []
        if not self.target:
            return ["--engine ray starts runs, and a function is none; give a recipe or a script"]
        if self.parallel is None or self.trials_per_gpu > 1:
            return [
                "--engine ray: say with --parallel how many trials Ray is given at a time, each "
                "with --gpus-per-trial ranks; Ray places them, so drop --trials-per-gpu"
            ]
        return []

    def population_problems(self, space: list[Parameter]) -> list[str]:
        """What keeps runs from continuing one another's checkpoints."""
        problems = []
        size, trials = self.population, self.trials
        if not self.target:
            problems.append(
                "--sampler pbt continues runs from checkpoints, and a function has none; give a "
                "recipe or a script, or use --sampler tpe"
            )
        if trials % size or trials < 2 * size:
            problems.append(
                f"--trials {trials} with --population {size}: give a multiple of the population, "
                f"at least {2 * size}; each multiple is a generation"
            )
        fixed = [one.name for one in space if one.name not in CONTINUED]
        if fixed:
            problems.append(
                f"--param {', '.join(fixed)}: a run that continues another's weights cannot change "
                f"it; with --sampler pbt search {', '.join(CONTINUED)}"
            )
        set_here = [
            name for name in (*OF_POPULATIONS, "epochs", "max_steps") if name in self.settings
        ]
        if set_here:
            problems.append(
                f"{', '.join(set_here)}: with --sampler pbt a trial trains --generation-epochs "
                "epochs at a constant rate; drop it"
            )
        if self.repeat_best:
            problems.append(
                "--repeat-best trains one trial's values from the start, and a member of a "
                "population has had several; drop it, or use --sampler tpe"
            )
        return problems

    def of_trial(self, number: int) -> dict[str, Any]:
        """Settings of one trial beside its suggested values."""
        if self.sampler != "pbt":
            return {}
        generation = number // self.population
        return {**OF_POPULATIONS, "epochs": (generation + 1) * self.generation_epochs}

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
        if self.is_script and not (self.trials_dir() / self.target).is_file():
            return [f"{brief(self.target)}: no such file in {self.trials_dir()}"]
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
        try:
            self.trial_config(values)
        except ValidationError as error:
            found = error.errors()[0]
            raise ConfigError(f"{brief(found['input'])}: {found['msg'].lower()}") from None

    def trial_config(self, values: Mapping[str, Any]) -> MultiGPUConfig:
        """The config of a trial; of a script only what the search knows of it."""
        if self.is_script:
            return MultiGPUConfig(**values)
        from multi_gpu_training.config_file import split
        from multi_gpu_training.recipes.recipe import find_recipe

        recipe = find_recipe(self.target)
        fields, own = split({**self.settings, **values}, recipe.options.model_fields)
        return recipe.config(fields, recipe.options(**own))

    def batch_of(self, values: Mapping[str, Any]) -> dict[str, int]:
        """What keeps the global batch of a recipe's trial on any number of GPUs."""
        from multi_gpu_training.data.feeding import batch_sizes
        from multi_gpu_training.recipes.recipe import find_recipe

        config = self.trial_config(values)
        if find_recipe(self.target).build is None or config.global_batch_size is not None:
            return {}
        sizes = batch_sizes(config, self.gpus_per_trial)
        return {"batch_size": sizes.per_rank, "global_batch_size": sizes.global_batch}

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
                "without --resume",
                code="MGT104",
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / FILE} cannot be read: {error}") from None
        changes = {name: plain(value) for name, value in changes.items() if value is not None}
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
    given = plain(given)
    known = list(SearchSettings.model_fields)
    unknown = [unknown_key(str(name), known) for name in given if name not in known]
    if unknown:
        raise ConfigError(unknown, code="MGT102")
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


def plain(value: Any) -> Any:
    """As a YAML file has it: lists for tuples and arrays, text for paths."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    # NumPy's numbers and arrays, and tensors; np.float64 is a float, but YAML cannot write it.
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _gather(read: Callable[[], Any], problems: list[str]) -> Any:
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None
