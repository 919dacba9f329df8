"""Commands for several machines."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument

from multi_gpu_training.cli.flags import (
    AsJson,
    ClusterToken,
    InsecureNetwork,
    a_path,
)

commands = typer.Typer()
cluster = typer.Typer(
    no_args_is_help=True, help="Make a token, or run a witness, for runs on several machines."
)


@commands.command()
def jobs(
    folder: Annotated[str, Argument(help="folder that you submitted from", callback=a_path)] = ".",
    as_json: AsJson = False,
) -> None:
    """List the Slurm jobs submitted from this folder, and their state."""
    from multi_gpu_training.cli.jobs_command import show_jobs

    raise typer.Exit(show_jobs(folder, as_json))


@commands.command()
def cancel(
    job: Annotated[list[str], Argument(metavar="JOB...", help="job numbers, from `mgt jobs`")],
) -> None:
    """Cancel Slurm jobs. A running job saves first and can be resumed."""
    from multi_gpu_training.cli.cancel_command import cancel_jobs

    raise typer.Exit(cancel_jobs(job))


@cluster.command()
def token(
    file: Annotated[str, Argument(help="where to write it", callback=a_path)] = "cluster.token",
) -> None:
    """Write a new token that only you can read; copy it to each machine of the run."""
    from multi_gpu_training.cli.cluster_token_command import new_token

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

    Start it on a separate machine, and pass --witness HOST:PORT to every node.
    """
    from multi_gpu_training.cli.cluster_token_command import run_witness
    from multi_gpu_training.distributed.cluster_token import remember

    remember(cluster_token, insecure_network)
    raise typer.Exit(run_witness(address))
