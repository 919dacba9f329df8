"""Saving a state of a given size: how long training stands still, and how long until it is safe.

    python benchmarks/checkpoint.py --out checkpoint.json            # a GPU if there is one
    python benchmarks/checkpoint.py --device cpu --quick

The state is a model and its AdamW moments, 2 GiB in all. Compared are

    plain       one write and fsync of the same number of bytes to the same disk
    torch.save  to a file, as most training scripts do it, without fsync
    ours        manager.save_checkpoint(wait=False) as the training loop calls it, and then waiting:
                copy, write, hash, fsync, rename, fsync of the folder

`stall` is how long the next step is delayed: on a GPU, from before the save until a kernel that was
queued after it has run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


def main() -> None:
    arguments = read_arguments()
    device = torch.device(arguments.device)
    gib = 1 / 16 if arguments.quick else arguments.gib
    rows: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="mgt-checkpoint-", dir=arguments.folder))
    try:
        ours = Ours(gib, device, folder)
        rows.append({"what": "ours, first", **ours.once()})
        plain, saved, safe = Plain(ours.nbytes, folder), [], []
        torch_rows = []
        for _ in range(arguments.repeats):
            # Side by side, so that what else the disk does falls on all of them.
            safe.append(plain.once())
            saved.append(ours.once())
            torch_rows.append(torch_save(ours, folder))
        rows += [middle("plain", safe), middle("torch.save", torch_rows), middle("ours", saved)]
        ratios = [a["safe_s"] / b["safe_s"] for a, b in zip(saved, safe, strict=True)]
        ours.manager.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "machine": machine(device),
        "bytes": ours.nbytes,
        "buffer_bytes": ours.saver.buffers.nbytes,
        "pinned": ours.saver.buffers.host.pinned,
        "folder": str(folder.parent),
        "repeats": arguments.repeats,
        "rows": rows,
        "safe_over_plain": {"median": statistics.median(ratios), "all": ratios},
    }
    show(report)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(report, indent=1))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="1/16 GiB")
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ours:
    """A run that has taken one step, so that the optimizer has its moments."""

    def __init__(self, gib: float, device: torch.device, folder: Path) -> None:
        # A third of the bytes are weights; 48 layers, as a network has many.
        width = int((gib * 2**30 / 3 / 4 / 48) ** 0.5)
        config = MultiGPUConfig(
            training_mode="single",
            device=device.type,
            save_dir=str(folder),
            run_name="ours",
            batch_size=4,
            keep_last=1,
            tensorboard=False,
            progress="off",
        )
        self.manager = MultiGPUTrainingManager(config)
        self.device = self.manager.placement.device
        layers = [nn.Linear(width, width) for _ in range(48)]
        data = TensorDataset(torch.randn(4, width), torch.randn(4, width))
        self.model, loader, _ = self.manager.setup_training(
            nn.Sequential(*layers),
            data,
            loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        )
        for batch in loader:
            self.manager.trainer.train_step(batch)
        self.optimizer = self.manager.trainer.optimizer
        self.weight = next(self.model.parameters()).detach()
        self.saver = self.manager.fault_tolerance
        self.nbytes = 0

    def once(self) -> dict[str, float]:
        self.manager.trainer.state.step += 1
        synchronize(self.device)
        begun = time.perf_counter()
        path = self.manager.save_checkpoint(wait=False)
        host_s = time.perf_counter() - begun
        self.weight.add_(0)  # the first thing that a next step would do to the state
        synchronize(self.device)
        stall_s = time.perf_counter() - begun
        save = self.saver.current
        assert save is not None
        save.wait()
        self.saver.settle()
        self.nbytes = sum(file.stat().st_size for file in path.iterdir())
        return {
            "stall_s": stall_s,
            "host_s": host_s,
            "copy_s": save.captured.copy.device_s,
            "allocate_s": self.saver.buffers.host.allocated_s,
            "safe_s": host_s + save.write_s,
        }


class Plain:
    def __init__(self, nbytes: int, folder: Path) -> None:
        self.data = memoryview(bytearray(os.urandom(2**20)) * (nbytes // 2**20 + 1))[:nbytes]
        self.path = folder / "plain"

    def once(self) -> dict[str, float]:
        begun = time.perf_counter()
        with self.path.open("wb", buffering=0) as file:
            rest = self.data
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        safe_s = time.perf_counter() - begun
        self.path.unlink()
        return {"stall_s": safe_s, "safe_s": safe_s}


def torch_save(ours: Ours, folder: Path) -> dict[str, float]:
    path = folder / "state.pt"
    synchronize(ours.device)
    begun = time.perf_counter()
    state = {"model": ours.model.state_dict(), "optimizer": ours.optimizer.state_dict()}
    torch.save(state, path)
    stall_s = time.perf_counter() - begun
    path.unlink()
    return {"stall_s": stall_s}


def middle(what: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    return {"what": what, **{key: statistics.median(r[key] for r in rows) for key in rows[0]}}


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "device": name or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def show(report: dict[str, Any]) -> None:
    print(
        f"{report['bytes'] / 2**30:.2f} GiB of state on {report['machine']['device']}, "
        f"{report['machine']['cores']} cores, torch {report['machine']['torch']}; "
        f"median of {report['repeats']}"
    )
    number: Callable[[Any], str] = lambda value: "-" if value is None else f"{value:.3f}"  # noqa: E731
    print(f"{'':12} {'stall s':>9} {'GPU copy s':>11} {'pinning s':>10} {'safe on disk s':>15}")
    for row in report["rows"]:
        cells = [number(row.get(key)) for key in ("stall_s", "copy_s", "allocate_s", "safe_s")]
        print(f"{row['what']:12} {cells[0]:>9} {cells[1]:>11} {cells[2]:>10} {cells[3]:>15}")
    ratio = report["safe_over_plain"]
    each = ", ".join(f"{value:.2f}" for value in ratio["all"])
    print(f"safe on disk / plain write + fsync: {ratio['median']:.2f} (each: {each})")
    print(f"host memory held: {report['buffer_bytes'] / 2**30:.2f} GiB, pinned: {report['pinned']}")


if __name__ == "__main__":
    main()
