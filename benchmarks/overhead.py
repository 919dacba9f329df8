"""What a training loop costs beside the model: ours, the peers' and a hand-written DDP loop.

    python benchmarks/overhead.py --rounds 10 --steps 60 --out benchmarks/overhead.md

starts one pair of ranks (torchrun, CPU, gloo). In each round every contender trains the same
number of steps in these same processes, in an order that rotates by round. Reported is, over the
rounds, the median of the ratio to the hand-written loop of the same round.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Task, forget, quiet

WARM_UP = 10
LOAD = "OVERHEAD_LOAD_BEFORE"
Times = dict[str, list[tuple[float, float]]]  # wall and CPU seconds a step, one entry a round


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60, help="measured steps a round")
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument(
        "--hidden", type=int, help="width of the MLP (default 640) or the CNN (default 32)"
    )
    parser.add_argument("--layers", type=int, default=2, help="hidden layers of the MLP")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--contenders",
        default=",".join(CONTENDERS),
        help=f"comma-separated, from {', '.join(CONTENDERS)}; hand is always among them",
    )
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args(arguments)
    options.hidden = options.hidden or {"mlp": 640, "cnn": 32}[options.model]
    options.names = list(dict.fromkeys(["hand", *options.contenders.split(",")]))
    unknown = [name for name in options.names if name not in CONTENDERS]
    if unknown:
        parser.error(f"unknown contenders {unknown}; there are {', '.join(CONTENDERS)}")
    return options


def main() -> int:
    options = parse()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    environment[LOAD] = f"{os.getloadavg()[0]:.2f}"  # before our own ranks add to it
    command = [sys.executable, *launcher, __file__, *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode


def run_rank(options: argparse.Namespace) -> None:
    quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    with tempfile.TemporaryDirectory(prefix="mgt-overhead-") as folder:
        task = Task(
            hidden=options.hidden,
            layers=options.layers,
            batch=options.batch,
            steps=WARM_UP + options.steps + 1,
            log_every=options.log_every,
            folder=Path(folder),
            ranks=dist.get_world_size(),
            model_kind=options.model,
        )
        names = able(options.names, task)
        times: Times = {name: [] for name in names}
        for number in range(options.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                times[name].append(step_time_s(name, task))
            report_round(number, times)
            if options.out is not None and dist.get_rank() == 0:
                # After every round: a run that is cut off loses nothing.
                options.out.write_text(document(options, times, task))
    say(document(options, times, task))
    dist.destroy_process_group()


def able(names: list[str], task: Task) -> list[str]:
    """Contenders that are installed and train; a first short run, which also does the imports."""
    kept = []
    for name in names:
        reason = ""
        try:
            CONTENDERS[name].train(replace(task, steps=2, ticks=[]))
        except ImportError as error:
            reason = f"not installed ({error})"
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        reasons: list[str] = [""] * task.ranks
        dist.all_gather_object(reasons, reason)
        forget()
        if any(reasons):
            say(f"left out: {name}: {next(filter(None, reasons))}")
        else:
            kept.append(name)
    return kept


def step_time_s(name: str, task: Task) -> tuple[float, float]:
    """Mean wall and CPU time from one forward pass to the next, after the warm-up, over ranks."""
    task = replace(task, ticks=[])
    gc.collect()
    dist.barrier()
    CONTENDERS[name].train(task)
    dist.barrier()
    forget()
    if len(task.ticks) != task.steps:
        raise RuntimeError(f"{name} took {len(task.ticks)} steps, not {task.steps}")
    measured = task.steps - WARM_UP - 1
    ticks = torch.tensor(task.ticks, dtype=torch.float64)
    total = (ticks[WARM_UP + measured] - ticks[WARM_UP]) / measured
    dist.all_reduce(total)
    wall, cpu = (total / task.ranks).tolist()
    return wall, cpu


def report_round(number: int, times: Times) -> None:
    row = "  ".join(f"{name} {series[-1][0] * 1e3:.3f}" for name, series in times.items())
    say(f"round {number + 1}: {row} ms")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def document(options: argparse.Namespace, times: Times, task: Task) -> str:
    command = shlex.join(["python", "benchmarks/overhead.py", *sys.argv[1:]])
    parameters = sum(p.numel() for p in task.model().parameters())
    return "\n".join(
        [
            "# Overhead of training loops",
            "",
            f"    {command}",
            "",
            *(f"- {fact}" for fact in machine()),
            f"- {task.ranks} CPU ranks over gloo, one thread each; {options.model.upper()} of "
            f"{parameters:,} parameters, {task.batch} samples per rank; "
            f"{len(times['hand'])} rounds of {options.steps} steps after {WARM_UP} to "
            f"warm up; log every {task.log_every}",
            f"- a hand-written step takes {median(w for w, _ in times['hand']) * 1e3:.2f} ms",
            *throughput(times),
            "",
            *table(times),
            "",
            "Step: wall time, median over rounds. Ratio: to the hand-written loop of the same "
            "round. Added: the difference to it, in wall time and in CPU time of a rank (which "
            "other processes on the machine disturb least).",
            "",
        ]
    )


def throughput(times: Times) -> list[str]:
    """Ours against the hand-written loop: samples per second, median over the rounds."""
    if "ours" not in times:
        return []
    ratios = [hand[0] / ours[0] for ours, hand in zip(times["ours"], times["hand"], strict=True)]
    cpu = [hand[1] / ours[1] for ours, hand in zip(times["ours"], times["hand"], strict=True)]
    return [
        f"- throughput of multi-gpu-training against the hand-written loop: {median(ratios):.3f} "
        f"by the wall clock, {median(cpu):.3f} by CPU time"
    ]


def table(times: Times) -> list[str]:
    lines = [
        "| loop | step, ms | ratio, median | ratio, min - max | added wall, us | added CPU, us |",
        "|---|---|---|---|---|---|",
    ]
    for name, series in times.items():
        pairs = list(zip(series, times["hand"], strict=True))
        ratios = [mine[0] / hand[0] for mine, hand in pairs]
        wall, cpu = (median((mine[i] - hand[i]) * 1e6 for mine, hand in pairs) for i in (0, 1))
        lines.append(
            f"| {CONTENDERS[name].title} | {median(wall for wall, _ in series) * 1e3:.3f} "
            f"| {median(ratios):.3f} | {min(ratios):.3f} - {max(ratios):.3f} "
            f"| {wall:+.0f} | {cpu:+.0f} |"
        )
    return lines


def machine() -> list[str]:
    packages = {contender.package for contender in CONTENDERS.values()} - {None}
    versions = [f"torch {torch.__version__}"]
    for package in sorted(str(name) for name in packages):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return [
        f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores; load before the start: "
        f"{os.environ.get(LOAD, 'unknown')}",
        ", ".join([f"Python {sys.version.split()[0]}", *versions]),
        f"{datetime.now(UTC):%Y-%m-%d}",
    ]


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


if __name__ == "__main__":
    sys.exit(main())
