"""The commands and their flags. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
NAMES = {"token_normalize_func": lambda name: name.replace("_", "-")}

app = typer.Typer(
    name="mgt",
    help="Train a PyTorch model on many GPUs and get what one GPU computes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={**NAMES, "help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    debug: Annotated[bool, Option(help="show tracebacks; works after any command too")] = False,
) -> None:
    """Train a PyTorch model on many GPUs and get what one GPU computes."""


def no_flag(ctx: typer.Context, word: str | None) -> str | None:
    """Flags that a command does not know belong to its recipe or script, which stands first."""
    if word is not None and word.startswith("-"):
        from multi_gpu_training.errors import ConfigError

        raise ConfigError(
            f"unknown flag {word.partition('=')[0]}; `mgt {ctx.info_name} --help` lists the flags, "
            "and those of a recipe or script come after its name"
        )
    return word


PLACE = "Where it runs"
HOSTS = "Several machines"
TRAINING = "Training"
PRICES = "What it costs"


@app.command(context_settings={**EXTRA, **NAMES})
def train(
    ctx: typer.Context,
    target: Annotated[
        str,
        Argument(metavar="RECIPE|CONFIG", help="`mgt recipes` lists them", callback=no_flag),
    ],
    multi_gpu: Annotated[
        str | None, Option(help="ddp, dp or single", rich_help_panel=PLACE)
    ] = None,
    num_gpus: Annotated[
        int | None,
        Option(help="-1: all; without GPUs, CPU ranks", rich_help_panel=PLACE),
    ] = None,
    gpu_ids: Annotated[
        str | None, Option(help="like 0,1,3: inside CUDA_VISIBLE_DEVICES", rich_help_panel=PLACE)
    ] = None,
    share_gpu: Annotated[
        bool | None, Option(help="several ranks on one GPU, for tests", rich_help_panel=PLACE)
    ] = None,
    batch_size: Annotated[
        int | None, Option(help="samples per GPU", rich_help_panel=TRAINING)
    ] = None,
    epochs: Annotated[int | None, Option(rich_help_panel=TRAINING)] = None,
    lr: Annotated[float | None, Option(help="learning rate", rich_help_panel=TRAINING)] = None,
    lr_scaling: Annotated[
        str | None, Option(help="linear, sqrt or none", rich_help_panel=TRAINING)
    ] = None,
    warmup_epochs: Annotated[float | None, Option(rich_help_panel=TRAINING)] = None,
    grad_accum_steps: Annotated[int | None, Option(rich_help_panel=TRAINING)] = None,
    mode: Annotated[
        str | None, Option(help="the recipe's variant", rich_help_panel=TRAINING)
    ] = None,
    data_dir: Annotated[str | None, Option(help="your data", rich_help_panel=TRAINING)] = None,
    save_dir: Annotated[
        str | None, Option(help="where runs are kept", rich_help_panel=TRAINING)
    ] = None,
    resume: Annotated[
        str | None, Option(help="auto, or a checkpoint folder", rich_help_panel=TRAINING)
    ] = None,
    resume_anyway: Annotated[
        bool | None,
        Option(
            "--resume-anyway",
            help="although seed or data changed",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[int | None, Option(rich_help_panel=TRAINING)] = None,
    deterministic: Annotated[bool | None, Option(rich_help_panel=TRAINING)] = None,
    nnodes: Annotated[
        str | None, Option(help="machines: 2, or LEAST:MOST like 1:2", rich_help_panel=HOSTS)
    ] = None,
    node_rank: Annotated[int | None, Option(rich_help_panel=HOSTS)] = None,
    master_addr: Annotated[str | None, Option(rich_help_panel=HOSTS)] = None,
    master_port: Annotated[
        int | None, Option(help="default: a free one", rich_help_panel=HOSTS)
    ] = None,
    local_rank: Annotated[int | None, Option(hidden=True)] = None,
) -> None:
    """Train a recipe, or what a YAML config says, on all GPUs.

    Every setting of `mgt config-schema` can be given as --flag VALUE or key=value.
    """
    from multi_gpu_training.cli.train_command import TrainFlags, train

    settings = {
        "multi_gpu": multi_gpu,
        "gpu_ids": gpu_ids,
        "share_gpu": share_gpu,
        "batch_size": batch_size,
        "epochs": epochs,
        "lr": lr,
        "lr_scaling": lr_scaling,
        "warmup_epochs": warmup_epochs,
        "grad_accum_steps": grad_accum_steps,
        "mode": mode,
        "data_dir": data_dir,
        "save_dir": save_dir,
        "resume": resume,
        "resume_anyway": resume_anyway,
        "seed": seed,
        "deterministic": deterministic,
    }
    hosts = {
        "nodes": nnodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    train(TrainFlags(target, num_gpus, settings, hosts, list(ctx.args)))


@app.command(context_settings={**EXTRA, "allow_interspersed_args": False})
def run(
    ctx: typer.Context,
    script: Annotated[
        str, Argument(metavar="SCRIPT.py", help="any training script", callback=no_flag)
    ],
    num_gpus: Annotated[
        int, Option("--num-gpus", "--num_gpus", help="-1: all; without GPUs, CPU ranks")
    ] = -1,
    share_gpu: Annotated[bool, Option("--share-gpu", "--share_gpu")] = False,
    max_restarts: Annotated[
        int | None,
        Option(
            "--max-restarts",
            "--max_restarts",
            min=0,
            help="default: what the config of the script allows",
            show_default=False,
        ),
    ] = None,
    recovery_timeout: Annotated[
        float,
        Option(
            "--recovery-timeout",
            "--recovery_timeout",
            min=1.0,
            help="seconds the machines have to find each other, also after a failure",
        ),
    ] = 300.0,
    nnodes: Annotated[str, Option(help="machines: 2, or LEAST:MOST like 1:2")] = "1",
    node_rank: Annotated[int, Option("--node-rank", "--node_rank")] = 0,
    master_addr: Annotated[str | None, Option("--master-addr", "--master_addr")] = None,
    master_port: Annotated[int | None, Option("--master-port", "--master_port")] = None,
) -> None:
    """Run a script once per rank. Everything after SCRIPT.py is passed to it."""
    from multi_gpu_training.cli.run_command import run_script

    hosts = {
        "nodes": nnodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    again = {"max_restarts": max_restarts, "recovery_timeout": recovery_timeout}
    raise typer.Exit(run_script([script, *ctx.args], num_gpus, share_gpu, again, hosts))


@app.command(context_settings=NAMES)
def launch(
    recipe: Annotated[str | None, Argument(help="ask for the rest")] = None,
    dry_run: Annotated[bool, Option(help="show the command, do not run it")] = False,
) -> None:
    """Ask what to train, on how many GPUs and at which rate, show the command and run it."""
    from multi_gpu_training.cli.launch_command import launch

    raise typer.Exit(launch(recipe, dry_run))


@app.command(context_settings=EXTRA)
def verify(
    ctx: typer.Context,
    target: Annotated[str, Argument(metavar="RECIPE|CONFIG|SCRIPT.py", callback=no_flag)],
    ranks: Annotated[str, Option(help="compared with one rank")] = "2,3",
    steps: Annotated[int, Option(help="optimizer steps")] = 8,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Prove that several ranks compute what one computes, or name why they do not."""
    from multi_gpu_training.cli.verify_command import verify_target

    raise typer.Exit(verify_target([target, *ctx.args], ranks, steps, device))


@app.command(context_settings={**EXTRA, **NAMES})
def check(
    ctx: typer.Context,
    target: Annotated[
        str | None, Argument(metavar="[RECIPE|CONFIG|SCRIPT.py]", callback=no_flag)
    ] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
    num_gpus: Annotated[
        int, Option(help="-1: all; without GPUs, CPU ranks", rich_help_panel=PLACE)
    ] = -1,
    save_dir: Annotated[str, Option(help="where runs will be kept")] = "runs",
    timeout: Annotated[float, Option(help="seconds that anything may hang")] = 60.0,
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
    save_curve: Annotated[
        str | None, Option(help="all-reduce times as CSV, for `mgt estimate --curve`")
    ] = None,
    nnodes: Annotated[
        str | None, Option(help="machines: 2, or of LEAST:MOST the most", rich_help_panel=HOSTS)
    ] = None,
    node_rank: Annotated[int | None, Option(rich_help_panel=HOSTS)] = None,
    master_addr: Annotated[str | None, Option(rich_help_panel=HOSTS)] = None,
    master_port: Annotated[int | None, Option(rich_help_panel=HOSTS)] = None,
) -> None:
    """Check this machine before training: software, GPUs, links, disk, network, real ranks.

    With a recipe, config or script also its memory, largest batch, time, and a ready command.
    Ends with 1 if anything fails. On several machines start it on each, or with torchrun.
    """
    from multi_gpu_training.cli.check_command import CheckFlags, check

    hosts = {
        "nodes": nnodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    command = [target, *ctx.args] if target is not None else []
    flags = CheckFlags(command, device, num_gpus, save_dir, timeout, as_json, save_curve, hosts)
    raise typer.Exit(check(flags))


@app.command(context_settings={**EXTRA, **NAMES})
def bench(
    ctx: typer.Context,
    target: Annotated[
        str, Argument(metavar="[RECIPE|CONFIG|SCRIPT.py]", callback=no_flag)
    ] = "image",
    ranks: Annotated[int | None, Option(help="default: every GPU; without GPUs, 2")] = None,
    steps: Annotated[int, Option(help="measured steps of a case")] = 50,
    warmup: Annotated[int | None, Option(help="steps before; 40 on GPUs, 5 on CPUs")] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
    modes: Annotated[str, Option(help="which of these to compare")] = "single,dp,ddp",
    batch_sizes: Annotated[
        str | None, Option(help="like 128,256,512: speed and memory of each")
    ] = None,
    precision: Annotated[
        bool, Option("--precision", help="float32, mixed, and mixed with accumulation")
    ] = False,
    tune: Annotated[
        bool, Option("--tune", help="search the settings of DDP and print the winner")
    ] = False,
    allow_compression: Annotated[
        bool, Option("--allow-compression", help="--tune may choose 16-bit gradients")
    ] = False,
    repeats: Annotated[
        int | None, Option(help="rounds over all cases; default 1, with --tune 3")
    ] = None,
    timeout: Annotated[float, Option(help="seconds a case may take")] = 300.0,
    out: Annotated[
        str | None, Option(help="folder for bench.json, .md and .png; default runs/bench/TIME")
    ] = None,
) -> None:
    """Measure a training on this machine: single, DP and DDP, batch sizes, precision, settings.

    Other flags and words are the recipe's or the script's, as for `mgt train`.
    """
    from multi_gpu_training.cli.bench_command import BenchFlags, bench

    flags = BenchFlags(
        [target, *ctx.args],
        ranks,
        steps,
        warmup,
        device,
        modes,
        batch_sizes,
        precision,
        tune,
        allow_compression,
        repeats,
        timeout,
        out,
    )
    raise typer.Exit(bench(flags))


@app.command(context_settings={**EXTRA, **NAMES})
def estimate(
    ctx: typer.Context,
    target: Annotated[
        str, Argument(metavar="[RECIPE|CONFIG|SCRIPT.py]", callback=no_flag)
    ] = "image",
    gpus: Annotated[
        str | None, Option(help="like 1,2,8; default 1, 2, 4 ... 1024", rich_help_panel=PLACE)
    ] = None,
    interconnect: Annotated[
        str | None, Option(help="what connects them; without it: a list", rich_help_panel=PLACE)
    ] = None,
    curve: Annotated[
        str | None, Option(help="CSV of all-reduce times of your own", rich_help_panel=PLACE)
    ] = None,
    gpus_per_node: Annotated[int, Option(rich_help_panel=PLACE)] = 8,
    scaling: Annotated[
        str | None,
        Option(help="weak: same batch per GPU; strong: same global batch", rich_help_panel=PLACE),
    ] = None,
    epochs: Annotated[float | None, Option(help="length of the training")] = None,
    samples: Annotated[float | None, Option(help="the same, in samples")] = None,
    price: Annotated[float | None, Option(help="of a GPU and hour", rich_help_panel=PRICES)] = None,
    price_per: Annotated[str, Option(help="gpu or node", rich_help_panel=PRICES)] = "gpu",
    price_source: Annotated[
        str | None, Option(help="where the price is from, to be printed", rich_help_panel=PRICES)
    ] = None,
    price_date: Annotated[
        str | None, Option(help="of which day it is; default today", rich_help_panel=PRICES)
    ] = None,
    catalog: Annotated[
        str | None, Option(help="CSV in SkyPilot's format", rich_help_panel=PRICES)
    ] = None,
    accelerator: Annotated[
        str | None, Option(help="its row, like H100", rich_help_panel=PRICES)
    ] = None,
    instance: Annotated[
        str | None, Option(help="or its instance type", rich_help_panel=PRICES)
    ] = None,
    region: Annotated[str | None, Option(rich_help_panel=PRICES)] = None,
    spot: Annotated[bool, Option("--spot", rich_help_panel=PRICES)] = False,
    electricity: Annotated[
        float | None, Option(help="price of a kWh, for GPUs of your own", rich_help_panel=PRICES)
    ] = None,
    profile: Annotated[
        str | None, Option(help="profile.json of an earlier estimate: measure nothing")
    ] = None,
    steps: Annotated[int, Option(help="measured steps")] = 50,
    warmup: Annotated[int | None, Option(help="steps before; 40 on GPUs, 5 on CPUs")] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
    timeout: Annotated[float, Option(help="seconds that measuring may take")] = 600.0,
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
    out: Annotated[
        str | None, Option(help="folder for what is written; default runs/estimate/NAME-TIME")
    ] = None,
) -> None:
    """Know before you rent: measure one GPU, forecast time, memory and cost on many.

    Other flags and words are the recipe's or the script's, as for `mgt train`.
    """
    from multi_gpu_training.cli.estimate_command import estimate
    from multi_gpu_training.cli.estimate_flags import EstimateFlags

    flags = EstimateFlags(
        [target, *ctx.args],
        gpus,
        interconnect,
        curve,
        gpus_per_node,
        scaling,
        epochs,
        samples,
        price,
        price_per,
        price_source,
        price_date,
        catalog,
        accelerator,
        instance,
        region,
        spot,
        electricity,
        profile,
        steps,
        warmup,
        device,
        timeout,
        as_json,
        out,
    )
    raise typer.Exit(estimate(flags))


@app.command()
def checkpoints(
    run: Annotated[str, Argument(metavar="RUN", help="a run folder, or one checkpoint")],
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
) -> None:
    """List what a run has saved, check every byte, and say which ones are intact.

    Ends with 1 if there is none to go on from.
    """
    from multi_gpu_training.cli.checkpoints_command import show_checkpoints

    raise typer.Exit(show_checkpoints(run, as_json))


@app.command()
def report(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="run folders")],
    out: Annotated[
        str | None, Option(help="the HTML file; default RUN/report.html, of several ./report.html")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="verdict and figures, for programs")] = False,
    html: Annotated[bool, Option(help="write the HTML file")] = True,
) -> None:
    """Show what a run did and why it is slow, and how several runs compare."""
    from multi_gpu_training.cli.report_command import report

    raise typer.Exit(report(runs, out, as_json, html))


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


@app.command(name="config-schema")
def config_schema() -> None:
    """Print the JSON schema of every setting."""
    import json

    from multi_gpu_training.config_file import schema

    print(json.dumps(schema(), indent=2))
