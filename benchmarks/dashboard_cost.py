"""What a dashboard that somebody looks at costs a training on the same machine.

    python benchmarks/dashboard_cost.py --device cuda --out benchmarks/dashboard_cost.json
    python benchmarks/dashboard_cost.py --ranks 2 --browser        # two CPU ranks, and Chromium

One training runs all the time. In every other window a dashboard is awake and a client holds its
stream of changes open, having fetched what the page fetches; in between, the dashboard is stopped
(SIGSTOP). Neighbouring windows are compared, so that what drifts on the machine counts little. The
rates are those that the training itself records. `cores_used` is the processor time of the
dashboard, and of Chromium, per second of looking: it does not depend on what else the machine
does. Takes about two minutes with 7 pairs of 8 s.

Needs the extra `dashboard`, and with --browser `.[engines]` and Chromium. Without network:
`pip download starlette uvicorn -d wheels`, and give --wheels.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
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
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "dashboard"), str(ROOT / "src")]

SETTLE_S = 1.0  # after a switch, left out
TRAINING = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

def main():
    folder, device, width = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config = MultiGPUConfig(device=device, save_dir=folder, recipe="cost", run_name="run",
        epochs=100_000, global_batch_size=128, progress="off", tensorboard=False, report=False,
        checkpoint_frequency=10**9, checkpoint_interval_s=10**6)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(262_144, 64), torch.randint(0, 10, (262_144,)))
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    MultiGPUTrainingManager(config).fit(nn.Sequential(*layers, nn.Linear(width, 10)), data)

if __name__ == "__main__":
    main()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--width", type=int, default=512, help="of the MLP that is trained")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window")
    parser.add_argument("--browser", action="store_true", help="Chromium in the place of a client")
    parser.add_argument("--wheels", type=Path, help="a folder with starlette, uvicorn, ...")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mgt-cost-")))
        path = [str(ROOT / "src")]
        if asked.wheels is not None:
            for wheel in asked.wheels.glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(place / "packages")
            path.append(str(place / "packages"))
        os.environ["PYTHONPATH"] = os.pathsep.join(path + [os.environ.get("PYTHONPATH", "")])
        run = stack.enter_context(training(place, asked.device, asked.ranks, asked.width))
        looks = stack.enter_context(looker(place / "runs", run, asked.browser))
        windows, cores = alternate(looks, asked.pairs, asked.seconds)
        found = {"cores_used": cores, **compare(windows, recorded_rates(run))}
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": sys.version[:7]}
    found |= {"device": asked.device, "ranks": asked.ranks, "browser": asked.browser, **machine}
    print(json.dumps(found, indent=1))
    print(
        f"watched, the training takes {found['ratio'] - 1:+.2%} per step "
        f"(95 % of resampled medians: {found['low'] - 1:+.2%} to {found['high'] - 1:+.2%}), "
        f"{found['updates']} updates seen; cores used: "
        + ", ".join(f"{name} {share:.3f}" for name, share in cores.items())
    )
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


@contextmanager
def training(place: Path, device: str, ranks: int, width: int) -> Iterator[Path]:
    """A training that goes on until the block ends; the folder of its run."""
    script, log = place / "train.py", place / "train.log"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "multi_gpu_training", "run", "--num-gpus", str(ranks)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, str(script), str(place / "runs"), device, str(width)],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=place,
        )
    run = place / "runs" / "cost" / "run"
    try:
        deadline = time.monotonic() + 120
        while len(recorded_rates(run)) < 30:  # recorded steps, and the first logs, are behind it
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the training does not train:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield run
        if process.poll() is not None:
            raise SystemExit(f"the training ended by itself:\n{log.read_text()[-3000:]}")
    finally:
        process.terminate()
        process.wait(120)


def recorded_rates(run: Path) -> list[tuple[float, int]]:
    """(time, step) of what the run has logged."""
    file, found = run / "events" / "rank-0.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:  # being written
            continue
        if event["event"] == "step":
            found.append((event["time"], event["step"]))
    return found


class Client:
    """Fetches what the page fetches, and reads its stream of changes."""

    def __init__(self, port: int, token: str, run: str) -> None:
        self.port, self.run, self.updates = port, run, 0
        self.headers = {"authorization": f"Bearer {token}"}

    def look(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for name in ("", "dashboard.css", "dashboard.js"):
            self._open(f"/{name}").read()
        answer = self._open(f"/api/stream?runs={self.run}")
        while time.monotonic() < end:
            if answer.readline().startswith(b"data: "):
                self.updates += 1

    def _open(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers=self.headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{path}: the dashboard answers {answer.status}")
        return answer


class Browser:
    """Chromium that shows the run, and a blank page in between."""

    def __init__(self, page: Any, address: str, run: str) -> None:
        self.page, self.address, self.run, self.updates = page, address, run, 0

    def look(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.page.goto(f"{self.address}&runs={self.run}")
        self.page.wait_for_selector("figure path.line")
        before = self.page.inner_text("#advance")
        self.page.wait_for_timeout(max(0.0, end - time.monotonic()) * 1000)
        self.updates += before != self.page.inner_text("#advance")
        self.page.goto("about:blank")


@contextmanager
def looker(root: Path, run: Path, browser: bool) -> Iterator[tuple[Any, int]]:
    """Who looks, and the process of the dashboard that is looked at."""
    from browser import TOKEN, DashboardProcess, chromium_page

    name = hashlib.sha256(os.fspath(run.absolute()).encode()).hexdigest()[:12]
    dashboard = DashboardProcess(root)
    try:
        time.sleep(1.0)
        if browser:
            with chromium_page() as (page, _):
                yield Browser(page, dashboard.address, name), dashboard.process.pid
        else:
            yield Client(dashboard.port, TOKEN, name), dashboard.process.pid
    finally:
        os.kill(dashboard.process.pid, signal.SIGCONT)
        dashboard.close()


def alternate(
    looks: tuple[Any, int], pairs: int, seconds: float
) -> tuple[list[tuple[bool, float, float, int]], dict[str, float]]:
    """(watched, begin, end, updates) of each window, in turns: ABBA; and who used how much of
    a core while somebody looked."""
    who, pid = looks
    windows, used, looked = [], {"dashboard": 0.0, "browser": 0.0}, 0.0
    for pair in range(pairs):
        for watched in (pair % 2 == 0, pair % 2 == 1):
            os.kill(pid, signal.SIGCONT if watched else signal.SIGSTOP)
            begun, before = time.time(), who.updates
            if watched:
                spent = processor_s(pid)
                who.look(seconds)
                for name, now in processor_s(pid).items():
                    used[name] += now - spent[name]
                looked += time.time() - begun
            else:
                time.sleep(seconds)
            windows.append((watched, begun + SETTLE_S, time.time(), who.updates - before))
    return windows, {name: seconds / looked for name, seconds in used.items() if seconds}


def processor_s(dashboard: int) -> dict[str, float]:
    """Processor time so far of the dashboard, and of all of Chromium's processes."""
    browser = [p for p in psutil.Process().children(recursive=True) if "chrom" in p.name()]
    parts = {"dashboard": [psutil.Process(dashboard)], "browser": browser}
    return {
        name: sum(p.cpu_times().user + p.cpu_times().system for p in processes)
        for name, processes in parts.items()
    }


def compare(
    windows: list[tuple[bool, float, float, int]], rates: list[tuple[float, int]]
) -> dict[str, Any]:
    """Seconds of a step while it is watched, as a multiple of those while it is not."""
    steps: list[dict[bool, float]] = []
    for number, (watched, begin, end, updates) in enumerate(windows):
        inside = [point for point in rates if begin <= point[0] <= end]
        if len(inside) < 5 or (watched and not updates):
            raise SystemExit(
                f"window {number}: {len(inside)} logged steps, {updates} updates: too few to "
                "compare; give more --seconds"
            )
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        if number % 2 == 0:
            steps.append({})
        steps[-1][watched] = (last_at - first_at) / (last - first)
    ratios = [pair[True] / pair[False] for pair in steps]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2_000))
    return {
        "ratio": statistics.median(ratios),
        "low": medians[50],
        "high": medians[-51],
        "step_alone_s": statistics.median(pair[False] for pair in steps),
        "step_watched_s": statistics.median(pair[True] for pair in steps),
        "pairs": [{"alone": pair[False], "watched": pair[True]} for pair in steps],
        "updates": sum(window[3] for window in windows),
    }


if __name__ == "__main__":
    raise SystemExit(main())
