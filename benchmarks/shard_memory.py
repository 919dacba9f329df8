"""Memory of sharded ranks: does each hold its part of the state, and little more?

    python benchmarks/shard_memory.py --out shard_memory.json
    python benchmarks/shard_memory.py --ranks 2 --width 900

Four CPU ranks train a stack of linear layers (311 MB of float32 weights) with AdamW. Looked at is
the resident memory of each rank above what it had before the model was built: after the build, at
its peak in the steps, and, as a figure by itself, at its peak while it was built. The formula for
the steps is (weights, gradients, both moments) / ranks + 3 x the largest block + activations.

glibc keeps freed memory for itself unless it is told not to: MALLOC_MMAP_THRESHOLD_ is set for the
ranks, so that what is freed is seen to be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

BATCH, STEPS = 8, 4
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1800)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--mode", choices=["fsdp", "ddp"], default="fsdp")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # what a rank runs
    given = parser.parse_args()
    if given.train is not None:
        train(given)
        return
    found = measure(given)
    text = table(given, found)
    print(text)
    if given.out is not None:
        document = {"machine": machine(), "settings": settings(given), "ranks": found}
        given.out.write_text(json.dumps(document, indent=1))
        given.out.with_suffix(".md").write_text(text + "\n")


def settings(given: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(given, name) for name in ("ranks", "width", "blocks", "mode")}


def measure(given: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="shard-memory-") as folder:
        words = [f"--{name}={value}" for name, value in settings(given).items()]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, f"--train={folder}", *words]
        subprocess.run(command, env=env, check=True)
        files = sorted(Path(folder).glob("rank-*.json"))
        return [json.loads(file.read_text()) for file in files]


# On a rank


class Peak(Callback):
    """The resident memory after the build, and its peak in the steps behind the first."""

    def __init__(self) -> None:
        self.facts: dict[str, float] = {}

    def on_setup(self, run: Any) -> None:
        self.facts["build_peak"], self.facts["built"] = resident("VmHWM"), resident("VmRSS")
        forget_peak()

    def on_step_end(self, run: Any, result: Any) -> None:
        self.facts["peak"] = resident("VmHWM")


def train(given: argparse.Namespace) -> None:
    ranks = {"fsdp": "fully_sharded", "ddp": "distributed_data_parallel"}
    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            training_mode=ranks[given.mode], world_size=given.ranks, device="cpu", epochs=1,
            global_batch_size=BATCH, progress="off", tensorboard=False, monitor=False,
            save_dir=str(given.train), enable_fault_tolerance=False, report=False,
        )
    )  # fmt: skip
    data = TensorDataset(torch.randn(BATCH * STEPS, given.width), torch.zeros(BATCH * STEPS, 1))
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # what it imports is no part of the model
    peak = Peak()
    forget_peak()
    before = resident("VmRSS")

    def build() -> nn.Module:
        wide = given.width
        layers = [nn.Linear(wide, wide, bias=False) for _ in range(given.blocks)]
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(wide, 1))

    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731
    manager.fit(build, data, loss_fn=loss, callbacks=[peak])
    facts = {name: value - before for name, value in peak.facts.items()}
    (given.train / f"rank-{manager.placement.dp_rank}.json").write_text(json.dumps(facts))


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# The table


def formula(given: argparse.Namespace) -> float:
    block = 4.0 * given.width**2
    state = 4 * block * given.blocks  # weights, gradients, two moments
    activations = 4.0 * given.width * (given.blocks + 2) * -(-BATCH // given.ranks)
    parts = given.ranks if given.mode == "fsdp" else 1
    return state / parts + 3 * block + activations


def table(given: argparse.Namespace, found: list[dict[str, float]]) -> str:
    asked, weights = formula(given), 4 * given.width**2 * given.blocks / MB
    lines = [
        machine(),
        "",
        f"{given.ranks} CPU ranks, {given.mode}, {weights:.0f} MB of weights in {given.blocks} "
        f"blocks, AdamW, float32. The formula gives {asked / MB:.0f} MB.",
        "",
        "| rank | peak of the steps | against the formula | after the build | peak of the build |",
        "|---|---|---|---|---|",
    ]
    for rank, facts in enumerate(found):
        lines.append(
            f"| {rank} | {facts['peak'] / MB:.0f} MB | {facts['peak'] / asked - 1:+.1%} | "
            f"{facts['built'] / MB:.0f} MB | {facts['build_peak'] / MB:.0f} MB |"
        )
    return "\n".join(lines)


def machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}: `python benchmarks/shard_memory.py {' '.join(sys.argv[1:])}`"
    )


if __name__ == "__main__":
    main()
