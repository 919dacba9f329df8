"""`mgt train`: from flags and files to a config, and from there to a recipe."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from multi_gpu_training.cli.resumed_run import (
    resume_line,
    run_settings,
    saved_settings,
    taken_settings,
    threads_before,
)
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.config_file import (
    flatten,
    merge,
    read_config_file,
    read_override,
    ready_configs,
    split,
)
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.run_places import path_problem
from multi_gpu_training.safe_output import brief


@dataclass(frozen=True)
class TrainFlags:
    """What the command line said; None where it said nothing."""

    target: str
    num_gpus: int | None
    settings: Mapping[str, Any]
    hosts: Mapping[str, Any]
    extra: list[str]
    run: str | None = None  # of `mgt resume RUN`


def train(flags: TrainFlags) -> None:
    recipe, config, options = resolve(flags)
    # These import torch: what is wrong with the flags was said a second before.
    from multi_gpu_training.launch.engine import FINDS_NODES, Hosts
    from multi_gpu_training.launch.launcher import start_ranks_if_needed
    from multi_gpu_training.measure.request import request_of_this_process

    if flags.hosts.get("engine") in FINDS_NODES:
        _submit(config, flags)
    # A command that measures has started the ranks it wants.
    if request_of_this_process() is None:
        hosts = Hosts.from_environment(**flags.hosts, ranks_here=_ranks_here(config, flags))
        start_ranks_if_needed(config, hosts)
        _choose_threads(config)
    recipe.train(config, options)


def _submit(config: MultiGPUConfig, flags: TrainFlags) -> NoReturn:
    """Hand the training to the cluster's scheduler, and exit with its code."""
    from multi_gpu_training.cli.engine_options import rank_command
    from multi_gpu_training.launch.engine import Hosts, LaunchPlan
    from multi_gpu_training.launch.launcher import ranks_per_node, supervise

    hosts, ranks = Hosts.from_environment(**flags.hosts), ranks_per_node(flags.num_gpus)
    mode, world = config.training_mode, config.world_size
    if not mode.has_ranks:
        if hosts.nodes > 1:
            raise ConfigError(
                f"--multi-gpu {mode} trains on one node, and --nodes {hosts.nodes} was asked for; "
                "use ddp or fsdp"
            )
        if mode is TrainingMode.DATA_PARALLEL and hosts.engine != "slurm":
            raise ConfigError(
                f"--multi-gpu {mode} uses several GPUs in one process, and --engine {hosts.engine} "
                "gives each process one; use ddp or fsdp"
            )
        ranks = 1
    elif world is not None and not ranks:
        if hosts.elastic or world % hosts.nodes:
            raise ConfigError(
                f"world_size={world} does not divide over --nodes "
                f"{flags.hosts.get('nodes') or hosts.nodes}; drop it, or give ranks per node with "
                "--num-gpus",
                code="MGT202",
            )
        ranks = world // hosts.nodes
    again = (config.allowed_restarts, config.recovery_timeout, config.restart_window_s)
    sys.exit(supervise(rank_command(), LaunchPlan(ranks, hosts, *again)))


def _choose_threads(config: MultiGPUConfig) -> None:
    """Threads of this process, where it trains alone on the CPU: ranks share the cores."""
    from multi_gpu_training.accelerator import choose
    from multi_gpu_training.distributed.identity import from_environment
    from multi_gpu_training.launch.cpu_threads import choose_threads

    if from_environment() is not None or choose(config.device) != "cpu":
        return
    line = choose_threads(threads_before(config), config.deterministic)
    if line is not None and config.progress != "off":
        print(line, flush=True)


def resolve(flags: TrainFlags) -> tuple[Any, MultiGPUConfig, Any]:
    """The recipe, its config and its options. Flags win over the file, the file over defaults."""
    from multi_gpu_training.recipes import RECIPES

    values: dict[str, Any] = {}
    given = {key: value for key, value in flags.settings.items() if value is not None}
    if "gpu_ids" in given:
        given["gpu_ids"] = _gpu_ids(given["gpu_ids"])
    said = dict(given)
    for key, value in extra_settings(flags.extra):
        if key in said and said[key] != value:
            flag = f"--{key.replace('_', '-')} {brief(said[key])}"
            raise ConfigError(f"{flag} and {key}={brief(value)} contradict each other; give one")
        given[key] = value
    name = flags.target
    if flags.run is not None:
        asked = run_settings(flags.run)
        name, given = asked.pop("recipe"), {**given, **asked}
        if name not in RECIPES:
            raise ConfigError(
                f"mgt resume {brief(flags.run)}: a script made this run; start the script again, "
                "with resume='auto' in its MultiGPUConfig"
            )
    elif name not in RECIPES and _is_config(name):
        values = read_config_file(name)
        name = given.pop("recipe", values.pop("recipe", None))
        if name is None:
            raise ConfigError(
                f"{flags.target} names no recipe; add `recipe: image` to it or `recipe=image` "
                f"here (there are {', '.join(RECIPES)})",
                code="MGT103",
            )
    elif given.get("recipe", name) != name:
        raise ConfigError(f"recipe={brief(given['recipe'])} contradicts {name!r}; drop one of them")
    merged = merge(flatten(values), flatten(given))
    # The paths of a pod are those of its image.
    here = flags.hosts.get("engine") != "kubernetes"
    if (
        here and isinstance(name, str) and name in RECIPES
    ):  # else the next line says which there are
        check_data_dir(merged.get("data_dir"), name)
    from multi_gpu_training.recipes.recipe import find_recipe

    recipe = find_recipe(name)
    fields, own = split(merged, recipe.options.model_fields)
    if "resume" in fields:
        merged = _with_saved(recipe, fields, own, flags)
        check_data_dir(merged.get("data_dir"), name)
        fields, own = split(merged, recipe.options.model_fields)
    mode = _mode(fields)
    _place(fields, mode, flags)
    options = _options(recipe.options, own)
    return recipe, recipe.config(fields, options), options


def _with_saved(
    recipe: Any, fields: dict[str, Any], own: dict[str, Any], flags: TrainFlags
) -> dict[str, Any]:
    """The settings with those of the run that they resume below them."""
    from multi_gpu_training.distributed.identity import from_environment
    from multi_gpu_training.launch.engine import Hosts

    given = {**fields, **own}
    hosts, identity = Hosts.from_environment(**flags.hosts), from_environment()
    several = hosts.nodes > 1 or hosts.elastic or (identity and identity.on_several_hosts)
    if several and flags.run is None:
        return given  # a machine that has not got the folder would train with other settings
    found = saved_settings(recipe.config(fields, _options(recipe.options, own)))
    if found is None:
        return given
    folder, saved = found
    asked = {**given, **({} if flags.num_gpus is None else {"num_gpus": flags.num_gpus})}
    taken = taken_settings(recipe, saved, asked)
    # Where our launcher started this rank, the launcher has said it already.
    ours = "multi_gpu_training.launch.rank_main" in sys.orig_argv
    if identity is None or (identity.rank == 0 and identity.attempt == 0 and not ours):
        print(resume_line(folder, taken), flush=True)
    return {**taken, **given}


def check_data_dir(given: Any, recipe: str) -> None:
    """Refuse data that are not there, before torch is imported."""
    if not isinstance(given, str) or path_problem(given) is not None:
        return  # the recipe's options say what is wrong with it
    path = Path(given).expanduser()
    close: list[str] = []
    try:
        if path.is_dir() and not any(path.iterdir()):
            problem = "is an empty folder"
        elif path.exists():
            return
        else:
            problem = f"does not exist (looked at {path.absolute()})"
            names = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
            close = difflib.get_close_matches(path.name, names, n=1)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    from multi_gpu_training.recipes.option_schemas import option_schemas

    wanted = option_schemas()[recipe]["data_dir"]["description"].partition(";")[0]
    hint = f"did you mean {str(path.with_name(close[0]))!r}?" if close else f"set it to a {wanted}"
    raise DataError(f"data_dir={given!r} {problem}; {hint}", code="MGT301")


def _is_config(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or Path(name).exists() or name in ready_configs()


def extra_settings(words: list[str]) -> list[tuple[str, Any]]:
    """`key=value`, `--key value`, `--key=value` and `--switch` as settings."""
    found = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            found.append(read_override(word))
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        found.append(read_override(f"{name.replace('-', '_')}={value}"))
    return found


def _mode(fields: Mapping[str, Any]) -> TrainingMode:
    asked = fields.get("training_mode", TrainingMode.DISTRIBUTED_DATA_PARALLEL)
    try:
        return TrainingMode(asked)
    except ValueError:
        raise ConfigError(
            f"--multi-gpu {brief(asked)} (training_mode) is unknown; use ddp, fsdp, dp or single"
        ) from None


def _place(fields: dict[str, Any], mode: TrainingMode, flags: TrainFlags) -> None:
    """Ranks and GPUs from --num-gpus and --gpu-ids, in the terms of each mode."""
    from multi_gpu_training.accelerator import choose
    from multi_gpu_training.distributed.identity import from_environment
    from multi_gpu_training.launch.engine import FINDS_NODES, Hosts
    from multi_gpu_training.launch.launcher import available_gpus, ranks_for

    engine = flags.hosts.get("engine")
    if engine in FINDS_NODES:  # what this machine has does not matter
        if fields.get("device_ids") is not None:
            flag = "--num-gpus" if engine == "ray" else "--gpus-per-node"
            raise ConfigError(
                f"--gpu-ids (device_ids) with --engine {engine}: the cluster chooses the GPUs; use "
                f"{flag} N"
            )
        return
    device = str(fields.get("device", "auto"))
    gpus = available_gpus() if device != "cpu" else 0
    ids = fields.get("device_ids")
    if ids is not None:
        _check_gpu_ids(ids, gpus, mode, bool(fields.get("share_gpu")))
    asked = flags.num_gpus if flags.num_gpus is not None else -1
    count = ranks_for(asked, bool(fields.get("share_gpu")), ids, device)
    hosts = Hosts.from_environment(**flags.hosts)
    nodes = hosts.nodes
    if mode.has_ranks and not hosts.elastic:
        if flags.num_gpus is not None and flags.num_gpus != -1:
            fields["world_size"] = count * nodes
        elif from_environment() is None and not gpus and "world_size" not in fields:
            # Two CPU ranks show what many GPUs would do; mps and xpu are one device.
            alone = device in ("mps", "xpu") or (device == "auto" and choose("auto") != "cpu")
            fields["world_size"] = (1 if alone else 2) * nodes
    elif mode is TrainingMode.SINGLE and asked not in (-1, 1):
        raise ConfigError(
            f"--num-gpus {asked} asks for several processes, and training_mode=single (of the "
            "command line, the config or the resumed run) is one; add --multi-gpu ddp, or drop "
            "--num-gpus"
        )
    elif mode is TrainingMode.DATA_PARALLEL and gpus and ids is None:
        fields["device_ids"] = list(range(count))


def _ranks_here(config: MultiGPUConfig, flags: TrainFlags) -> int | None:
    """Ranks of this machine in a run whose world may change; else the config says how many."""
    from multi_gpu_training.launch.engine import Hosts
    from multi_gpu_training.launch.launcher import available_gpus, ranks_for

    if not Hosts.from_environment(**flags.hosts).elastic:
        return None
    gpus = available_gpus() if config.device != "cpu" else 0
    asked = flags.num_gpus if flags.num_gpus is not None else -1
    if asked == -1 and not gpus:
        return 2  # two CPU ranks show what many GPUs would do
    return ranks_for(asked, config.share_gpu, config.device_ids, config.device)


def _gpu_ids(text: Any) -> list[int]:
    try:
        return [int(part) for part in str(text).split(",")]
    except ValueError:
        raise ConfigError(f"--gpu-ids {str(text)[:80]}: use numbers like 0,1,3") from None


def _check_gpu_ids(ids: list[int], gpus: int, mode: TrainingMode, share: bool) -> None:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        return  # MultiGPUConfig says what it must be
    missing = [i for i in ids if i >= gpus or i < 0]
    if missing:
        there = f"{gpus} GPUs, numbered from 0" if gpus else "no GPU"
        raise ConfigError(
            f"--gpu-ids {','.join(map(str, ids))} (device_ids): {missing} not there; this machine "
            f"shows {there} (inside CUDA_VISIBLE_DEVICES)",
            code="MGT201",
        )
    if len(set(ids)) != len(ids) and not share and mode is not TrainingMode.DATA_PARALLEL:
        raise ConfigError(
            f"--gpu-ids {','.join(map(str, ids))} repeats a GPU; name each once, or add "
            "--share-gpu to test several ranks on one",
            code="MGT201",
        )


def _options(kind: Any, values: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(
            [
                f"{'.'.join(map(str, e['loc']))}={brief(e['input'])}: {e['msg'].lower()}"
                for e in error.errors()
            ]
        ) from None
