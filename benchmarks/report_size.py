"""How long the report of a long run takes, and how large it gets.

    python benchmarks/report_size.py --steps 100000 --ranks 8

writes an event folder as a run of that length would, with a line a step and rank (`log_every=1`)
and the phases of every step, which is more than a run records, and reports on it as
`mgt report` does, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLOW_RANK = 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="keep the folder here")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    return parser.parse_args()


def write_rank(folder: Path, rank: int, ranks: int, steps: int) -> int:
    """Events of one rank; rank SLOW_RANK waits for data. Returns bytes."""
    draw = random.Random(rank)
    head = {"v": 1, "run": "long", "attempt": 0, "rank": rank, "world_size": ranks, "host": "h"}
    path = folder / "events" / f"rank-{rank}.jsonl"
    slow = rank == SLOW_RANK % ranks
    with path.open("w") as file:

        def write(event: str, at: float, **fields: object) -> None:
            record = {**head, "time": 1.79e9 + at, "clock": at, "event": event, **fields}
            file.write(json.dumps(record) + "\n")

        facts = {"device": "cuda:0", "device_uuid": f"GPU-{rank}", "gradient_bytes": 4e7}
        facts |= {"global_batch": 32 * ranks, "per_rank_batch": 32, "accumulation": 1}
        write("rank", 0.0, step=0, **facts)
        for step in range(1, steps + 1):
            at, noise = step * 0.02, draw.random()
            loss = 2.0 * math.exp(-step / 2e4) + 0.1 * noise
            write("step", at, step=step, epoch=step // 5000, loss=loss, lr=1e-3, samples_per_s=3e3)
            own = {"input_s": 0.008 if slow else 0.0005, "forward_s": 0.003 + 1e-4 * noise}
            own |= {"backward_s": 0.006 + 1e-4 * noise, "optimizer_s": 0.001, "other_s": 1e-4}
            comm = 0.001 if slow else 0.0085
            interval = {"interval_steps": 1, "interval_s": 0.02, "interval_checkpoint_s": 0.0}
            interval["interval_input_s"] = own["input_s"]
            phases = {**own, "comm_s": comm, "checkpoint_s": 0.0}
            total = sum(phases.values())
            write("phases", at, step=step, source="step", **phases, step_s=total, **interval)
            if step % 100 == 0:
                write("device", at, gpu_utilization=90.0, memory_bytes=2e10, peak_bytes=2.1e10)
            if rank == 0 and step % 5000 == 0:
                write("checkpoint", at, step=step, stall_s=0.04, waited_s=0.0, bytes=4e8)
                write("epoch", at, epoch=step // 5000, step=step, train={"loss": loss}, val=None)
    return path.stat().st_size


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="report-size-") as temporary:
        folder = options.keep or Path(temporary) / "custom" / "long"
        (folder / "events").mkdir(parents=True, exist_ok=True)
        size = sum(
            write_rank(folder, r, options.ranks, options.steps) for r in range(options.ranks)
        )
        print(f"events: {size / 2**20:,.0f} MB", flush=True)
        command = [sys.executable, "-m", "multi_gpu_training", "report", str(folder)]
        begun, before = time.perf_counter(), os.times()
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        wall, after = time.perf_counter() - begun, os.times()
        html = (folder / "report.html").stat().st_size
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    result = {"steps": options.steps, "ranks": options.ranks, "events_bytes": size}
    result |= {"wall_s": wall, "cpu_s": cpu, "html_bytes": html}
    result |= {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    print(done.stdout.split("\n", 2)[1])
    print(f"report: {wall:.1f} s, {cpu:.1f} s of CPU, {html / 2**20:.2f} MB; {result}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if wall <= 10 and html <= 5 * 2**20 else 1


if __name__ == "__main__":
    sys.exit(main())
