"""One rank of two is killed with `kill -9` while it trains: how long until all train again.

    python benchmarks/recovery.py --trials 30 --out recovery.json
    python benchmarks/recovery.py --quick

Each trial is a whole run: a small model on two CPU ranks, default restart settings, a checkpoint
every five steps. A rank chosen at random is killed at a random moment after step 10. Measured are
the time until the other rank has been ended and until the first step after the restart is done, and
whether the run ends with exit code 0, without a process left, and with the very bits of an
undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 120.0

TRAIN = """
import hashlib, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

class Steps(Callback):
    def on_step_end(self, manager, result):
        step = result.step
        identity = manager.placement.identity
        if identity.rank == 0:
            with open("steps.txt", "a") as file:
                file.write(f"{time.time()} {identity.attempt} {step}\\n")
        time.sleep(0.05)

manager = MultiGPUTrainingManager(MultiGPUConfig(
    device="cpu", world_size=2, batch_size=4, epochs=6, checkpoint_frequency=5, progress="off",
    tensorboard=False, save_dir="runs", run_name="it"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))
x = torch.randn(80, 16, generator=torch.Generator().manual_seed(7))
manager.fit(model, TensorDataset(x, x.sum(1, keepdim=True)), callbacks=[Steps()])
if manager.placement.is_main:
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    Path("weights.txt").write_text(hashlib.sha256(bits).hexdigest())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--lanes", type=int, default=1, help="trials side by side: it needs cores")
    parser.add_argument("--quick", action="store_true", help="two trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="recovery-") as folder,
        ThreadPoolExecutor(given.lanes) as lanes,
    ):
        reference = undisturbed(Path(folder) / "undisturbed")

        def one(number: int) -> dict[str, Any]:
            chance = random.Random(1000 * given.seed + number)
            return trial(Path(folder) / str(number), chance, reference)

        for row in lanes.map(one, range(2 if given.quick else given.trials)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows))
    if given.out is not None:
        facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "trials": rows}
        facts["lanes"] = given.lanes
        given.out.write_text(json.dumps(facts, indent=1))
        command = f"python benchmarks/recovery.py {' '.join(sys.argv[1:])}"
        note = f"{os.cpu_count()} cores, {platform.platform()}: `{command}`"
        given.out.with_suffix(".md").write_text(f"{note}\n\n{table(rows)}\n")
    if not all(row["recovered"] for row in rows):
        sys.exit(1)


def start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RECOVERY_TRIAL": str(folder)}
    with (folder / "out.txt").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, stdout=out, stderr=out, env=env
        )


def undisturbed(folder: Path) -> str:
    code = start(folder).wait(PATIENCE_S)
    if code:
        sys.exit((folder / "out.txt").read_text())
    return (folder / "weights.txt").read_text()


def trial(folder: Path, chance: random.Random, reference: str) -> dict[str, Any]:
    victim = chance.randrange(2)
    launcher = start(folder)
    try:
        wait_for(folder, attempt=0, step=10)
        time.sleep(chance.uniform(0, 1))
        ranks = {
            int(p.environ()["RANK"]): p
            for p in psutil.Process(launcher.pid).children()
            if "RANK" in p.environ()
        }
        killed = time.time()
        os.kill(ranks[victim].pid, signal.SIGKILL)
        psutil.wait_procs([ranks[1 - victim]], timeout=PATIENCE_S)
        ended = time.time() - killed
        again = wait_for(folder, attempt=1, step=1) - killed
        code = launcher.wait(PATIENCE_S)
    finally:
        launcher.kill()
        launcher.wait()
    same = code == 0 and (folder / "weights.txt").read_text() == reference
    left = processes_of(folder)
    return {
        "victim": victim,
        "others_ended_s": round(ended, 3),
        "training_again_s": round(again, 3),
        "exit_code": code,
        "same_bits": same,
        "processes_left": left,
        "recovered": same and left == 0,
    }


def wait_for(folder: Path, attempt: int, step: int) -> float:
    """When a step was done, as soon as it is known."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        file = folder / "steps.txt"
        for line in file.read_text().splitlines() if file.exists() else []:
            parts = line.split()
            if len(parts) == 3 and int(parts[1]) == attempt and int(parts[2]) >= step:
                return float(parts[0])
        time.sleep(0.02)
    raise TimeoutError((folder / "out.txt").read_text())


def processes_of(folder: Path) -> int:
    count = 0
    for process in psutil.process_iter():
        try:
            count += process.environ().get("RECOVERY_TRIAL") == str(folder)
        except (psutil.Error, OSError):
            continue
    return count


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{sum(row['recovered'] for row in rows)} of {len(rows)} recovered: exit code 0, the bits "
        "of an undisturbed run, no process left",
        "",
        "| | median | slowest |",
        "|---|---|---|",
    ]
    for name, text in (
        ("others_ended_s", "the other rank ended"),
        ("training_again_s", "training again"),
    ):
        values = [row[name] for row in rows]
        lines.append(f"| {text} | {statistics.median(values):.2f} s | {max(values):.2f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
