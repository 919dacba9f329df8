"""Ray nodes on this machine, a raylet each, and one run on them as its folder shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import Program

SOURCE = str(Path(__file__).parent.parent / "src")
# Ray notices a dead node in five seconds rather than fifteen, and may take its time to start.
QUICK = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_niceness": "0",  # 15 by default: on a busy machine ranks would stand still
}

TRAIN = """
import json, os, sys, time
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
        identity = manager.placement.identity
        line = {"step": result.step, "rank": identity.rank, "world": identity.world_size,
                "attempt": identity.attempt, "pid": os.getpid(), "samples": seen[:]}
        seen.clear()
        with open(f"steps-{os.environ['MGT_TEST_NAME']}.txt", "a") as file:
            file.write(json.dumps(line) + "\\n")
        time.sleep(0.0 if os.path.exists("hurry") else pause)

def loss(model, batch):
    x, y, number = batch
    seen.extend(number.flatten().tolist())
    return nn.functional.mse_loss(model(x), y)

torch.set_default_dtype(torch.float64)
name = os.environ["MGT_TEST_NAME"]
manager = MultiGPUTrainingManager(MultiGPUConfig(
    device="cpu", global_batch_size=16, checkpoint_frequency=5, progress="off", tensorboard=False,
    save_dir="runs", run_name=name, learning_rate=1e-2, **settings))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
x = torch.randn(80, 16, generator=torch.Generator().manual_seed(7))
data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(80))
manager.setup_training(model, data, loss_fn=loss, callbacks=[Steps()])
seen.clear()
for epoch in range(manager.progress.epochs_done, manager.config.epochs):
    manager.train_epoch(manager.train_loader, epoch)
manager.finish()
if manager.placement.identity.rank == 0:
    weights = {k: v.tolist() for k, v in model.state_dict().items()}
    Path(f"weights-{name}.json").write_text(json.dumps(weights))
    print("trained to the end")
"""


@contextmanager
def ray_nodes(count: int, cpus: int) -> Iterator[Any]:
    """A Ray cluster whose head runs no ranks, and `count` nodes with room for `cpus` each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        add_node(cluster, 0)
        for _ in range(count):
            add_node(cluster, cpus)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, cpus: int) -> Any:
    head = {} if cpus else {"include_dashboard": False}
    for attempt in range(3):  # on a busy machine Ray itself may give up
        try:
            return cluster.add_node(num_cpus=cpus, object_store_memory=80 * 2**20, **head)
        except Exception:
            if attempt == 2:
                raise
    raise AssertionError


class RayRun:
    """A run called `name`; its program is the driver."""

    def __init__(self, folder: Path, name: str, epochs: int, pause: float = 0.0) -> None:
        self.folder, self.name = folder, name
        self.settings = json.dumps({"epochs": epochs, "pause": pause, "resume": "auto"})
        (folder / "train.py").write_text(TRAIN)

    def start(self, *flags: object) -> Program:
        env = {"PYTHONPATH": SOURCE, "MGT_TEST_NAME": self.name}
        # The tests' own way to start quickly is not on the nodes' path.
        return Program(
            *("-m", "multi_gpu_training", "run", *flags, "train.py", self.settings),
            cwd=self.folder,
            env=env,
        )

    @property
    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / f"steps-{self.name}.txt"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def reached(self, step: int, attempt: int = 0) -> bool:
        return any(s["step"] >= step and s["attempt"] >= attempt for s in self.steps)

    @property
    def weights(self) -> dict[str, Any]:
        text = (self.folder / f"weights-{self.name}.json").read_text()
        weights: dict[str, Any] = json.loads(text)
        return weights

    def samples(self) -> dict[int, list[int]]:
        """The samples of each step, in rank order, from the last time that it was computed."""
        found: dict[int, dict[int, list[int]]] = {}
        worlds: dict[int, int] = {}
        for line in self.steps:
            found.setdefault(line["step"], {})[line["rank"]] = line["samples"]
            worlds[line["step"]] = line["world"]
        return {
            step: [sample for rank in range(worlds[step]) for sample in by_rank[rank]]
            for step, by_rank in sorted(found.items())
        }


def quick_nodes() -> None:
    """Before a cluster is made."""
    os.environ.update(QUICK)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
