"""A real server and real clients: Flower's programs in network namespaces, with TLS and keys."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs Flower, in an environment of its own")

from flwr.app import Context, RecordDict
from local_grid import LocalGrid
from nodes import Network, why_not

from multi_gpu_training.checkpoint.store import CheckpointStore, load
from multi_gpu_training.federated.client_run import ClientSetup
from multi_gpu_training.federated.federation_keys import make_keys
from multi_gpu_training.federated.federation_settings import FederatedSettings, require_flower
from multi_gpu_training.federated.flower_client import make_client_app
from multi_gpu_training.federated.flower_server import FederatedServer

require_flower()  # here: no test may change the environment
pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
SCRIPT = Path(__file__).with_name("train_small.py")
ROUNDS, LONG_S = 2, 1200.0
MGT = ("-m", "multi_gpu_training", "federated")


def simulated(folder: Path) -> dict[str, np.ndarray]:
    """The same federation in this process, with one rank per client."""

    def client(context: Context) -> ClientSetup:
        number = int(context.node_config["partition-id"])
        words = ["0.9", "10", str(number), "2"]
        place = str(folder / str(number))
        name = "ab"[number]
        return ClientSetup(str(SCRIPT), place, {}, words, 1, "cpu", None, True, name=name)

    settings = FederatedSettings(rounds=ROUNDS, clients=2)
    grid = LocalGrid(make_client_app(client), 2)
    server = FederatedServer(settings, folder / "server", say=lambda line: None)
    return server.run(grid, Context(1, 0, {}, RecordDict(), {})).weights


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_clients_of_two_ranks_over_tls_train_what_the_simulation_trains(tmp_path: Path) -> None:
    network = Network(nodes=5)
    try:
        server, first, second, stranger, misled = network.nodes
        keys, other = tmp_path / "keys", tmp_path / "other"
        list(make_keys(keys, server.address, ["a", "b"]))
        list(make_keys(other, server.address, ["x"]))
        shutil.copy(SCRIPT, network.folder / "train.py")
        ca = ("--ca-file", keys / "ca.pem")
        server.start(
            *(*MGT, "server", "--clients", 2, "--rounds", ROUNDS, *ca),
            *("--address", "0.0.0.0:9092", "--certificate", keys / "server.pem"),
            *("--key", keys / "server.key", "--client-keys", keys / "clients"),
            *("--save-dir", "server", "--connect-timeout-s", LONG_S),
        )
        network.when(lambda: "serving on" in server.said, LONG_S, "the server starts")
        to = ("--server", f"{server.address}:9092", "--device", "cpu", "--num-gpus", 2)
        for node, name, part in ((first, "a", 0), (second, "b", 1)):
            own = ("--name", name, "--key", keys / f"{name}.key", "--save-dir", "client")
            node.start(*MGT, "client", SCRIPT, *to, *ca, *own, 0.9, 10, part, 2)
        # It knows the right CA, but the server does not know its key.
        stranger.start(*MGT, "client", SCRIPT, *to, *ca, "--key", other / "x.key", 0, 10, 0, 2)
        # Its key is known, but it trusts another CA: somebody else could be the server.
        wrong = ("--ca-file", other / "ca.pem", "--key", keys / "b.key")
        misled.start(*MGT, "client", SCRIPT, *to, *wrong, 0, 10, 0, 2)
        network.when(lambda: stranger.code is not None, LONG_S, "a stranger is refused")
        assert stranger.code == 1 and "refused this client" in stranger.said
        network.when(lambda: server.code is not None, LONG_S, "the federation ends")
        assert server.code == 0, network.said()
        log = (misled.disk / "runs" / "federated-client" / "supernode.log").read_text()
        assert "SuperNode ID" not in log and "taking part" in misled.said, log
        print(f"with another CA: {log[-600:]}", file=sys.stderr)
        path, _ = CheckpointStore(server.disk / "server" / "checkpoints").newest_intact()
        assert path is not None
        found = load(path)
        assert found.step == ROUNDS
        asked = found.state["history"][-1]["asked"]
        assert asked == ["a", "b"]
        ours = {name: tensor.numpy() for name, tensor in found.model.items()}
        report = (server.disk / "server" / "report.html").read_text()
    finally:
        network.close()
    assert "Clients" in report
    expected = simulated(tmp_path / "simulated")
    apart = max(float(np.abs(ours[name] - value).max()) for name, value in expected.items())
    print(f"largest difference to the simulation: {apart:.2e}", file=sys.stderr)
    assert apart < 1e-12  # float64, only the order of additions differs
