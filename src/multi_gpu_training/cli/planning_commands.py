"""Commands for before a run: is it right, will it fit, how fast, with which settings."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from multi_gpu_training.cli.engine_options import with_engine_options
from multi_gpu_training.cli.flags import (
    EXTRA,
    NAMES,
    AnyTarget,
    AsJson,
    ClusterToken,
    Device,
    InsecureNetwork,
    Machines,
    MasterAddr,
    NodeRank,
    Place,
    Prices,
    RayAddress,
    RayOptions,
    Target,
    Warmup,
    a_path,
    machines,
    others,
)
from multi_gpu_training.cli.recipe_help import RecipeCommand

commands = typer.Typer()


@commands.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
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
        Machines(help="the engine to test: local, torchrun, elastic, slurm, ray, kubernetes"),
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

    Given a recipe, config or script, also show its memory, largest batch, time, and a command.
    Exits with 1 if anything fails. On several machines, start it on each, or with torchrun;
    --engine slurm or ray asks the cluster first, then its nodes, in ranks of a short job there.
    """
    from multi_gpu_training.cli.check_command import CheckFlags, check
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    command = [target, *ctx.args] if target is not None else []
    flags = others(ctx, "target", "cluster_token", "insecure_network")
    raise typer.Exit(check(CheckFlags(command, **flags, hosts=machines(ctx))))


@commands.command(cls=RecipeCommand, context_settings=EXTRA)
def verify(
    ctx: typer.Context,
    target: Annotated[str, AnyTarget(metavar="RECIPE|CONFIG|SCRIPT.py")],
    ranks: Annotated[str, Option(help="rank counts to compare with one rank")] = "2,3",
    steps: Annotated[int, Option(help="optimizer steps")] = 8,
    device: Device = "auto",
) -> None:
    """Check that several ranks compute what one computes; if not, name the cause."""
    from multi_gpu_training.cli.verify_command import verify_target

    raise typer.Exit(verify_target([target, *ctx.args], ranks, steps, device))


@commands.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def bench(
    ctx: typer.Context,
    target: Target = "image",
    ranks: Annotated[int | None, Option(help="default: every GPU; without GPUs, 2")] = None,
    steps: Annotated[int, Option(help="steps to measure per case")] = 50,
    warmup: Warmup = None,
    device: Device = "auto",
    modes: Annotated[str, Option(help="what to compare")] = "single,dp,ddp",
    batch_sizes: Annotated[
        str | None, Option(help="like 128,256,512: compare speed and memory")
    ] = None,
    precision: Annotated[
        bool, Option("--precision", help="compare float32, mixed, and mixed with accumulation")
    ] = False,
    tune: Annotated[bool, Option("--tune", help="try DDP settings and print the best")] = False,
    allow_compression: Annotated[
        bool, Option("--allow-compression", help="--tune may choose 16-bit gradients")
    ] = False,
    repeats: Annotated[
        int | None, Option(help="rounds over all cases; default: 1, or 3 with --tune")
    ] = None,
    timeout: Annotated[float, Option(help="time limit per case, in seconds")] = 300.0,
    out: Annotated[
        str | None, Option(help="folder for bench.json, .md and .png; default runs/bench/TIME")
    ] = None,
) -> None:
    """Measure speed and memory here: single, DP and DDP, batch sizes, precision, DDP settings.

    Other flags and words are the recipe's or the script's, as for `mgt train`.
    """
    from multi_gpu_training.cli.bench_command import BenchFlags, bench

    raise typer.Exit(bench(BenchFlags([target, *ctx.args], **others(ctx, "target"))))


@commands.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def estimate(
    ctx: typer.Context,
    target: Target = "image",
    gpus: Annotated[str | None, Place(help="like 1,2,8; default: 1, 2, 4 ... 1024")] = None,
    interconnect: Annotated[str | None, Place(help="network between GPUs; omit for a list")] = None,
    curve: Annotated[
        str | None, Place(help="CSV of your own all-reduce times", callback=a_path)
    ] = None,
    gpus_per_node: Annotated[int, Place()] = 8,
    scaling: Annotated[
        str | None, Place(help="weak: fixed batch per GPU; strong: fixed global batch")
    ] = None,
    strategy: Annotated[str, Place(help="ddp: a full copy per GPU; fsdp: a shard")] = "ddp",
    epochs: Annotated[float | None, Option(help="length of the training, in epochs")] = None,
    samples: Annotated[float | None, Option(help="length of the training, in samples")] = None,
    price: Annotated[float | None, Prices(help="per GPU and hour")] = None,
    price_per: Annotated[str, Prices(help="gpu or node")] = "gpu",
    price_source: Annotated[str | None, Prices(help="source of the price, printed with it")] = None,
    price_date: Annotated[str | None, Prices(help="date of the price; default: today")] = None,
    catalog: Annotated[str | None, Prices(help="CSV in SkyPilot's format", callback=a_path)] = None,
    accelerator: Annotated[str | None, Prices(help="accelerator in the catalog, like H100")] = None,
    instance: Annotated[str | None, Prices(help="or instance type in the catalog")] = None,
    region: Annotated[str | None, Prices()] = None,
    spot: Annotated[bool, Prices("--spot")] = False,
    electricity: Annotated[float | None, Prices(help="price per kWh, for your own GPUs")] = None,
    profile: Annotated[
        str | None,
        Option(help="reuse the profile.json of an earlier estimate", callback=a_path),
    ] = None,
    steps: Annotated[int, Option(help="measured steps")] = 50,
    warmup: Warmup = None,
    device: Device = "auto",
    timeout: Annotated[float, Option(help="time limit for measuring, in seconds")] = 600.0,
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


@commands.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def search(
    ctx: typer.Context,
    target: Annotated[str, AnyTarget(metavar="RECIPE|CONFIG|SCRIPT.py|STUDY")],
    param: Annotated[
        list[str] | None, Option(help="NAME=LOW..HIGH[:log] or NAME=A,B,C; repeatable")
    ] = None,
    metric: Annotated[
        list[str] | None, Option(help="a metric the run logs, with :min or :max; default: val/loss")
    ] = None,
    trials: Annotated[int | None, Option(help="total number of trials; default: 20")] = None,
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
    trials_per_gpu: Annotated[int | None, Place(help="number of small trials per GPU")] = None,
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
    trial_timeout: Annotated[float | None, Option(help="time limit per trial, in seconds")] = None,
    hang_timeout: Annotated[
        float | None, Option(help="seconds a trial may be silent; default: 1800")
    ] = None,
    repeat_best: Annotated[int | None, Option(help="retrain the K best trials ...")] = None,
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


@commands.command()
def info() -> None:
    """Show the GPUs of this machine."""
    from multi_gpu_training.gpus import print_gpu_info

    print_gpu_info()
