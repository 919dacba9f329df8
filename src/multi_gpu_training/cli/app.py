"""The commands and their flags. Nothing heavy is imported before a command runs.

Typer makes a flag of each argument of a function here. A command with many flags hands them on
from `ctx.params`, where they stand under their names, instead of naming each once more.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from typer import Argument, CallbackParam, Option

from multi_gpu_training.cli.engine_options import ENGINE_OPTIONS, with_engine_options
from multi_gpu_training.cli.federated_command import federated
from multi_gpu_training.cli.recipe_help import RecipeCommand, complete_recipe, complete_target

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
NAMES = {"token_normalize_func": lambda name: name.replace("_", "-")}

app = typer.Typer(
    name="mgt",
    help="Train a PyTorch model on many GPUs and get what one GPU computes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={**NAMES, "help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    debug: Annotated[bool, Option(help="show tracebacks; also works after a command")] = False,
) -> None:
    """Train a PyTorch model on many GPUs and get what one GPU computes."""


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


def a_path(param: CallbackParam, given: Any) -> Any:
    """Refuse what no file system can have as a path; None and lists of paths are fine."""
    _check_paths(given, f"{param.opts[0]} " if param.opts[0].startswith("-") else "")
    return given


def _check_paths(given: Any, flag: str) -> None:
    from multi_gpu_training.config import path_problem
    from multi_gpu_training.errors import ConfigError
    from multi_gpu_training.safe_output import brief

    for path in given if isinstance(given, list) else [given]:
        problem = None if path is None else path_problem(path)
        if problem is not None:
            raise ConfigError(f"{flag}{brief(path, 80)}: {problem}")


# The headings of `--help`: an option of each stands below it.
Place = partial(Option, rich_help_panel="Where it runs")
Machines = partial(Option, rich_help_panel="Several machines")
Training = partial(Option, rich_help_panel="Training")
Prices = partial(Option, rich_help_panel="What it costs")

# Flags that several commands have.
AnyTarget = partial(Argument, callback=no_flag, autocompletion=complete_target)
Target = Annotated[str, AnyTarget(metavar="[RECIPE|CONFIG|SCRIPT.py]")]
Device = Annotated[str, Option(help="auto, cpu, cuda, mps or xpu")]
Warmup = Annotated[int | None, Option(help="steps before measuring; 40 on GPUs, 5 on CPUs")]
AsJson = Annotated[bool, Option("--json", help="for programs")]
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
_WITNESS = (
    "HOST:PORT of `mgt cluster witness`, or a file that all machines share: decides who continues"
)
_MINORITY = (
    "continue with half of the machines or fewer, even if the others still train the same run"
)
WitnessPlace = Annotated[str | None, Machines(help=_WITNESS)]
AllowMinority = Annotated[bool, Machines("--allow-minority", help=_MINORITY)]


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


@app.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
@with_engine_options
def train(
    ctx: typer.Context,
    target: Annotated[
        str,
        AnyTarget(
            metavar="RECIPE|CONFIG",
            help="`mgt recipes` lists them; `mgt train RECIPE --help` shows its options",
        ),
    ],
    multi_gpu: Annotated[str | None, Place(help="ddp, fsdp, dp, single or auto")] = None,
    num_gpus: Annotated[int | None, Place(help="-1: all; without GPUs, CPU ranks")] = None,
    gpu_ids: Annotated[str | None, Place(help="like 0,1,3: inside CUDA_VISIBLE_DEVICES")] = None,
    share_gpu: Annotated[
        bool | None, Place(help="allow several ranks on one GPU, for tests")
    ] = None,
    batch_size: Annotated[int | None, Training(help="samples per GPU")] = None,
    epochs: Annotated[int | None, Training(help="passes over the data")] = None,
    max_steps: Annotated[int | None, Training(help="end after this many steps")] = None,
    lr: Annotated[float | None, Training(help="learning rate")] = None,
    lr_scaling: Annotated[str | None, Training(help="linear, sqrt or none")] = None,
    warmup_epochs: Annotated[float | None, Training(help="epochs of warm-up")] = None,
    grad_accum_steps: Annotated[int | None, Training(help="micro-batches per step")] = None,
    mode: Annotated[str | None, Training(help="the recipe's variant")] = None,
    data_dir: Annotated[str | None, Training(help="your data")] = None,
    save_dir: Annotated[str | None, Training(help="where runs are kept: a folder or URL")] = None,
    run_name: Annotated[
        str | None, Training(help="name of its folder there; default: the time")
    ] = None,
    resume: Annotated[str | None, Training(help="auto, or a checkpoint (folder, URL)")] = None,
    resume_anyway: Annotated[
        bool | None, Training("--resume-anyway", help="even if seed or data changed")
    ] = None,
    seed: Annotated[int | None, Training(help="seeds weights, order and noise")] = None,
    deterministic: Annotated[bool | None, Training(help="the same bits in every run")] = None,
    engine: EngineName = None,
    ray_address: RayAddress = None,
    ray_options: RayOptions = None,
    nnodes: Nodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: Annotated[int | None, Machines(help="default: a free one")] = None,
    cluster_token: ClusterToken = None,
    insecure_network: InsecureNetwork = False,
    witness: WitnessPlace = None,
    allow_minority: AllowMinority = False,
    # torch.distributed.launch adds it; the environment says the same.
    local_rank: Annotated[int | None, Option(hidden=True)] = None,
) -> None:
    """Train a recipe or a YAML config on all GPUs.

    Give any setting of `mgt config-schema` as --flag VALUE or key=value.
    """
    from multi_gpu_training.cli.train_command import TrainFlags, train
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    elsewhere = ("target", "num_gpus", "local_rank", "cluster_token", "insecure_network")
    settings = others(ctx, *elsewhere)
    train(TrainFlags(target, num_gpus, settings, machines(ctx), list(ctx.args)))


@app.command(context_settings={**EXTRA, **NAMES})
@with_engine_options
def resume(
    ctx: typer.Context,
    run: Annotated[str, Argument(metavar="RUN", help="its folder or URL", callback=no_flag)],
    multi_gpu: Annotated[str | None, Place(help="ddp, fsdp, dp or single")] = None,
    num_gpus: Annotated[int | None, Place(help="-1: all; without GPUs, CPU ranks")] = None,
    gpu_ids: Annotated[str | None, Place(help="like 0,1,3: inside CUDA_VISIBLE_DEVICES")] = None,
    epochs: Annotated[int | None, Training(help="passes over the data, in all")] = None,
    max_steps: Annotated[int | None, Training(help="end after this many steps, in all")] = None,
    lr: Annotated[float | None, Training(help="learning rate")] = None,
    data_dir: Annotated[str | None, Training(help="where the data is now")] = None,
    resume_anyway: Annotated[
        bool | None, Training("--resume-anyway", help="even if seed or data changed")
    ] = None,
    engine: EngineName = None,
    ray_address: RayAddress = None,
    ray_options: RayOptions = None,
    nnodes: Nodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: Annotated[int | None, Machines(help="default: a free one")] = None,
    cluster_token: ClusterToken = None,
    insecure_network: InsecureNetwork = False,
    witness: WitnessPlace = None,
    allow_minority: AllowMinority = False,
    local_rank: Annotated[int | None, Option(hidden=True)] = None,
) -> None:
    """Continue a run of a recipe with the settings in its config.yaml.

    You may give any setting or option again, as for `mgt train`; a table shows what changed.
    """
    from multi_gpu_training.cli.train_command import TrainFlags, train
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    elsewhere = ("run", "num_gpus", "local_rank", "cluster_token", "insecure_network")
    settings = others(ctx, *elsewhere)
    train(TrainFlags(run, num_gpus, settings, machines(ctx), list(ctx.args), run))


@app.command(context_settings={**EXTRA, **NAMES, "allow_interspersed_args": False})
@with_engine_options
def run(
    ctx: typer.Context,
    script: Annotated[
        str, Argument(metavar="SCRIPT.py", help="any training script", callback=no_flag)
    ],
    num_gpus: Annotated[int, Option(help="-1: all; without GPUs, CPU ranks")] = -1,
    share_gpu: Annotated[bool, Option("--share-gpu")] = False,
    max_restarts: Annotated[
        int | None,
        Option(min=0, help="default: as the script's config says", show_default=False),
    ] = None,
    recovery_timeout: Annotated[
        float,
        Option(min=1.0, help="seconds to wait for the other machines, also after a failure"),
    ] = 300.0,
    engine: Annotated[
        str | None,
        Option(help="local, torchrun, elastic, slurm, ray or kubernetes"),
    ] = None,
    ray_address: RayAddress = None,
    ray_options: RayOptions = None,
    nnodes: Annotated[
        str, Option("--nnodes", "--nodes", help="machines: 2, or LEAST:MOST like 1:2")
    ] = "1",
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    cluster_token: Annotated[
        str | None,
        Option(help="file made by `mgt cluster token`, the same everywhere", callback=a_path),
    ] = None,
    insecure_network: Annotated[
        bool, Option("--insecure-network", help="no token: trust the network")
    ] = False,
    witness: Annotated[str | None, Option(help=_WITNESS)] = None,
    allow_minority: Annotated[bool, Option("--allow-minority", help=_MINORITY)] = False,
) -> None:
    """Run a script once per rank. Everything after SCRIPT.py is passed to it."""
    from multi_gpu_training.cli.run_command import run_script
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    again = {"max_restarts": max_restarts, "recovery_timeout": recovery_timeout}
    raise typer.Exit(run_script([script, *ctx.args], num_gpus, share_gpu, again, machines(ctx)))


@app.command(context_settings=NAMES)
def launch(
    recipe: Annotated[
        str | None, Argument(help="ask for the rest", autocompletion=complete_recipe)
    ] = None,
    dry_run: Annotated[bool, Option(help="show the command, do not run it")] = False,
) -> None:
    """Ask what to train, on how many GPUs and at which rate; show the command and run it."""
    from multi_gpu_training.cli.launch_command import launch

    raise typer.Exit(launch(recipe, dry_run))


@app.command(cls=RecipeCommand, context_settings=EXTRA)
def verify(
    ctx: typer.Context,
    target: Annotated[str, AnyTarget(metavar="RECIPE|CONFIG|SCRIPT.py")],
    ranks: Annotated[str, Option(help="numbers of ranks to compare with one")] = "2,3",
    steps: Annotated[int, Option(help="optimizer steps")] = 8,
    device: Device = "auto",
) -> None:
    """Check that several ranks compute what one computes; if not, name the cause."""
    from multi_gpu_training.cli.verify_command import verify_target

    raise typer.Exit(verify_target([target, *ctx.args], ranks, steps, device))


@app.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
@with_engine_options
def check(
    ctx: typer.Context,
    target: Annotated[str | None, AnyTarget(metavar="[RECIPE|CONFIG|SCRIPT.py]")] = None,
    device: Device = "auto",
    num_gpus: Annotated[int, Place(help="-1: all; without GPUs, CPU ranks")] = -1,
    save_dir: Annotated[str, Option(help="where runs will be kept")] = "runs",
    timeout: Annotated[float, Option(help="seconds after which a check counts as hung")] = 60.0,
    as_json: AsJson = False,
    save_curve: Annotated[
        str | None, Option(help="all-reduce times as CSV, for `mgt estimate --curve`")
    ] = None,
    engine: Annotated[
        str | None,
        Machines(help="which one to test: local, torchrun, elastic, slurm, ray, kubernetes"),
    ] = None,
    ray_address: RayAddress = None,
    ray_options: RayOptions = None,
    nnodes: Annotated[
        str | None,
        Machines("--nnodes", "--nodes", help="machines: 2, or the MOST of LEAST:MOST"),
    ] = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: Annotated[int | None, Machines()] = None,
    cluster_token: ClusterToken = None,
    insecure_network: InsecureNetwork = False,
) -> None:
    """Check this machine before training: software, GPUs, links, disk, network, real ranks.

    With a recipe, config or script also its memory, largest batch, time, and a ready command.
    Ends with 1 if anything fails. On several machines start it on each, or with torchrun;
    --engine slurm or ray asks the cluster first, then its nodes, in ranks of a short job there.
    """
    from multi_gpu_training.cli.check_command import CheckFlags, check
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    command = [target, *ctx.args] if target is not None else []
    flags = others(ctx, "target", "cluster_token", "insecure_network")
    raise typer.Exit(check(CheckFlags(command, **flags, hosts=machines(ctx))))


@app.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def bench(
    ctx: typer.Context,
    target: Target = "image",
    ranks: Annotated[int | None, Option(help="default: every GPU; without GPUs, 2")] = None,
    steps: Annotated[int, Option(help="steps to measure per case")] = 50,
    warmup: Warmup = None,
    device: Device = "auto",
    modes: Annotated[str, Option(help="what to compare")] = "single,dp,ddp",
    batch_sizes: Annotated[
        str | None, Option(help="like 128,256,512: speed and memory of each")
    ] = None,
    precision: Annotated[
        bool, Option("--precision", help="float32, mixed, and mixed with accumulation")
    ] = False,
    tune: Annotated[bool, Option("--tune", help="try DDP settings and print the best")] = False,
    allow_compression: Annotated[
        bool, Option("--allow-compression", help="--tune may choose 16-bit gradients")
    ] = False,
    repeats: Annotated[
        int | None, Option(help="rounds over all cases; default 1, with --tune 3")
    ] = None,
    timeout: Annotated[float, Option(help="longest time for a case, in seconds")] = 300.0,
    out: Annotated[
        str | None, Option(help="folder for bench.json, .md and .png; default runs/bench/TIME")
    ] = None,
) -> None:
    """Measure speed and memory here: single, DP and DDP, batch sizes, precision, DDP settings.

    Other flags and words are the recipe's or the script's, as for `mgt train`.
    """
    from multi_gpu_training.cli.bench_command import BenchFlags, bench

    raise typer.Exit(bench(BenchFlags([target, *ctx.args], **others(ctx, "target"))))


@app.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def estimate(
    ctx: typer.Context,
    target: Target = "image",
    gpus: Annotated[str | None, Place(help="like 1,2,8; default 1, 2, 4 ... 1024")] = None,
    interconnect: Annotated[
        str | None, Place(help="what connects them; leave it out for a list")
    ] = None,
    curve: Annotated[
        str | None, Place(help="CSV of your own all-reduce times", callback=a_path)
    ] = None,
    gpus_per_node: Annotated[int, Place()] = 8,
    scaling: Annotated[
        str | None, Place(help="weak: same batch per GPU; strong: same global batch")
    ] = None,
    strategy: Annotated[str, Place(help="ddp: a whole model per GPU; fsdp: a part")] = "ddp",
    epochs: Annotated[float | None, Option(help="length of the training, in epochs")] = None,
    samples: Annotated[float | None, Option(help="length of the training, in samples")] = None,
    price: Annotated[float | None, Prices(help="per GPU and hour")] = None,
    price_per: Annotated[str, Prices(help="gpu or node")] = "gpu",
    price_source: Annotated[
        str | None, Prices(help="where the price comes from; printed with it")
    ] = None,
    price_date: Annotated[str | None, Prices(help="date of the price; default: today")] = None,
    catalog: Annotated[str | None, Prices(help="CSV in SkyPilot's format", callback=a_path)] = None,
    accelerator: Annotated[str | None, Prices(help="which accelerator in it, like H100")] = None,
    instance: Annotated[str | None, Prices(help="or which instance type in it")] = None,
    region: Annotated[str | None, Prices()] = None,
    spot: Annotated[bool, Prices("--spot")] = False,
    electricity: Annotated[float | None, Prices(help="price per kWh, for your own GPUs")] = None,
    profile: Annotated[
        str | None,
        Option(help="profile.json of an earlier estimate: measure nothing", callback=a_path),
    ] = None,
    steps: Annotated[int, Option(help="measured steps")] = 50,
    warmup: Warmup = None,
    device: Device = "auto",
    timeout: Annotated[float, Option(help="longest time for measuring, in seconds")] = 600.0,
    as_json: AsJson = False,
    out: Annotated[
        str | None, Option(help="output folder; default: runs/estimate/NAME-TIME")
    ] = None,
) -> None:
    """Measure on one GPU; forecast time, memory and cost on many.

    Other flags and words are the recipe's or the script's, as for `mgt train`.
    """
    from multi_gpu_training.cli.estimate_command import EstimateFlags, estimate

    raise typer.Exit(estimate(EstimateFlags([target, *ctx.args], **others(ctx, "target"))))


@app.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def search(
    ctx: typer.Context,
    target: Annotated[str, AnyTarget(metavar="RECIPE|CONFIG|SCRIPT.py|STUDY")],
    param: Annotated[
        list[str] | None, Option(help="NAME=LOW..HIGH[:log] or NAME=A,B,C; repeatable")
    ] = None,
    metric: Annotated[
        list[str] | None, Option(help="a metric the run logs, with :min or :max; default: val/loss")
    ] = None,
    trials: Annotated[int | None, Option(help="how many in all; default: 20")] = None,
    sampler: Annotated[
        str | None, Option(help="tpe, optuna-tpe, random, grid, cmaes, nsga2 or pbt")
    ] = None,
    pruner: Annotated[str | None, Option(help="none, median, hyperband or asha")] = None,
    seed: Annotated[int | None, Option(help="seeds the suggestions")] = None,
    value: Annotated[str | None, Option(help="judge trials by last or best validation")] = None,
    population: Annotated[int | None, Option(help="pbt: members; default 5")] = None,
    generation_epochs: Annotated[int | None, Option(help="pbt: default 1")] = None,
    parallel: Annotated[int | None, Place(help="trials at a time; default: one per GPU")] = None,
    gpus_per_trial: Annotated[int | None, Place(help="without GPUs, CPU ranks")] = None,
    trials_per_gpu: Annotated[int | None, Place(help="how many small trials share a GPU")] = None,
    engine: Annotated[str | None, Place(help="where trials run: local or ray")] = None,
    ray_address: RayAddress = None,
    device: Annotated[str | None, Place(help="auto, cpu or cuda")] = None,
    study: Annotated[str | None, Option(help="name of the search; default: RECIPE-TIME")] = None,
    save_dir: Annotated[str, Option(help="where to keep searches", callback=a_path)] = (
        "runs/search"
    ),
    storage: Annotated[
        str | None, Option(help="Optuna's URL; default: SQLite in the search's folder")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="continue the search in this folder")] = False,
    trial_timeout: Annotated[
        float | None, Option(help="longest time for a trial, in seconds")
    ] = None,
    hang_timeout: Annotated[
        float | None, Option(help="seconds a trial may be silent; default: 1800")
    ] = None,
    repeat_best: Annotated[int | None, Option(help="train the K best trials again ...")] = None,
    seeds: Annotated[int | None, Option(help="... with this many seeds each")] = None,
    forecast: Annotated[
        bool, Option("--forecast", help="measure one trial, forecast time and cost, and exit")
    ] = False,
    price: Annotated[float | None, Prices(help="per GPU and hour")] = None,
) -> None:
    """Search hyperparameters. Every trial is an ordinary run; a killed search can be resumed.

    Other flags and words are the recipe's or the script's, as for `mgt train`.
    """
    from multi_gpu_training.cli.search_command import OWN, SearchFlags, search

    given = others(ctx, "target", "param", *OWN)
    given |= {"engine": engine, "ray_address": ray_address}
    own = {name: ctx.params[name] for name in OWN}
    raise typer.Exit(search(SearchFlags(target, list(ctx.args), param or [], given, **own)))


@app.command()
def checkpoints(
    words: Annotated[
        list[str],
        Argument(
            metavar="[upload] RUN | merge RUN OUT",
            help="a run folder, its URL, or a checkpoint",
            callback=a_path,
        ),
    ],
    as_json: AsJson = False,
    to: Annotated[str | None, Option(help="upload: the run's URL, if not its save_dir")] = None,
    wait: Annotated[float, Option(help="upload: longest time, in seconds")] = 3600.0,
    verify_key: Annotated[
        str | None,
        Option(help="key file: checkpoints not signed with it count as damaged", callback=a_path),
    ] = None,
    like: Annotated[
        str | None, Option(help="merge: take config and tokenizer from this folder")
    ] = None,
) -> None:
    """List the checkpoints of a run, check every byte, and say which are intact.

    Ends with 1 if there is none to go on from. `upload RUN` copies a local run to the object
    storage that is its save_dir, and ends with 1 if something is missing there then. `merge RUN
    OUT` writes the newest weights, sharded or not, into OUT: a .safetensors file, or a folder.
    """
    from multi_gpu_training.cli.checkpoints_command import (
        merge_checkpoint,
        show_checkpoints,
        upload_run,
    )
    from multi_gpu_training.errors import ConfigError

    if words[0] == "merge":
        raise typer.Exit(merge_checkpoint(words[1:], like))
    if len(words) == 2 and words[0] == "upload":
        raise typer.Exit(upload_run(words[1], to, wait))
    if len(words) > 1:
        raise ConfigError(f"mgt checkpoints takes one run, not {len(words)}: {' '.join(words)}")
    raise typer.Exit(show_checkpoints(words[0], as_json, verify_key))


TrainedRun = Annotated[
    str, Argument(metavar="RUN", help="a run folder, a checkpoint, or its URL", callback=a_path)
]
Checkpoint = Annotated[
    str | None, Option(help="best or step-N; default: the best, else the newest")
]
Trust = Annotated[bool, Option("--trust", help="import the code that the checkpoint names")]
Ranks = Annotated[int, Option(help="-1: all; without GPUs, CPU ranks")]


@app.command()
def evaluate(
    run: TrainedRun,
    data: Annotated[
        str | None, Option(help="other data, as for `mgt train --data-dir`", callback=a_path)
    ] = None,
    part: Annotated[str | None, Option(help="val or all; default: val, or all of --data")] = None,
    checkpoint: Checkpoint = None,
    num_gpus: Ranks = -1,
    batch_size: Annotated[int | None, Option(min=1)] = None,
    device: Device = "auto",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on its validation data or on other data, on all GPUs."""
    from multi_gpu_training.cli.evaluate_command import EvaluateFlags, evaluate

    flags = EvaluateFlags(run, data, part, checkpoint, num_gpus, batch_size, device, trust, as_json)
    raise typer.Exit(evaluate(flags))


@app.command()
def predict(
    run: TrainedRun,
    inputs: Annotated[
        list[str] | None,
        Argument(metavar="INPUT...", help="files, folders or texts; for ppo, a number of episodes"),
    ] = None,
    task: Annotated[str | None, Option(help="generate or score (texts), play or act (ppo)")] = None,
    out: Annotated[str | None, Option(help="FILE.jsonl or FILE.csv", callback=a_path)] = None,
    form: Annotated[str | None, Option("--format", help="table, jsonl or csv")] = None,
    timeline: Annotated[
        str | None, Option(help="video: FILE.csv or FILE.svg", callback=a_path)
    ] = None,
    every: Annotated[int | None, Option(help="video: frames between two clips")] = None,
    new_tokens: Annotated[
        int | None, Option(help="generate: at most this many; default: 64")
    ] = None,
    temperature: Annotated[
        float | None, Option(help="generate: 0 picks the likeliest token")
    ] = None,
    seed: Annotated[int | None, Option(help="generate: seeds the draws")] = None,
    record: Annotated[
        str | None, Option(help="play: folder for a GIF of each episode", callback=a_path)
    ] = None,
    checkpoint: Checkpoint = None,
    num_gpus: Ranks = -1,
    batch_size: Annotated[int | None, Option(min=1)] = None,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Predict with a trained model, on all GPUs: one result per input, in the same order.

    Ends with 1 if an input could not be used.
    """
    from multi_gpu_training.cli.predict_command import PredictFlags, predict

    given = {
        "every": every,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "seed": seed,
        "record": record,
    }
    options = {name: value for name, value in given.items() if value is not None}
    place = checkpoint, num_gpus, batch_size, device, trust
    flags = PredictFlags(run, list(inputs or ()), task, out, form, timeline, *place, options)
    raise typer.Exit(predict(flags))


@app.command()
def export(
    run: TrainedRun,
    to: Annotated[str, Option(help="onnx, torch-export, aoti, executorch, safetensors or hf")],
    out: Annotated[
        str | None, Option(help="the new folder; default exports/RECIPE-NAME-TO", callback=a_path)
    ] = None,
    checkpoint: Checkpoint = None,
    max_batch: Annotated[int, Option(min=2, help="largest batch of the exported program")] = 1024,
    length: Annotated[
        int | None, Option(min=2, help="longest input: samples of sound, tokens of a text")
    ] = None,
    license_name: Annotated[
        str, Option("--license", help="license of the weights, for the model card")
    ] = "unknown",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Export a trained model and compare it with PyTorch on real samples."""
    from multi_gpu_training.cli.export_command import export_run

    raise typer.Exit(
        export_run(run, to, out, checkpoint, max_batch, length, license_name, trust, as_json)
    )


@app.command()
def report(
    runs: Annotated[
        list[str], Argument(metavar="RUN...", help="run folders, or their URLs", callback=a_path)
    ],
    out: Annotated[
        str | None,
        Option(
            help="the HTML file; default RUN/report.html, of several ./report.html", callback=a_path
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="verdict and figures, for programs")] = False,
    html: Annotated[bool, Option(help="write the HTML file")] = True,
) -> None:
    """Explain what a run did and why it is slow, or compare several runs."""
    from multi_gpu_training.cli.report_command import report

    raise typer.Exit(report(runs, out, as_json, html))


@app.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def profile(
    ctx: typer.Context,
    target: Annotated[str, AnyTarget(metavar="RUN|RECIPE|CONFIG|SCRIPT.py")],
    steps: Annotated[
        str | None, Option(help="like 20-24 or 20-24,200-202; default 60-64, on CPUs 6-8")
    ] = None,
    ranks: Annotated[str, Option(help="like 0 or 0,3, or all")] = "0",
    num_gpus: Annotated[int, Place(help="-1: all; without GPUs, CPU ranks")] = -1,
    device: Device = "auto",
) -> None:
    """Trace a few steps: kernels, exposed communication, gaps, and what to improve first.

    Of a run folder, show what its traces found. The traces open in Perfetto.
    """
    from multi_gpu_training.cli.profile_command import profile

    raise typer.Exit(profile([target, *ctx.args], steps, ranks, num_gpus, device))


@app.command()
def recipes() -> None:
    """List the recipes."""
    from rich.console import Console
    from rich.table import Table

    from multi_gpu_training.recipes import RECIPES

    table = Table("recipe", "what it trains")
    for name, text in RECIPES.items():
        table.add_row(name, text)
    Console().print(table)


@app.command()
def info() -> None:
    """Show the GPUs of this machine."""
    from multi_gpu_training.gpus import print_gpu_info

    print_gpu_info()


@app.command()
def explain(
    code: Annotated[str | None, Argument(help="such as MGT201; default: all codes")] = None,
) -> None:
    """Explain the code below an error message and what to do."""
    from multi_gpu_training.cli.explain_command import explain

    raise typer.Exit(explain(code))


@app.command(name="config-schema")
def config_schema() -> None:
    """Print the JSON schema of a config file: every setting and every recipe's options."""
    import json

    from multi_gpu_training.recipes.option_schemas import config_file_schema

    print(json.dumps(config_file_schema(), indent=2))


@app.command(context_settings=NAMES)
def compress(
    run: Annotated[str, Argument(help="run folder or checkpoint", callback=a_path)],
    method: Annotated[
        list[str],
        Option(
            help="quantize[:int8|int8-dynamic|int4|onnx-int8], prune[:2:4|SHARE], "
            "distil[:SHARE|NAME=VALUE]; joined by + they combine; repeat to compare"
        ),
    ],
    max_drop: Annotated[
        str | None, Option(help="keep only models that lose at most this, such as 1%")
    ] = None,
    out: Annotated[str | None, Option(help="default: RUN-compressed", callback=a_path)] = None,
    device: Device = "auto",
    epochs: Annotated[int | None, Option(help="epochs of fine-tuning or distillation")] = None,
    lr: Annotated[float | None, Option(help="learning rate of fine-tuning or distillation")] = None,
    trust: Annotated[bool, Option(help="import the code that the checkpoint names")] = False,
) -> None:
    """Make a trained model smaller; compare size, speed and accuracy before and after."""
    from multi_gpu_training.cli.compress_command import compress

    raise typer.Exit(compress(run, method, out, max_drop, device, epochs, lr, trust))


@app.command(context_settings=NAMES)
def serve(
    ctx: typer.Context,
    run: Annotated[str, Argument(help="run folder or checkpoint", callback=a_path)],
    host: Annotated[
        str, Option(help="address to listen on; default: this machine only")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0: pick a free port")] = 8000,
    device: Device = "auto",
    checkpoint: Annotated[str | None, Option(help="best or step-N")] = None,
    task: Annotated[
        str | None, Option(help="generate, score, ... if the model has several")
    ] = None,
    max_batch: Annotated[int, Option(help="largest number of inputs computed together")] = 32,
    max_delay_ms: Annotated[float, Option(help="longest wait of an input for others")] = 5.0,
    max_waiting: Annotated[int, Option(help="inputs that may wait; more get 503")] = 1024,
    max_body_mib: Annotated[float, Option(help="largest request; larger ones get 413")] = 10.0,
    rate: Annotated[float, Option(help="requests per second and client; 0: unlimited")] = 1000.0,
    allow_host: Annotated[
        list[str] | None, Option(help="another name of this server, besides HOST")
    ] = None,
    trust: Annotated[bool, Option(help="import the code that the checkpoint names")] = False,
) -> None:
    """Serve a trained model: /predict, /health, /metrics, and a page to try it by hand."""
    from multi_gpu_training.cli.serve_command import serve

    flags = {name: value for name, value in ctx.params.items() if name != "run"}
    raise typer.Exit(serve(run, {**flags, "allow_host": allow_host or []}))


@app.command()
def dashboard(
    runs: WatchedRuns = None,
    host: Annotated[
        str, Option(help="address to listen on; default: this machine only")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0: pick a free port")] = 8765,
    token: Annotated[
        str | None, Option(envvar="MGT_DASHBOARD_TOKEN", help="default: a new one each time")
    ] = None,
    allow_host: Annotated[
        list[str] | None, Option(help="another name of this server, besides HOST")
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="only show runs; no actions")] = False,
) -> None:
    """Watch runs live in a browser: compare, save or stop them, change their learning rate."""
    from multi_gpu_training.cli.dashboard_command import dashboard

    folders = runs or ["runs"]
    raise typer.Exit(dashboard(folders, host, port, token, allow_host or [], read_only))


@app.command()
def top(
    runs: WatchedRuns = None,
    once: Annotated[bool, Option("--once", help="print the current state and exit")] = False,
    interval: Annotated[float, Option(help="seconds between updates", min=0.2, max=3600)] = 1.0,
) -> None:
    """Watch runs live in the terminal: ranks, phases, devices, events."""
    from multi_gpu_training.cli.dashboard_command import top

    raise typer.Exit(top(runs or ["runs"], once, interval))


@app.command()
def jobs(
    folder: Annotated[str, Argument(help="folder that you submitted from", callback=a_path)] = ".",
    as_json: AsJson = False,
) -> None:
    """List the Slurm jobs submitted from this folder, and their state."""
    from multi_gpu_training.cli.jobs_command import show_jobs

    raise typer.Exit(show_jobs(folder, as_json))


@app.command()
def cancel(
    job: Annotated[list[str], Argument(metavar="JOB...", help="job numbers, from `mgt jobs`")],
) -> None:
    """Cancel Slurm jobs. A running job saves first and can be resumed."""
    from multi_gpu_training.cli.cancel_command import cancel_jobs

    raise typer.Exit(cancel_jobs(job))


cluster = typer.Typer(no_args_is_help=True, help="Several machines: what they share.")
app.add_typer(cluster, name="cluster")


@cluster.command()
def token(
    file: Annotated[str, Argument(help="where to write it", callback=a_path)] = "cluster.token",
) -> None:
    """Write a new token that only you can read; copy it to each machine of the run."""
    from multi_gpu_training.cli.cluster_command import new_token

    raise typer.Exit(new_token(file))


@cluster.command("witness")
def serve_witness(
    address: Annotated[
        str, Argument(metavar="HOST:PORT", help="where to listen; nodes must reach it")
    ],
    cluster_token: ClusterToken = None,
    insecure_network: InsecureNetwork = False,
) -> None:
    """Decide which half of a run continues when its machines lose each other. Runs until Ctrl-C.

    Start it on a machine of its own, and give every node --witness HOST:PORT.
    """
    from multi_gpu_training.cli.cluster_command import run_witness
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    raise typer.Exit(run_witness(address))


app.add_typer(federated, name="federated")
