"""One rank of two stands still: how long until it is named, and whether the run goes on.

    python benchmarks/hangs.py --trials 4 --out hangs.json
    python benchmarks/hangs.py --quick

Each trial is a whole run with hang_timeout_s=3: a small model on two CPU ranks. At a random step
one rank is stopped with SIGSTOP, or a function of the user sleeps for ever. Measured are the time
from the fault until the report, whether the report names that rank, its phase and its line, and
whether the run ends with exit code 0 and the very bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 180.0
LIMIT_S = 3.0
LAUNCHERS = {
    "mgt": ["-m", "multi_gpu_training", "run", "--num-gpus", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"],
}

TRAIN = """
import hashlib, os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

class Steps(Callback):
    def on_step_end(self, manager, result):
        step = result.step
        rank = manager.placement.dp_rank
        Path(f"step-{rank}").write_text(str(step))
        time.sleep(0.05)

def loss_fn(model, batch):
    asked = Path(f"sleep-{os.environ['RANK']}")
    if asked.exists():
        asked.rename("sleeping")
        time.sleep(10**6)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

manager = MultiGPUTrainingManager(MultiGPUConfig(
    device="cpu", batch_size=4, epochs=6, checkpoint_frequency=5, progress="off",
    tensorboard=False, save_dir="runs", run_name="it", hang_timeout_s=float(sys.argv[1])))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))
x = torch.randn(80, 16, generator=torch.Generator().manual_seed(7))
manager.fit(model, TensorDataset(x, x.sum(1, keepdim=True)), loss_fn=loss_fn, callbacks=[Steps()])
if manager.placement.is_main:
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    Path("weights.txt").write_text(hashlib.sha256(bits).hexdigest())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=4, help="of each kind of fault")
    parser.add_argument("--launcher", choices=[*LAUNCHERS, "both"], default="mgt")
    parser.add_argument("--quick", action="store_true", help="one trial of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        reference = undisturbed(Path(name) / "undisturbed")
        for launcher in LAUNCHERS if given.launcher == "both" else [given.launcher]:
            for number in range(1 if given.quick else given.trials):
                for kind in ("sleep", "SIGSTOP"):
                    folder = Path(name) / f"{launcher}-{kind}-{number}"
                    rows.append(trial(folder, launcher, kind, chance, reference))
                    print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if given.out is not None:
        facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "limit_s": LIMIT_S}
        given.out.write_text(json.dumps({**facts, "trials": rows}, indent=1))


def start(folder: Path, launcher: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, *LAUNCHERS[launcher]]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            [*command, "train.py", str(LIMIT_S)],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )


def undisturbed(folder: Path) -> str:
    if start(folder, "mgt").wait(PATIENCE_S) != 0:
        raise SystemExit((folder / "log.txt").read_text()[-3000:])
    return (folder / "weights.txt").read_text()


def trial(
    folder: Path, launcher: str, kind: str, chance: random.Random, reference: str
) -> dict[str, Any]:
    program = start(folder, launcher)
    victim = chance.randrange(2)
    log = folder / "log.txt"
    try:
        wait_for(lambda: step_of(folder, victim) >= 6 + chance.randrange(10), program, log)
        time.sleep(chance.uniform(1.0, 1.5))  # a line is noted every second
        if kind == "sleep":
            (folder / f"sleep-{victim}").touch()
            wait_for((folder / "sleeping").exists, program, log)
        else:
            ranks = psutil.Process(program.pid).children()
            os.kill(
                next(p.pid for p in ranks if p.environ().get("RANK") == str(victim)), signal.SIGSTOP
            )
        since = time.monotonic()
        wait_for(lambda: "hang:" in log.read_text(), program, log)
        named_s = time.monotonic() - since
        time.sleep(0.1)
        text = log.read_text()
        code = program.wait(PATIENCE_S)
    finally:
        program.kill()
    line = "loss_fn" if kind == "sleep" else r"\S+"
    return {
        "launcher": launcher,
        "fault": kind,
        "rank": victim,
        "named_s": round(named_s, 2),
        "named": f"rank {victim} holds the others up" in text
        and re.search(rf"rank {victim}: step \d+, [a-z ]+, at \S+:\d+ in {line}", text) is not None,
        "code": code,
        "same_bits": (folder / "weights.txt").exists()
        and (folder / "weights.txt").read_text() == reference,
    }


def step_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / f"step-{rank}").read_text() or 0)
    except FileNotFoundError:
        return 0


def wait_for(happened: Any, program: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if program.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(log.read_text()[-3000:])
        time.sleep(0.02)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| launcher | fault | trials | named | seconds to the report, median / longest "
        f"(limit {LIMIT_S:g} s) | recovered, same bits |",
        "|---|---|---|---|---|---|",
    ]
    for launcher, kind in sorted({(row["launcher"], row["fault"]) for row in rows}):
        mine = [row for row in rows if (row["launcher"], row["fault"]) == (launcher, kind)]
        seconds = [row["named_s"] for row in mine]
        well = sum(row["code"] == 0 and row["same_bits"] for row in mine)
        lines.append(
            f"| {launcher} | {kind} | {len(mine)} | {sum(row['named'] for row in mine)} | "
            f"{statistics.median(seconds):.1f} / {max(seconds):.1f} | {well} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
