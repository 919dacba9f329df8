"""Does the report name why a run is slow? Seven trainings, six of them with a cause put into them.

    python benchmarks/causes.py --ranks 3 --out causes.json

starts one set of ranks (torchrun) that trains once a case, and then asks the report of each run
for its verdict: the kind of cause and the ranks where it lies must be those that were put in.

    none        a training as it should be
    loader      one rank's samples come late
    compute     one rank computes longer
    network     exchanging gradients takes longer than it should, on all ranks
    batch       two samples a rank and step
    checkpoint  a checkpoint every other step
    shared      the first two ranks are bound to one core; with --device cuda, to one GPU

With `--device cuda` and fewer GPUs than ranks all ranks share one, which is then a cause in every
case: `none` is left out, and the others must still be found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

EXPECTED = {
    "none": ("none", None),
    "loader": ("data", "slow"),
    "compute": ("compute", "slow"),
    "network": ("network", ()),
    "batch": ("batch", ()),
    "checkpoint": ("checkpoint", ()),
    "shared": ("shared", (0, 1)),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow-rank", type=int, default=1, help="where loader and compute lie")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="of a step, in each cause")
    parser.add_argument("--network", choices=["hook", "future"], default="future")
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", default=",".join(EXPECTED))
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    return parser.parse_args(arguments)


class Images(Dataset[Any]):
    """Images of 16x16 with a label; each takes `wait_s` to load."""

    def __init__(self, samples: int, wait_s: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(samples, 1, 16, 16, generator=generator)
        self.labels = torch.randint(0, 10, (samples,), generator=generator)
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.images[index], self.labels[index]


class Net(nn.Module):
    """A small net whose forward takes `wait_s` longer."""

    def __init__(self, kind: str, wait_s: float, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wait_s = wait_s
        if kind == "mlp":
            self.body = nn.Sequential(
                nn.Flatten(),
                nn.Linear(256, 1024 * width),
                nn.ReLU(),
                nn.Linear(1024 * width, 256 * width),
                nn.ReLU(),
            )
            self.head = nn.Linear(256 * width, 10)
        else:
            self.body = nn.Sequential(
                nn.Conv2d(1, 32 * width, 3, padding=1),
                nn.BatchNorm2d(32 * width),
                nn.ReLU(),
                nn.Conv2d(32 * width, 32, 3, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
            )
            self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.head(self.body(images))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def slow_exchange(kind: str, wait_s: float) -> Any:
    """A communication hook that takes `wait_s` longer: in the hook, or until its result comes."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if kind == "hook":
            time.sleep(wait_s)
        future = dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(state, bucket)
        if kind == "hook":
            return future

        def late(done: torch.futures.Future[Tensor]) -> Tensor:
            time.sleep(wait_s)
            return done.value()

        return future.then(late)

    hook.__annotations__.clear()  # DDP wants the types themselves, not their names
    return hook


def train(options: argparse.Namespace, case: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    wait_s = options.delay_ms / 1e3
    slow = rank == options.slow_rank
    batch = 2 if case == "batch" else options.batch
    width = 1
    if case == "shared" and options.device == "cuda":
        width, batch = 8, 16 * batch  # so much to compute that the GPU is the limit
    cores = os.sched_getaffinity(0)
    if case == "shared" and options.device == "cpu" and rank < 2:
        os.sched_setaffinity(0, {min(cores)})
    config = MultiGPUConfig(
        device=options.device,
        share_gpu=options.device == "cuda",
        batch_size=batch,
        epochs=1,
        step_execution="eager",
        balance="equal",
        progress="off",
        tensorboard=False,
        report=False,
        checkpoint_frequency=2 if case == "checkpoint" else 1_000_000,
        save_dir=folder,
        run_name=case,
    )
    manager = MultiGPUTrainingManager(config)
    samples = options.steps * batch * manager.placement.dp_size
    manager.setup_training(
        Net(options.model, wait_s if case == "compute" and slow else 0.0, width),
        Images(samples, wait_s / batch if case == "loader" and slow else 0.0),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
    if case == "network":
        hook = slow_exchange(options.network, wait_s)
        manager.trainer.wrapped.register_comm_hook(None, hook)  # type: ignore[operator]
    manager.train_epoch(manager.train_loader, 0)
    manager.finish()
    os.sched_setaffinity(0, cores)


def verdicts(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    from multi_gpu_training.monitoring.report.run_record import read_run
    from multi_gpu_training.monitoring.report.verdict import judge

    rows = []
    for case in options.cases.split(","):
        kind, ranks = EXPECTED[case]
        expected = (options.slow_rank,) if ranks == "slow" else ranks
        verdict = judge(read_run(Path(folder) / "custom" / case))
        found = verdict.causes[0].ranks if verdict.causes else None
        if kind == "shared" and options.device == "cuda":
            expected = found  # how many share it is a matter of the machine
        rows.append(
            {
                "case": case,
                "found": verdict.kind,
                "ranks": found,
                "ok": verdict.kind == kind and found == expected,
                "verdict": verdict.headline,
            }
        )
    return rows


def in_ranks(options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    for case in options.cases.split(","):
        train(options, case, folder)


def main() -> int:
    options = parse()
    if "RANK" in os.environ:
        in_ranks(options, os.environ["CAUSES_FOLDER"])
        return 0
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        options.cases = ",".join(c for c in options.cases.split(",") if c != "none")
    with tempfile.TemporaryDirectory(prefix="causes-") as temporary:
        folder = str(options.keep or temporary)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={options.ranks}", __file__, *sys.argv[1:]]
        command += ["--cases", options.cases]
        env = {**os.environ, "CAUSES_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=env, check=True, timeout=900)
        rows = verdicts(options, folder)
    facts = {"ranks": options.ranks, "model": options.model, "delay_ms": options.delay_ms}
    facts |= {"device": options.device, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    for row in rows:
        where = f" {row['ranks']}" if row["ranks"] else ""
        print(f"{'ok ' if row['ok'] else 'NOT'} {row['case']:10} {row['found']}{where}")
        print(f"    {row['verdict']}")
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} named; {facts}")
    if options.out is not None:
        options.out.write_text(json.dumps({"options": facts, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
