"""SIGTERM at random instants: is a checkpoint saved, how long does it take, is the result the same.

    python benchmarks/preemption.py --trials 30 --out preemption.json
    python benchmarks/preemption.py --quick

One run on two CPU ranks with a loader worker each, about 25 MB of state, a checkpoint every five
steps. It is stopped again and again: SIGTERM or SIGUSR1 goes to the launcher or to one rank, at a
random moment of training, validation or saving. Each time the exit code must be 143, the newest
checkpoint intact and no older than the last step that was done, and no process left. Then the run
goes on with `--resume auto`; at its end it must have the very bits of an undisturbed run.
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
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from multi_gpu_training.checkpoint.integrity import damage, read_manifest

PATIENCE_S = 120.0

TRAIN = """
import hashlib, os, sys, time
from pathlib import Path
import torch
from torch import nn
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.distributed import progress_slot

name, epochs, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

class Slow(torch.utils.data.Dataset):
    def __init__(self, samples, pause):
        self.inputs = torch.randn(samples, 256, generator=torch.Generator().manual_seed(1))
        self.pause = pause
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        time.sleep(self.pause)
        return self.inputs[index], index % 3

class Steps(Callback):
    def on_step_end(self, manager, result):
        step = result.step
        if manager.placement.is_main:
            Path(f"{name}.step").write_text(str(step))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 2048), nn.BatchNorm1d(2048), nn.Dropout(0.2),
                      nn.Linear(2048, 768), nn.Linear(768, 3))
manager = MultiGPUTrainingManager(MultiGPUConfig(
    device="cpu", run_name=name, save_dir="runs", epochs=epochs, global_batch_size=8,
    checkpoint_frequency=5, num_workers=1, tensorboard=False, progress="off", resume="auto"))
manager.fit(model, Slow(160, pause), Slow(64, pause), callbacks=[Steps()],
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3))
if manager.placement.is_main:
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    Path(f"{name}.weights").write_text(hashlib.sha256(bits).hexdigest())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="two trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    trials = 2 if given.quick else given.trials
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="preemption-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        epochs = 2 * trials + 2
        rows = []
        for _ in range(trials):
            rows.append(trial(folder, epochs, chance))
            print(json.dumps(rows[-1]), flush=True)
        same = finish(folder, "stopped", epochs) == finish(folder, "whole", epochs)
    print(table(rows, same))
    if given.out is not None:
        facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "same_bits": same}
        given.out.write_text(json.dumps({**facts, "trials": rows}, indent=1))


def start(folder: Path, name: str, epochs: int, pause: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "multi_gpu_training", "run", "--num-gpus", "2"]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, "train.py", name, str(epochs), str(pause)],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def finish(folder: Path, name: str, epochs: int) -> str:
    code = start(folder, name, epochs, 0.0).wait(20 * PATIENCE_S)
    if code != 0:
        raise SystemExit(
            f"{name} ended with {code}:\n{(folder / f'{name}.log').read_text()[-3000:]}"
        )
    return (folder / f"{name}.weights").read_text()


def trial(folder: Path, epochs: int, chance: random.Random) -> dict[str, Any]:
    """Start or resume the run, stop it, and look at what is left."""
    mark = folder / "stopped.step"
    mark.unlink(missing_ok=True)
    program = start(folder, "stopped", epochs, 0.004)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not mark.exists():
            if program.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "stopped.log").read_text()[-3000:])
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 2.5))
        target = chance.choice(["launcher", "rank 0", "rank 1"])
        number = chance.choice([signal.SIGTERM, signal.SIGUSR1])
        family = psutil.Process(program.pid).children(recursive=True)
        phase = phase_of(family)
        sent = time.monotonic()
        os.kill(pid_of(target, program.pid), number)
        code = program.wait(PATIENCE_S)
        seconds = time.monotonic() - sent
        alive = [p for p in psutil.wait_procs(family, timeout=1.0)[1] if p.is_running()]
    finally:
        program.kill()
    newest = max((folder / "runs" / "custom" / "stopped" / "checkpoints").glob("step-*"))
    done = int(mark.read_text() or 0)
    return {
        "target": target,
        "signal": number.name,
        "phase": phase,
        "code": code,
        "seconds": round(seconds, 3),
        "step": int(read_manifest(newest)["step"]),
        "done": done,
        "intact": damage(newest) is None and int(read_manifest(newest)["step"]) >= done,
        "left": len(alive),
    }


def pid_of(target: str, launcher: int) -> int:
    if target == "launcher":
        return launcher
    ranks = psutil.Process(launcher).children()
    return next(p.pid for p in ranks if p.environ().get("RANK") == target[-1])


def phase_of(family: list[psutil.Process]) -> str:
    """What rank 0 has noted about itself."""
    from multi_gpu_training.distributed import progress_slot

    for process in family:
        try:
            variables = process.environ()
        except psutil.Error:
            continue
        if variables.get("RANK") == "0" and "TORCHELASTIC_ERROR_FILE" in variables:
            return progress_slot.of_rank(variables["TORCHELASTIC_ERROR_FILE"]).phase.words
    return "unknown"


def table(rows: list[dict[str, Any]], same: bool) -> str:
    seconds = [row["seconds"] for row in rows]
    phases = Counter(row["phase"] for row in rows)
    where = ", ".join(f"{phase} {count}" for phase, count in phases.most_common())
    return "\n".join(
        [
            "| what | figure |",
            "|---|---|",
            f"| trials | {len(rows)} (rank 0 was in: {where}) |",
            f"| exit code 143 | {sum(row['code'] == 143 for row in rows)} |",
            f"| newest checkpoint intact, no step lost | {sum(row['intact'] for row in rows)} |",
            f"| nothing left running | {sum(not row['left'] for row in rows)} |",
            f"| signal to exit, median / longest | {statistics.median(seconds):.2f} s / "
            f"{max(seconds):.2f} s |",
            f"| the bits of the undisturbed run at the end | {'yes' if same else 'NO'} |",
        ]
    )


if __name__ == "__main__":
    main()
