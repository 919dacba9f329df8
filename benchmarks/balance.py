"""What shares by measured speed give where one of two ranks is slow, against equal shares.

    python benchmarks/balance.py --table benchmarks/balance.md

starts one pair of ranks (torchrun). The second one is slowed: it computes every sample `--slow`
times, forward and backward, and uses one of them. In each round the same training runs with equal
shares and with measured ones, in these same processes. Reported are the medians over the rounds of
the throughput, of its ratio, and how far the parameters of the two trainings are apart.

With `--device cuda` both ranks share one GPU over gloo: it shows that the same code runs there; how
fast is then a matter of two processes on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

WARM_UP = 4
LOAD = "BALANCE_LOAD_BEFORE"
CASES = ("equal", "measured")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps a round, warm-up included")
    parser.add_argument("--batch", type=int, default=64, help="samples per rank, nominally")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--slow", type=int, default=2, help="how often the slow rank computes")
    parser.add_argument(
        "--wait-ms",
        type=float,
        default=0.0,
        help="each sample takes this time more, times --slow on the slow rank, in which the CPU "
        "rests as it does while a GPU computes; for machines that others use",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="one short round, to try it out")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.batch = 1, 10, 16
    return options


class Net(nn.Module):
    """Convolutions, computed `times` times with their gradients. What is computed more is added
    as exactly zero: a slow rank learns what a fast one learns. Nearly all of a step is work on
    samples."""

    def __init__(self, width: int, times: int, wait_s: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.times = 1 if wait_s else times
        self.wait_s = wait_s * times
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.body(inputs)
        time.sleep(self.wait_s * len(inputs))
        for _ in range(self.times - 1):
            found = found + 0.0 * self.body(inputs)
        return found


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Clock(Callback):
    """Seconds from the end of the warm-up to the last step."""

    def __init__(self, device: torch.device, last: int) -> None:
        self.device = device
        self.last = last
        self.start = self.stop = 0.0

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step not in (WARM_UP, self.last):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.start, self.stop = self.stop, time.perf_counter()


def images(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)
    return TensorDataset(
        patterns[labels] + torch.randn(samples, 1, 28, 28, generator=generator), labels
    )


def train(options: argparse.Namespace, case: str, folder: str) -> dict[str, Any]:
    """One training; samples/s, the shares, and the parameters at its end."""
    config = MultiGPUConfig(
        device=options.device,
        share_gpu=options.device == "cuda",
        batch_size=options.batch,
        epochs=1,
        balance=case,
        # Rounding is what is looked at: everything that rounds more is off.
        use_mixed_precision=False,
        allow_tf32=False,
        step_execution="eager",
        progress="off",
        tensorboard=False,
        enable_fault_tolerance=False,
        save_dir=folder,
    )
    manager = MultiGPUTrainingManager(config)
    rank, device = manager.placement.dp_rank, manager.placement.device
    model = Net(options.width, options.slow if rank == 1 else 1, options.wait_ms / 1e3)
    clock = Clock(device, options.steps)
    samples = options.steps * options.batch * manager.placement.dp_size
    manager.fit(
        model,
        images(samples),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        callbacks=[clock],
    )
    measured = samples * (options.steps - WARM_UP) / options.steps
    weights = manager.balance.weights or (options.batch,) * manager.placement.dp_size
    return {
        "samples_per_s": measured / (clock.stop - clock.start),
        "shares": list(weights),
        "parameters": {name: p.detach().cpu().clone() for name, p in model.named_parameters()},
    }


def apart(ours: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest ||a - b|| / ||b|| of a tensor."""
    return max(
        float((ours[name].double() - others[name].double()).norm() / others[name].double().norm())
        for name in ours
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, on every rank alike; rank 0's clock counts."""
    rounds: list[dict[str, Any]] = []
    difference = 0.0
    with tempfile.TemporaryDirectory(prefix="mgt-balance-") as folder:
        for number in range(options.rounds):
            order = CASES if number % 2 == 0 else CASES[::-1]
            results = {case: train(options, case, folder) for case in order}
            mine = [results[case].pop("parameters") for case in CASES]
            difference = max(difference, apart(mine[1], mine[0]))
            rounds.append(results)
    return {"rounds": rounds, "parameters_apart": difference, **summary(rounds)}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {case: [r[case]["samples_per_s"] for r in rounds] for case in CASES}
    ratios = [m / e for e, m in zip(rates["equal"], rates["measured"], strict=True)]
    return {
        "samples_per_s": {case: median(rates[case]) for case in CASES},
        "shares": {case: [r[case]["shares"] for r in rounds] for case in CASES},
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    ratio, rates = found["ratio"], found["samples_per_s"]
    shares = sorted({tuple(s) for s in found["shares"]["measured"]})
    given = " or ".join(" + ".join(map(str, s)) for s in shares)
    spread = f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})"
    rows = [
        "| shares | samples, rank 0 + rank 1 | samples/s, median | ratio, median (min - max) |",
        "|---|---|---|---|",
        f"| equal | {options.batch} + {options.batch} | {rates['equal']:,.0f} | 1 |",
        f"| measured | {given} | {rates['measured']:,.0f} | {spread} |",
        "",
        f"Parameters of the two trainings differ by {found['parameters_apart']:.1e} at most, by "
        "norm, tensor by tensor.",
    ]
    return "\n".join(rows)


def page(found: dict[str, Any], options: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_model()
    cores = len(os.sched_getaffinity(0))
    how = f"computes every sample {options.slow} times"
    if options.wait_ms:
        how = f"waits {options.slow} times as long for every sample ({options.wait_ms:g} ms)"
    facts = [
        f"{device}; {cores} cores; load before the start: {os.environ[LOAD]}",
        f"Python {platform.python_version()}, torch {torch.__version__}",
        f"2 ranks over gloo, one thread each; rank 1 {how}; "
        f"{options.rounds} rounds of {options.steps} steps, {WARM_UP} of them to warm up",
    ]
    words = [word for word in sys.argv[1:] if not word.startswith(("--out", "--table"))]
    command = " ".join(["python benchmarks/balance.py", *words])
    head = ["# Shares by measured speed", "", f"    {command}", ""]
    return "\n".join([*head, *(f"- {fact}" for fact in facts), "", table(found, options), ""])


def cpu_model() -> str:
    for row in Path("/proc/cpuinfo").read_text().splitlines():
        if row.startswith("model name"):
            return row.split(":", 1)[1].strip()
    return platform.processor()


def start_ranks() -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment[LOAD] = f"{os.getloadavg()[0]:.2f}"  # before our own ranks add to it
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *sys.argv]
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:
        return start_ranks()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(options)
    if dist.get_rank() == 0:
        text = page(found, options)
        print(text)
        if options.table is not None:
            options.table.write_text(text)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
