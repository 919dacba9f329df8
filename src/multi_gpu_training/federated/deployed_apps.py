"""The apps that Flower's programs import on the server and on each client of a real federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from multi_gpu_training.federated.deployment import ENDED
from multi_gpu_training.federated.federation_settings import FederatedSettings
from multi_gpu_training.federated.flower_client import deployed_setup, make_client_app
from multi_gpu_training.federated.flower_server import FederatedServer
from multi_gpu_training.safe_files import read_json, write_atomically

server_app = ServerApp()
client_app = make_client_app(deployed_setup)


def main(grid: Grid, context: Context) -> None:
    """Train the federation that `mgt federated server` has written down."""
    folder = Path(str(context.run_config["folder"]))
    asked = read_json(folder / "server.json", dict[str, Any])
    problem = ""
    with (folder / "server.log").open("w") as log:

        def say(line: str) -> None:
            print(line, file=log, flush=True)

        try:
            settings = FederatedSettings(**asked["settings"])
            FederatedServer(settings, folder, asked["resume"], say).run(grid, context)
        except BaseException as error:
            problem = str(error) or type(error).__name__
            raise
        finally:
            write_atomically(folder / ENDED, json.dumps({"problem": problem}))


server_app.main()(main)
