"""What watching a run costs: the same training with `monitor` on and off, in turns.

    python benchmarks/monitoring.py --device cuda --out monitoring.json
    python benchmarks/monitoring.py --device cpu --rounds 6

One process trains the same model for `--steps` steps in each round, once with monitoring and once
without, and swaps the order every round. A step is timed from a warm one to the last: on a GPU by
the clock, the device awaited at both; on a CPU by the time that the process, all its threads
together, had of the CPU, whatever else the machine does. The cost is the median over rounds of the
difference; allowed are 1 % of the step or 5 us, whichever is more.

On a GPU: a small MLP, whose step is one CUDA graph; the same step by step (eager), which is where
phases are timed by events; and a batch that takes about a millisecond.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.measure.meter import Repeated

# width, samples of a step, how steps are run, steps of a round
CASES = {
    "cuda": {
        "graph": (256, 64, "graph", 20_000),
        "eager": (256, 64, "eager", 1_000),
        "large eager": (4096, 4096, "eager", 600),
    },
    "cpu": {
        "small": (64, 32, "auto", 800),
        "medium": (512, 64, "auto", 200),
    },
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="steps of a round, in every case")
    parser.add_argument("--cases", help="which ones, by name")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    return parser.parse_args()


class Clock(Callback):
    """Seconds from the end of the warm-up to the last step."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self.device = device
        self.marks = {first: 0.0, last: 0.0}

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step in self.marks:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self.marks[step] = time.perf_counter()
            else:
                self.marks[step] = time.process_time()

    @property
    def step_s(self) -> float:
        (first, began), (last, ended) = sorted(self.marks.items())
        return (ended - began) / (last - first)


def train(options: argparse.Namespace, case: tuple[Any, ...], monitor: bool, folder: str) -> Any:
    width, batch, execution, steps = case
    steps = options.steps or steps
    config = MultiGPUConfig(
        training_mode="single",
        device=options.device,
        batch_size=batch,
        epochs=1,
        monitor=monitor,
        report=False,
        step_execution=execution if options.device == "cuda" else "auto",
        progress="off",
        tensorboard=False,
        enable_fault_tolerance=False,
        save_dir=folder,
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    # A few batches, again and again: data are not what is measured.
    data = TensorDataset(torch.randn(8 * batch, width), torch.randint(0, 10, (8 * batch,)))
    manager = MultiGPUTrainingManager(config)
    warm = min(max(100, steps // 10), steps // 2)
    clock = Clock(manager.placement.device, warm, steps)
    manager.setup_training(model, data, loss_fn=loss_fn, callbacks=[clock])
    manager.train_loader.source = Repeated(manager.train_loader.source, steps)
    manager.train_epoch(manager.train_loader, 0)
    manager.finish()
    lines = manager.run.events(0).read_text().splitlines()
    timed = sum('"event": "phases"' in line for line in lines)
    return clock.step_s, timed, manager.trainer.execution.mode


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def measure(options: argparse.Namespace, case: tuple[Any, ...]) -> dict[str, Any]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    timed, mode = 0, ""
    with tempfile.TemporaryDirectory(prefix="monitoring-") as folder:
        train(options, case, True, folder)  # warms caches and the allocator
        for number in range(options.rounds):
            for monitor in (True, False) if number % 2 else (False, True):
                step_s, found, mode = train(options, case, monitor, folder)
                seconds[monitor].append(step_s)
                timed = max(timed, found)
    cost = median(on - off for on, off in zip(seconds[True], seconds[False], strict=True))
    off = median(seconds[False])
    return {
        "execution": mode,
        "step_off_us": off * 1e6,
        "step_on_us": median(seconds[True]) * 1e6,
        "cost_us": cost * 1e6,
        "cost_share": cost / off,
        "timed_steps": timed,
        "steps": options.steps or case[3],
        "ok": cost <= max(0.01 * off, 5e-6),
    }


def main() -> int:
    options = parse()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    chosen = CASES[options.device]
    names = options.cases.split(",") if options.cases else list(chosen)
    rows = {}
    for name in names:
        rows[name] = measure(options, chosen[name])
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in rows[name].items()
        )
        print(f"{name:12} {shown}", flush=True)
    cuda = options.device == "cuda"
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, CPU"
    facts = {"machine": machine, "torch": torch.__version__, "load": os.getloadavg()[0]}
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
