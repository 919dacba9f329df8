"""Commands that look into runs, while they run and afterwards."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from multi_gpu_training.cli.flags import (
    EXTRA,
    NAMES,
    AnyTarget,
    AsJson,
    Device,
    Place,
    WatchedRuns,
    a_path,
)
from multi_gpu_training.cli.recipe_help import RecipeCommand

commands = typer.Typer()


@commands.command()
def report(
    runs: Annotated[
        list[str], Argument(metavar="RUN...", help="run folders, or their URLs", callback=a_path)
    ],
    out: Annotated[
        str | None,
        Option(
            help="the HTML file; default: RUN/report.html, or ./report.html for several",
            callback=a_path,
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print verdict and figures as JSON")] = False,
    html: Annotated[bool, Option(help="write the HTML file")] = True,
) -> None:
    """Explain what a run did and why it is slow, or compare several runs."""
    from multi_gpu_training.cli.report_command import report

    raise typer.Exit(report(runs, out, as_json, html))


@commands.command()
def dashboard(
    runs: WatchedRuns = None,
    host: Annotated[
        str, Option(help="address to listen on; default: this machine only")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0: pick a free port")] = 8765,
    token: Annotated[
        str | None, Option(envvar="MGT_DASHBOARD_TOKEN", help="default: a new one for each start")
    ] = None,
    allow_host: Annotated[
        list[str] | None, Option(help="another name of this server, besides HOST")
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="only show runs; no actions")] = False,
) -> None:
    """Watch runs live in a browser: compare, save or stop them, change their learning rate."""
    from multi_gpu_training.cli.dashboard_command import check_folders, dashboard

    check_folders("dashboard", runs or [])
    folders = runs or ["runs"]
    raise typer.Exit(dashboard(folders, host, port, token, allow_host or [], read_only))


@commands.command()
def top(
    runs: WatchedRuns = None,
    once: Annotated[bool, Option("--once", help="print the current state and exit")] = False,
    interval: Annotated[float, Option(help="seconds between updates", min=0.2, max=3600)] = 1.0,
) -> None:
    """Watch runs live in the terminal: ranks, phases, devices, events."""
    from multi_gpu_training.cli.dashboard_command import check_folders, top

    check_folders("top", runs or [])
    raise typer.Exit(top(runs or ["runs"], once, interval))


@commands.command(cls=RecipeCommand, context_settings={**EXTRA, **NAMES})
def profile(
    ctx: typer.Context,
    target: Annotated[str, AnyTarget(metavar="RUN|RECIPE|CONFIG|SCRIPT.py")],
    steps: Annotated[
        str | None, Option(help="like 20-24 or 20-24,200-202; default: 60-64, or 6-8 on CPUs")
    ] = None,
    ranks: Annotated[str, Option(help="like 0 or 0,3, or all")] = "0",
    num_gpus: Annotated[int, Place(help="-1: all; without GPUs, CPU ranks")] = -1,
    device: Device = "auto",
) -> None:
    """Trace a few steps: kernels, exposed communication, gaps, and what to improve first.

    Given a run folder, show what its traces found. Open the traces in Perfetto.
    """
    from multi_gpu_training.cli.profile_command import profile

    raise typer.Exit(profile([target, *ctx.args], steps, ranks, num_gpus, device))


@commands.command()
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
    wait: Annotated[
        float | None, Option(help="upload: time limit in seconds; default: 3600")
    ] = None,
    verify_key: Annotated[
        str | None,
        Option(help="key file: checkpoints not signed with it count as damaged", callback=a_path),
    ] = None,
    like: Annotated[
        str | None, Option(help="merge: take config and tokenizer from this folder")
    ] = None,
) -> None:
    """List the checkpoints of a run, check every byte, and say which are intact.

    Exits with 1 if none can be resumed. `upload RUN` copies a local run to the object storage in
    its save_dir, and exits with 1 if anything is still missing there. `merge RUN OUT` writes the
    newest weights, sharded or not, to OUT: a .safetensors file or a folder.
    """
    from multi_gpu_training.cli.checkpoints_command import (
        merge_checkpoint,
        show_checkpoints,
        upload_run,
    )
    from multi_gpu_training.errors import ConfigError

    does = words[0] if words[0] == "merge" or words[:-1] == ["upload"] else "list"
    belongs = {"--to": "upload", "--wait": "upload", "--like": "merge"}
    given = {"--to": to, "--wait": wait, "--like": like, "--verify-key": verify_key}
    given["--json"] = as_json or None
    useless = [
        flag for flag in given if given[flag] is not None and belongs.get(flag, "list") != does
    ]
    if useless:
        raise ConfigError(
            f"mgt checkpoints: {', '.join(useless)} would do nothing here; `mgt checkpoints "
            "--help` says what each belongs to"
        )
    if words[0] == "merge":
        raise typer.Exit(merge_checkpoint(words[1:], like))
    if len(words) == 2 and words[0] == "upload":
        raise typer.Exit(upload_run(words[1], to, 3600.0 if wait is None else wait))
    if len(words) > 1:
        raise ConfigError(f"mgt checkpoints takes one run, not {len(words)}: {' '.join(words)}")
    raise typer.Exit(show_checkpoints(words[0], as_json, verify_key))


@commands.command()
def explain(
    code: Annotated[str | None, Argument(help="such as MGT201; default: all codes")] = None,
) -> None:
    """Explain the code below an error message and what to do."""
    from multi_gpu_training.cli.explain_command import explain

    raise typer.Exit(explain(code))
