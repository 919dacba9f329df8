"""All clients of a federation on this machine, with Flower's simulation engine.

Clients of one rank train inside Flower's worker processes; clients of several ranks, and those with
`--client-processes`, in processes of their own, as real clients do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.data.partitions import check_partition
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.federated.client_run import ClientSetup
from multi_gpu_training.federated.federation_settings import FederatedSettings, require_flower
from multi_gpu_training.portability import usable_cores
from multi_gpu_training.recipes import RECIPES


@dataclass(frozen=True)
class Simulation:
    """A federation on one machine. target: a recipe or a script, with its settings or words."""

    target: str
    folder: Path
    federation: FederatedSettings
    partition: str = "iid"
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    ranks: int = 1
    device: str = "auto"
    client_processes: bool = False
    parallel: int | None = None
    gpus_per_client: float = 0.0

    def client(self, number: int) -> ClientSetup:
        digits = len(str(self.federation.clients - 1))
        part = {
            "how": self.partition,
            "parts": self.federation.clients,
            "part": number,
            "seed": self.federation.seed,
        }
        return ClientSetup(
            self.target,
            str(self.folder.absolute() / "clients" / f"{number:0{digits}d}"),
            dict(self.settings),
            list(self.words),
            self.ranks,
            self.device,
            part,
            in_process=self.ranks == 1 and not self.client_processes,
            name=f"client {number:0{digits}d}",
        )


def simulate(
    simulation: Simulation, resume: bool = False, say: Callable[[str], None] = print
) -> Any:
    """Train the federation; returns the state of its server."""
    federation = simulation.federation
    require_flower(simulation=True, accountant=federation.dp != "off")
    check_partition(simulation.partition)
    _check_target(simulation)
    # What is imported here brings Flower with it.
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from multi_gpu_training.federated.flower_client import make_client_app
    from multi_gpu_training.federated.flower_server import FederatedServer

    # A client's error is told by the server, in one line; Flower would add two tracebacks.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("flwr").addFilter(_not_of_a_client)
    server = FederatedServer(federation, simulation.folder, resume, say)
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        server.run(grid, context)

    app.main()(main)

    def setup_of(context: Context) -> ClientSetup:
        return simulation.client(int(context.node_config["partition-id"]))

    cores = len(usable_cores())
    parallel = simulation.parallel or max(1, cores // simulation.ranks)
    # Ray starts as many workers as this allows, each with its share of the threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (parallel * simulation.ranks))))
    resources = {"num_cpus": 1, "num_gpus": simulation.gpus_per_client}
    run_simulation(
        app,
        make_client_app(setup_of),
        federation.clients,
        backend_config={
            "init_args": {
                "address": "local",  # never a cluster that somebody else has started here
                "num_cpus": parallel,
                "include_dashboard": False,
                "log_to_driver": False,
                "logging_level": logging.ERROR,
            },
            "client_resources": resources,
        },
    )
    return server.state


def _not_of_a_client(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "ClientAppException" not in text and "processing a message by" not in text


def _check_target(simulation: Simulation) -> None:
    script = simulation.target not in RECIPES
    if script and not Path(simulation.target).is_file():
        raise ConfigError(
            f"{simulation.target!r} is neither a recipe ({', '.join(RECIPES)}) nor a script"
        )
    if script and simulation.settings:
        raise ConfigError("a script has its own settings; give it words, not settings")
