"""Long runs: do memory and event files stay bounded, and can the report still be read?

    python benchmarks/long_run.py --steps 1000000 --out long_run.json
    python benchmarks/long_run.py --days 30 --ranks 2

`--steps` trains that many real steps of a tiny model in one process, with every default that writes
something, and notes the memory after each tenth. `--days` writes the events of a run of that length
through the real event files, at a clock that runs ahead: 20 steps per second, a log line each
second, device readings every 2 s, checkpoints, and a restart every half an hour. Then `mgt report`
runs in its own process; its time and peak memory are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

LEAST_REPORT_S, MOST_REPORT_MB, MOST_GROWTH_MB = 10.0, 500, 20
DAY = 86_400.0


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def train(folder: Path, steps: int, progress: Path | None) -> dict[str, Any]:
    """Real steps; memory after each hundredth of them.

    `progress` is written as they go, so that a run that is cut off still tells how far it came.
    """
    from tiny import FEATURES, line, manager_for, points, sgd, squares

    from multi_gpu_training import Callback

    assert FEATURES
    memory: list[float] = []
    events = folder / "custom" / "long" / "events"

    class Watch(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step % (steps // 100) == 0:
                memory.append(resident())
                size = sum(file.stat().st_size for file in events.iterdir()) / 2**20
                told = f"step {result.step:,}: {memory[-1]:.0f} MB, events {size:.1f} MB"
                print(f"  {told}, after {time.monotonic() - begun:.0f} s", flush=True)
                if progress is not None:
                    facts = {"step": result.step, "memory_mb": memory, "events_mb": size}
                    progress.write_text(json.dumps(facts) + "\n")

    settings = {"training_mode": "single", "batch_size": 16, "epochs": steps, "max_steps": steps}
    settings |= {"enable_fault_tolerance": True, "run_name": "long", "log_every": 1}
    settings |= {"checkpoint_frequency": steps // 20, "tensorboard": False, "steps_per_epoch": None}
    data = points(16 * 1000)
    manager = manager_for(folder, **settings)
    begun = time.monotonic()
    manager.fit(line(), data, loss_fn=squares, optimizer=sgd, callbacks=[Watch()])
    seconds = time.monotonic() - begun
    # The first tenth still fills caches.
    growth = memory[-1] - memory[len(memory) // 10] if memory else 0.0
    return {"steps": steps, "seconds": seconds, "memory_mb": memory, "growth_mb": growth}


class Clock:
    now = 1.79e9

    def read(self) -> float:
        return self.now


def simulate(folder: Path, days: float, ranks: int) -> dict[str, Any]:
    """Events of a long run with many restarts, written as a run writes them."""
    from multi_gpu_training.monitoring.events import EventFile
    from multi_gpu_training.monitoring.phase_names import PHASES

    written, begun, before = 0, time.monotonic(), resident()
    for rank in range(ranks):
        clock = Clock()
        step = 0
        with mock.patch("time.time", clock.read), mock.patch("time.perf_counter", clock.read):
            for start in range(int(days * 48)):
                path = folder / "events" / f"rank-{rank}.jsonl"
                file = EventFile(path, run="long", attempt=start, rank=rank, world_size=ranks)
                facts = {"device": "cpu", "global_batch": 64, "per_rank_batch": 32, "copies": ranks}
                file.write("rank", step=step, **facts)
                for second in range(1800):
                    clock.now += 1.0
                    step += 20
                    file.write(
                        "step",
                        step=step,
                        loss=2.0 / (1 + step * 1e-6),
                        lr=1e-3,
                        samples_per_s=1280.0,
                    )
                    written += 1
                    if second % 2 == 0:
                        file.write("device", memory_bytes=1e9, peak_bytes=1.1e9, cpu_percent=90.0)
                        written += 1
                    if second % 50 == 0:
                        file.write("checkpoint", step=step, stall_s=0.01, waited_s=0.0, bytes=1e6)
                        phases = dict.fromkeys((f"{name}_s" for name in PHASES), 0.007)
                        file.write("phases", step=step, source="step", **phases, step_s=0.05)
                        written += 2
                clock.now += 20.0  # the pause of a restart
                step -= 400  # computed again since the last checkpoint
                file.close()
    (folder / "config.yaml").write_text("batch_size: 32\n")
    return {"days": days, "ranks": ranks, "lines": written, "seconds": time.monotonic() - begun,
            "growth_mb": resident() - before}  # fmt: skip


class _Peak(threading.Thread):
    """The peak memory of a program. `ru_maxrss` would count its parent's before the exec too."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.status = Path(f"/proc/{pid}/status")
        self.mb = 0.0

    def run(self) -> None:
        while True:
            try:
                lines = self.status.read_text().splitlines()
            except OSError:
                return
            peak = [line for line in lines if line.startswith("VmHWM")]
            if not peak:  # it has ended
                return
            self.mb = max(self.mb, int(peak[0].split()[1]) / 1024)
            time.sleep(0.02)


def report(folder: Path) -> dict[str, Any]:
    """`mgt report` in its own process: time, peak memory, and what the events take."""
    sizes = [file.stat().st_size for file in (folder / "events").iterdir()]
    command = [sys.executable, "-m", "multi_gpu_training", "report", str(folder)]
    begun, before = time.monotonic(), os.times()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as done:
        assert done.stdout is not None
        peak = _Peak(done.pid)
        peak.start()
        said = done.stdout.read()
        done.wait()
        peak.join()
    after = os.times()
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    found = {
        "events_mb": sum(sizes) / 2**20,
        "files": len(sizes),
        "wall_s": time.monotonic() - begun,
    }
    found |= {"cpu_s": cpu, "peak_mb": peak.mb, "code": done.returncode}
    found["said"] = said[-1500:]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--days", type=float, default=0.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {"python": platform.python_version(), "load": os.getloadavg()[0]}
    progress = given.out and given.out.with_suffix(".progress.json")
    well = True
    for name, asked in (("trained", given.steps), ("simulated", given.days)):
        if not asked:
            continue
        with tempfile.TemporaryDirectory(prefix="long-run-") as temporary:
            folder = Path(temporary) / "custom" / "long"
            (folder / "events").mkdir(parents=True)
            if name == "trained":
                told = train(Path(temporary), given.steps, progress)
            else:
                told = simulate(folder, given.days, given.ranks)
            told["report"] = report(folder)
        results[name] = told
        read = told["report"]
        print(f"{name}: {json.dumps({k: v for k, v in told.items() if k != 'report'})}")
        print(
            f"  report: {read['wall_s']:.1f} s ({read['cpu_s']:.1f} s of CPU), "
            f"{read['peak_mb']:.0f} MB; events {read['events_mb']:.0f} MB in {read['files']} files"
        )
        well &= read["code"] == 0 and read["cpu_s"] <= LEAST_REPORT_S
        well &= read["peak_mb"] <= MOST_REPORT_MB and told["growth_mb"] <= MOST_GROWTH_MB
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
