"""Commands that train: recipes, configs and scripts."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from multi_gpu_training.cli.engine_options import with_engine_options
from multi_gpu_training.cli.flags import (
    EXTRA,
    MINORITY_HELP,
    NAMES,
    WITNESS_HELP,
    AllowMinority,
    AnyTarget,
    ClusterToken,
    EngineName,
    InsecureNetwork,
    Machines,
    MasterAddr,
    NodeRank,
    Nodes,
    Place,
    RayAddress,
    RayOptions,
    Training,
    WitnessPlace,
    a_path,
    machines,
    no_flag,
    others,
)
from multi_gpu_training.cli.recipe_help import RecipeCommand, complete_recipe

commands = typer.Typer()


@commands.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
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
    num_gpus: Annotated[
        int | None, Place(help="GPUs, or CPU ranks without GPUs; -1: all GPUs, or 2 CPU ranks")
    ] = None,
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
    save_dir: Annotated[str | None, Training(help="folder or URL for runs")] = None,
    run_name: Annotated[
        str | None, Training(help="name of the run's folder; default: the time")
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


@commands.command(context_settings={**EXTRA, **NAMES})
@with_engine_options
def resume(
    ctx: typer.Context,
    run: Annotated[str, Argument(metavar="RUN", help="its folder or URL", callback=no_flag)],
    multi_gpu: Annotated[str | None, Place(help="ddp, fsdp, dp or single")] = None,
    num_gpus: Annotated[
        int | None, Place(help="GPUs, or CPU ranks without GPUs; -1: all GPUs, or 2 CPU ranks")
    ] = None,
    gpu_ids: Annotated[str | None, Place(help="like 0,1,3: inside CUDA_VISIBLE_DEVICES")] = None,
    epochs: Annotated[int | None, Training(help="total passes over the data")] = None,
    max_steps: Annotated[int | None, Training(help="end after this many steps in total")] = None,
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


@commands.command(context_settings={**EXTRA, **NAMES, "allow_interspersed_args": False})
@with_engine_options
def run(
    ctx: typer.Context,
    script: Annotated[
        str, Argument(metavar="SCRIPT.py", help="any training script", callback=no_flag)
    ],
    num_gpus: Annotated[
        int, Option(help="GPUs, or CPU ranks without GPUs; -1: all GPUs, or 1 CPU rank")
    ] = -1,
    share_gpu: Annotated[
        bool, Option("--share-gpu", help="allow several ranks on one GPU, for tests")
    ] = False,
    max_restarts: Annotated[
        int | None,
        Option(min=0, help="default: from the script's config", show_default=False),
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
    witness: Annotated[str | None, Option(help=WITNESS_HELP)] = None,
    allow_minority: Annotated[bool, Option("--allow-minority", help=MINORITY_HELP)] = False,
) -> None:
    """Run a script once per rank. Everything after SCRIPT.py is passed to it."""
    from multi_gpu_training.cli.run_command import run_script
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    again = {"max_restarts": max_restarts, "recovery_timeout": recovery_timeout}
    raise typer.Exit(run_script([script, *ctx.args], num_gpus, share_gpu, again, machines(ctx)))


@commands.command(context_settings=NAMES)
def launch(
    recipe: Annotated[
        str | None, Argument(help="ask for the rest", autocompletion=complete_recipe)
    ] = None,
    dry_run: Annotated[bool, Option(help="show the command, do not run it")] = False,
) -> None:
    """Ask what to train, on how many GPUs and at which rate; show the command and run it."""
    from multi_gpu_training.cli.launch_command import launch

    raise typer.Exit(launch(recipe, dry_run))


@commands.command()
def recipes() -> None:
    """List the recipes."""
    from rich.console import Console
    from rich.table import Table

    from multi_gpu_training.recipes import RECIPES

    table = Table("recipe", "what it trains")
    for name, text in RECIPES.items():
        table.add_row(name, text)
    Console().print(table)


@commands.command(name="config-schema")
def config_schema() -> None:
    """Print the JSON schema of a config file: every setting and every recipe's options."""
    import json

    from multi_gpu_training.recipes.option_schemas import config_file_schema

    print(json.dumps(config_file_schema(), indent=2))
