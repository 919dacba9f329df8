"""How fast the dashboard shows 50 runs, and whether the memory of the browser stays flat.

    python benchmarks/dashboard.py --folder /tmp/runs --minutes 30 --out benchmarks/dashboard.json

Needs `.[engines]` and Chromium. Writes 50 run folders, one of 200,000 steps on 8 ranks (minutes,
unless --folder has them from before), opens the page, and measures: the first paint and the first
list; the time from a line in an event file to its number on the page; heap and DOM of the page
while a run writes twice per second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "dashboard")]

from browser import DashboardProcess, chromium_page  # noqa: E402

from multi_gpu_training.checkpoint.run_lock import RunLock  # noqa: E402
from multi_gpu_training.monitoring.events import EventFile  # noqa: E402

PHASES = ("input", "forward", "backward", "comm", "optimizer", "checkpoint", "other")


def write_run(path: Path, ranks: int, steps: int, every: int, ended: bool = True) -> None:
    """A run folder as a training leaves it."""
    (path / "events").mkdir(parents=True)
    rate = random.choice((0.1, 0.2, 0.3))
    text = f"training_mode: distributed_data_parallel\nepochs: 10\nlearning_rate: {rate}\n"
    (path / "config.yaml").write_text(text)
    (path / "environment.json").write_text(json.dumps({"host": "node", "gpus": []}))
    for rank in range(ranks):
        events = open_events(path, rank, ranks)
        facts: dict[str, Any] = {"device": "cuda:0", "device_name": "a GPU", "global_batch": 256}
        facts |= {"epoch_steps": steps // 10, "epoch_samples": steps // 10 * 256}
        events.write("rank", step=0, **facts)
        for step in range(every, steps + 1, every):
            write_step(events, step, steps, timed=step % (5 * every) == 0)
        if ended:
            events.write("run_end", step=steps, steps=steps, elapsed_s=steps / 20)
        events.close()


def open_events(path: Path, rank: int, ranks: int) -> EventFile:
    file = path / "events" / f"rank-{rank}.jsonl"
    return EventFile(file, run=path.name, attempt=0, rank=rank, world_size=ranks)


def write_step(events: EventFile, step: int, steps: int, timed: bool) -> None:
    loss = 2 / (1 + 5 * step / steps) + random.random() / 10
    speed = {"samples_per_s": 5000 + 100 * random.random(), "input_wait": 0.01}
    events.write("step", step=step, epoch=0, loss=loss, lr=0.1, grad_norm=1.0, **speed)
    if timed:
        took = {f"{phase}_s": 0.005 for phase in PHASES}
        interval = {"interval_steps": 5, "interval_s": 0.2, "interval_input_s": 0.02}
        events.write("phases", step=step, source="step", **took, step_s=0.035, **interval)
        use = 90 + 9 * random.random()
        events.write("device", gpu_utilization=use, gpu_memory_bytes=6e10, peak_bytes=6e10)


def make_runs(folder: Path) -> None:
    if not (folder / "image" / "long").is_dir():
        write_run(folder / "image" / "long", 8, 200_000, 1)
    for number in range(49):
        if not (folder / "image" / f"run-{number:02d}").is_dir():
            write_run(folder / "image" / f"run-{number:02d}", 2, 2_000, 20)


def measure(folder: Path, minutes: float, rounds: int) -> dict[str, Any]:
    live = folder / "image" / f"live-{time.time_ns()}"
    write_run(live, 2, 2_000, 20, ended=False)
    files, step = [open_events(live, rank, 2) for rank in range(2)], 2_000
    lock, dashboard = RunLock(live), DashboardProcess(folder)
    found: dict[str, Any] = {"runs": 51}
    try:
        with chromium_page() as (page, said):
            page.goto(dashboard.address)  # the server has just started: it reads 211 MB meanwhile
            page.wait_for_selector(".row")
            found["cold_list_s"] = page.evaluate("performance.now() / 1000")
            page.wait_for_selector(".row:has-text('long')")
            found["cold_list_with_the_long_run_s"] = page.evaluate("performance.now() / 1000")
            page.reload()
            page.wait_for_selector(".row:has-text('long')")
            found["list_s"] = page.evaluate("performance.now() / 1000")
            paints = "performance.getEntriesByType('paint').map(p => [p.name, p.startTime / 1000])"
            found |= {f"{name}_s": at for name, at in page.evaluate(paints)}
            page.click(".row button:has-text('long')")
            page.wait_for_selector("figure path.line")
            page.click(f".row button:has-text('{live.name}')")
            page.wait_for_selector("figure path.line")
            delays = []
            for _ in range(rounds):
                step += 20
                for events in files:
                    write_step(events, step, 2_000, timed=False)
                begun, shown = time.perf_counter(), f"step {step:,} "
                page.wait_for_function(
                    "text => document.getElementById('advance').textContent.includes(text)",
                    arg=shown,
                    polling=20,
                )
                delays.append(time.perf_counter() - begun)
            found["update_median_s"] = statistics.median(delays)
            found["update_worst_s"] = max(delays)
            found["memory"] = soak(page, files, step, minutes)
            found["complaints"] = said
    finally:
        dashboard.close()
        lock.release()
    return found


def soak(page: Any, files: list[EventFile], step: int, minutes: float) -> list[dict[str, float]]:
    """Heap after a collection, and DOM nodes, about once per minute while the run writes."""
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")
    readings, begun, due = [], time.monotonic(), 0.0
    while (passed := time.monotonic() - begun) <= minutes * 60:
        if passed >= due:
            client.send("HeapProfiler.collectGarbage")
            told = client.send("Performance.getMetrics")["metrics"]
            metrics = {one["name"]: one["value"] for one in told}
            heap, nodes = metrics["JSHeapUsedSize"] / 2**20, metrics["Nodes"]
            listeners = metrics["JSEventListeners"]
            readings.append(
                {"minute": passed / 60, "heap_mb": heap, "nodes": nodes, "listeners": listeners}
            )
            print(f"  minute {passed / 60:4.1f}: heap {heap:.2f} MB, {nodes:.0f} nodes", flush=True)
            due += 60.0
        step += 20
        for events in files:
            write_step(events, step, 2_000, timed=step % 100 == 0)
        page.wait_for_timeout(500)
    return readings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keeps the runs for the next time")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="mgt-dashboard-"))
    make_runs(folder)
    found = measure(folder, asked.minutes, asked.rounds)
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
