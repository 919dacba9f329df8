"""The flags that several commands have, and what commands do with them.

Typer makes a flag of each argument of a command's function. A command with many flags hands them
on from `ctx.params`, where they stand under their names, instead of naming each once more.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, CallbackParam, Option

from multi_gpu_training.cli.engine_options import ENGINE_OPTIONS
from multi_gpu_training.cli.recipe_help import complete_target

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
NAMES = {"token_normalize_func": lambda name: name.replace("_", "-")}


def no_flag(ctx: typer.Context, word: str | None) -> str | None:
    """Flags that a command does not know belong to its recipe or script, which stands first."""
    if ctx.resilient_parsing:  # Tab was pressed
        return word
    if word is not None and word.startswith("-"):
        from multi_gpu_training.errors import ConfigError

        raise ConfigError(
            f"unknown flag {word.partition('=')[0]}; `mgt {ctx.info_name} --help` lists the flags, "
            "and those of a recipe or script come after its name",
            code="MGT101",
        )
    _check_paths(word, "")
    return word


def code_of_this_folder(trusted: bool) -> bool:
    """With --trust, find modules in the current folder, as the script did that stands there."""
    if trusted and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: no file here hides an installed package
    return trusted


def a_path(param: CallbackParam, given: Any) -> Any:
    """Refuse what no file system can have as a path; None and lists of paths are fine."""
    _check_paths(given, f"{param.opts[0]} " if param.opts[0].startswith("-") else "")
    return given


def _check_paths(given: Any, flag: str) -> None:
    from multi_gpu_training.errors import ConfigError
    from multi_gpu_training.run_places import path_problem
    from multi_gpu_training.safe_output import brief

    for path in given if isinstance(given, list) else [given]:
        problem = None if path is None else path_problem(path)
        if problem is not None:
            raise ConfigError(f"{flag}{brief(path, 80)}: {problem}")


# The headings of `--help`: an option of each stands below it.
Place = partial(Option, rich_help_panel="Where it runs")
Machines = partial(Option, rich_help_panel="Several machines")
Training = partial(Option, rich_help_panel="Training")
Prices = partial(Option, rich_help_panel="Cost")

# Flags that several commands have.
AnyTarget = partial(Argument, callback=no_flag, autocompletion=complete_target)
Target = Annotated[str, AnyTarget(metavar="[RECIPE|CONFIG|SCRIPT.py]")]
Device = Annotated[str, Option(help="auto, cpu, cuda, mps or xpu")]
Warmup = Annotated[int | None, Option(help="warm-up steps; default: 40 on GPUs, 5 on CPUs")]
AsJson = Annotated[bool, Option("--json", help="print JSON")]
TrainedRun = Annotated[
    str, Argument(metavar="RUN", help="a run folder, a checkpoint, or its URL", callback=a_path)
]
Checkpoint = Annotated[
    str | None, Option(help="best or step-N; default: the best, else the newest")
]
Dtype = Annotated[str, Option(help="float32, or bf16: half the memory, faster on GPUs")]
Trust = Annotated[
    bool,
    Option(
        "--trust",
        help="import code that the checkpoint names, also from this folder",
        callback=code_of_this_folder,
    ),
]
Ranks = Annotated[int, Option(help="-1: all; without GPUs, CPU ranks")]
WatchedRuns = Annotated[
    list[str] | None,
    Argument(metavar="[RUNS]...", help="folders or URLs; default: runs/", callback=a_path),
]
Nodes = Annotated[
    str | None, Machines("--nnodes", "--nodes", help="machines: 2, or LEAST:MOST like 1:2")
]
NodeRank = Annotated[int | None, Machines()]
MasterAddr = Annotated[str | None, Machines()]
ClusterToken = Annotated[
    str | None,
    Machines(help="file made by `mgt cluster token`, the same everywhere", callback=a_path),
]
InsecureNetwork = Annotated[
    bool, Machines("--insecure-network", help="no token: trust the network")
]
EngineName = Annotated[
    str | None,
    Machines(help="local, torchrun, elastic, slurm, ray or kubernetes"),
]
RayAddress = Annotated[str | None, Machines(help="for --engine ray: auto, or HOST:PORT")]
RayOptions = Annotated[
    str | None, Machines(help="cpus_per_rank=N,gpus_per_rank=0|1,working_dir=FOLDER")
]
MACHINES = ("nnodes", "node_rank", "master_addr", "master_port", "engine")
# Flags that belong to one engine.
OF_ENGINES: tuple[str, ...] = (
    *(*ENGINE_OPTIONS, "ray_address", "ray_options"),
    *("witness", "allow_minority"),
)
WITNESS_HELP = (
    "HOST:PORT of `mgt cluster witness`, or a file that all machines share: decides who continues"
)
MINORITY_HELP = (
    "continue with half of the machines or fewer, even if the others still train the same run"
)
WitnessPlace = Annotated[str | None, Machines(help=WITNESS_HELP)]
AllowMinority = Annotated[bool, Machines("--allow-minority", help=MINORITY_HELP)]


def machines(ctx: typer.Context) -> dict[str, Any]:
    """What the flags say about several machines, under the names that `Hosts` has for it."""
    found = {name: ctx.params[name] for name in MACHINES if name in ctx.params}
    options = {
        name: ctx.params[name]
        for name in OF_ENGINES
        if ctx.params.get(name) not in (None, False, [], ())
    }
    return {"nodes": found.pop("nnodes"), **found, "engine_options": options}


def others(ctx: typer.Context, *named: str) -> dict[str, Any]:
    """The flags that are neither `named` nor about several machines."""
    engines = OF_ENGINES if "engine" in ctx.params else ()  # others have flags of these names
    elsewhere = {*named, *MACHINES, *engines}
    return {name: value for name, value in ctx.params.items() if name not in elsewhere}
