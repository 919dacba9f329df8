"""All commands under their headings. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated

import typer
from typer import Option

from multi_gpu_training import __version__
from multi_gpu_training.cli import (
    cluster_commands,
    model_commands,
    planning_commands,
    training_commands,
    watching_commands,
)
from multi_gpu_training.cli.federated_command import federated
from multi_gpu_training.cli.flags import NAMES

app = typer.Typer(
    name="mgt",
    help="Train a PyTorch model on many GPUs and get what one GPU computes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={**NAMES, "help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    """Print what a report of a bug should name, without importing torch."""
    if not asked:
        return
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    python = platform.python_version()
    typer.echo(f"multi-gpu-training {__version__}, torch {torch}, Python {python}")
    raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, Option(help="show tracebacks; also works after a command")] = False,
    version: Annotated[
        bool,
        Option(
            "--version", help="show the versions and exit", callback=show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train a PyTorch model on many GPUs and get what one GPU computes."""


MACHINES = "Several machines"
for heading, group in (
    ("Train", training_commands.commands),
    ("Before a run", planning_commands.commands),
    ("During and after a run", watching_commands.commands),
    ("With a trained model", model_commands.commands),
    (MACHINES, cluster_commands.commands),
):
    for command in group.registered_commands:
        command.rich_help_panel = heading
        app.registered_commands.append(command)
app.add_typer(cluster_commands.cluster, name="cluster", rich_help_panel=MACHINES)
app.add_typer(federated, name="federated", rich_help_panel=MACHINES)
