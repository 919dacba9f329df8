"""One run on the nodes of tests/nodes.py: what every rank did, read from the nodes' disks."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nodes import Machine, Network

PATIENCE_S = 180.0
TOKEN = "the token of the nodes in these tests"

TRAIN = """
import json, os, socket, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

settings = json.loads(sys.argv[1])
pause = settings.pop("pause")
seen = []

class Steps(Callback):
    def on_step_end(self, manager, result):
        step = result.step
        identity = manager.placement.identity
        line = {"time": time.time(), "attempt": identity.attempt, "step": step, "rank":
                identity.rank, "world": identity.world_size, "samples": seen[:],
                "node": os.environ.get("MGT_TEST_NODE", "")}
        seen.clear()
        with open("steps.txt", "a") as file:
            file.write(json.dumps(line) + "\\n")
        time.sleep(0.0 if os.path.exists("hurry") else pause)

def loss(model, batch):
    x, y, number = batch
    seen.extend(number.flatten().tolist())
    return nn.functional.mse_loss(model(x), y)

manager = MultiGPUTrainingManager(MultiGPUConfig(
    device="cpu", batch_size=4, checkpoint_frequency=5, progress="off", tensorboard=False,
    save_dir="runs", run_name="it", **settings))
seen.clear()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
x = torch.randn(80, 16, generator=torch.Generator().manual_seed(7))
data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(80))
manager.setup_training(model, data, loss_fn=loss, callbacks=[Steps()])
seen.clear()
for epoch in range(manager.progress.epochs_done, manager.config.epochs):
    manager.train_epoch(manager.train_loader, epoch)
manager.finish()
if manager.placement.identity.local_rank == 0:
    weights = {k: v.tolist() for k, v in model.state_dict().items()}
    Path("weights.json").write_text(json.dumps(weights))
"""


class Run:
    """The run on a network, as its folders show it."""

    def __init__(self, network: Network, epochs: int, pause: float, ranks: int = 1) -> None:
        self.network = network
        self.settings = json.dumps({"epochs": epochs, "pause": pause})
        self.ranks = ranks
        for node in network.nodes:
            (node.disk / "train.py").write_text(TRAIN)

    def start(self, node: Machine, *flags: str) -> None:
        number = self.network.nodes.index(node)
        many = len(self.network.nodes)
        hosts = ["--nnodes", f"1:{many}", "--node-rank", number, "--master-addr"]
        hosts += [self.network.nodes[0].address, "--master-port", 29500, "--num-gpus", self.ranks]
        source = str(Path(__file__).parent.parent / "src")
        node.start(
            *("-m", "multi_gpu_training", "run", *hosts, *flags, "train.py", self.settings),
            env={
                "PYTHONPATH": source,
                "MGT_CLUSTER_TOKEN": TOKEN,
                "MGT_TEST_NODE": str(number),
            },
        )

    @property
    def world(self) -> int:
        """Ranks of all nodes."""
        return len(self.network.nodes) * self.ranks

    def hurry(self) -> None:
        """No pause between steps from now on."""
        for node in self.network.nodes:
            (node.disk / "hurry").touch()

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for disk in {node.disk for node in self.network.nodes}:
            file = disk / "steps.txt"
            for line in file.read_text().splitlines() if file.exists() else []:
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue  # cut short by a kill
        return found

    def newest(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def reach(self, step: int, world: int | None = None) -> float:
        """When a step was made, on so many ranks."""

        def made() -> float | None:
            return min(
                (
                    line["time"]
                    for line in self.lines()
                    if line["step"] >= step and world in (None, line["world"])
                ),
                default=None,
            )

        def made_or_over() -> float | None:
            over = all(node.code is not None for node in self.network.nodes)
            when = made()
            assert when or not over, f"ended before step {step}\n{self.network.said()}"
            return when

        what = f"step {step}" + (f" on {world} ranks" if world else "")
        return float(self.network.when(made_or_over, PATIENCE_S, what))

    def end(self, nodes: list[Machine] | None = None) -> list[int | None]:
        nodes = self.network.nodes if nodes is None else nodes
        self.network.when(
            lambda: all(node.code is not None for node in nodes), PATIENCE_S, "end of the run"
        )
        return [node.code for node in nodes]

    def weights(self) -> dict[str, Any]:
        newest = max(
            (node.disk / "weights.json" for node in self.network.nodes),
            key=lambda file: file.stat().st_mtime if file.exists() else 0.0,
        )
        found: dict[str, Any] = json.loads(newest.read_text())
        return found

    def orders(self) -> dict[int, set[tuple[int, ...]]]:
        """Which samples made up each step, in every attempt that all its ranks completed."""
        parts: dict[tuple[int, int, int], dict[int, list[int]]] = {}
        for line in self.lines():
            key = (line["attempt"], line["world"], line["step"])
            parts.setdefault(key, {})[line["rank"]] = line["samples"]
        found: dict[int, set[tuple[int, ...]]] = {}
        for (_, world, step), ranks in parts.items():
            if len(ranks) == world:
                samples = tuple(sorted(s for part in ranks.values() for s in part))
                found.setdefault(step, set()).add(samples)
        return found

    def repeated(self) -> int:
        """The most steps that any attempt made again."""
        spans: dict[int, list[int]] = {}
        for line in self.lines():
            spans.setdefault(line["attempt"], []).append(line["step"])
        attempts = sorted(spans)
        return max(
            (max(spans[a]) - min(spans[b]) + 1 for a, b in itertools.pairwise(attempts)),
            default=0,
        )


def undisturbed(epochs: int, global_batch: int) -> dict[str, Any]:
    """The same run on one rank: its weights, and the samples of each step."""
    settings = {"epochs": epochs, "pause": 0.0, "global_batch_size": global_batch, "world_size": 1}
    source = str(Path(__file__).parent.parent / "src")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        command = [sys.executable, "train.py", json.dumps(settings)]
        env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=env, check=True)
        lines = [json.loads(line) for line in (folder / "steps.txt").read_text().splitlines()]
        orders = {line["step"]: {tuple(sorted(line["samples"]))} for line in lines}
        return {"weights": json.loads((folder / "weights.json").read_text()), "orders": orders}


def compare(row: dict[str, Any], reference: dict[str, Any]) -> None:
    """Weights to 1e-5, and every step of the same samples as in the undisturbed run."""
    import torch

    weights, orders = row.pop("weights", None), row.pop("orders", None)
    if weights is None or orders is None:
        row["same"] = False
        return
    worst = 0.0
    for name, values in reference["weights"].items():
        a, b = torch.tensor(values), torch.tensor(weights[name])
        worst = max(worst, float((a - b).norm() / a.norm()))
    row["difference"] = worst
    whole = set(orders) == set(reference["orders"])
    ordered = all(orders[step] == reference["orders"][step] for step in orders)
    row["same_samples"] = whole and ordered
    row["same"] = bool(row["ok"] and worst < 1e-5 and row["same_samples"])
