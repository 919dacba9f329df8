"""What it costs to be ready for NaN and for too little memory, and what happens when they come.

    python benchmarks/faults.py --out faults          # on a GPU: under 90 s
    python benchmarks/faults.py --out faults --tiny   # tries the script out on a CPU

Prints a table and writes it as faults.md and faults.json. Costs are medians over rounds in which
runs with and without the readiness take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Hook, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training.finite import FiniteGate
from multi_gpu_training.training.memory import MemoryRecovery

GPU = torch.cuda.is_available()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def cnn() -> nn.Module:
    """Ten convolutions with BatchNorm: thirty buffers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 3
    for _ in range(10):
        layers += [nn.Conv2d(width, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        width = 32
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def data(kind: str, samples: int) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    shape = (64,) if kind == "mlp" else (3, 16, 16)
    inputs = torch.randn(samples, *shape, generator=random)
    return TensorDataset(inputs, torch.randint(10, (samples,), generator=random))


class Clock(Hook):
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.step_s = first, last, math.nan

    def on_step_end(self, manager: Any, step: int) -> None:
        if step in (self.first, self.last):
            if GPU:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step == self.last:
                self.step_s = (now - self._began) / (self.last - self.first)
            self._began = now


@contextmanager
def unready() -> Iterator[None]:
    """Steps without the gate for NaN and without copies of BatchNorm's buffers."""
    with (
        mock.patch.object(FiniteGate, "attach", lambda self, optimizer: None),
        mock.patch.object(MemoryRecovery, "begin_step", lambda self: None),
    ):
        yield


@contextmanager
def ready() -> Iterator[None]:
    yield


def run(folder: Path, model: nn.Module, dataset: Any, **more: Any) -> MultiGPUTrainingManager:
    hooks, loss_fn = more.pop("hooks", []), more.pop("loss_fn", None)
    settings = {
        "training_mode": "single",
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "enable_fault_tolerance": False,
        "epochs": 1000,
        "log_every": 100,
        **more,
    }
    manager = MultiGPUTrainingManager(MultiGPUConfig(**settings))
    manager.fit(
        model,
        dataset,
        loss_fn=loss_fn,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        hooks=hooks,
    )
    return manager


def cost(folder: Path, kind: str, execution: str, steps: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"without": [], "with": []}
    mode = ""
    for _ in range(rounds):
        for name, context in (("without", unready), ("with", ready)):
            clock = Clock(steps // 4, steps)
            model = mlp() if kind == "mlp" else cnn()
            dataset = data(kind, 4096 if GPU else 256)
            with context():
                manager = run(
                    folder,
                    model,
                    dataset,
                    batch_size=64 if GPU else 16,
                    max_steps=steps,
                    step_execution=execution,
                    hooks=[clock],
                )
            mode = manager.trainer.execution.mode
            times[name].append(clock.step_s)
    without, with_it = (statistics.median(times[name]) * 1e6 for name in ("without", "with"))
    return {
        "model": kind,
        "asked": execution,
        "ran": mode,
        "without_us": without,
        "with_us": with_it,
        "cost_us": with_it - without,
        "cost": (with_it - without) / without,
    }


def nan_gate(folder: Path) -> dict[str, Any]:
    """A NaN in the middle of a run of recorded steps: is it found, and are the weights clean?"""
    dataset = data("mlp", 4096 if GPU else 256)
    dataset.tensors[0][77] = math.nan
    model, text, step = mlp(), "", 0
    size = 64 if GPU else 16
    try:
        run(folder, model, dataset, batch_size=size, max_steps=len(dataset) // size)
    except NonFiniteLossError as error:
        text, step = str(error), error.step
    clean = all(bool(value.isfinite().all()) for value in model.state_dict().values())
    return {
        "found": bool(text),
        "step": step,
        "names_sample": " 77" in text,
        "clean": clean,
        "text": text,
    }


def short_memory(folder: Path, scale: int) -> dict[str, Any]:
    """A micro-batch that really does not fit: the same weights as from one that does."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        wide = model[0](batch[0])
        for _ in range(8):  # activations of `scale` MB a sample
            wide = torch.sin(wide)
        return nn.functional.cross_entropy(model[1](wide.view(len(wide), -1, 64).mean(1)), batch[1])

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64 * scale), nn.Linear(64, 10))

    dataset = data("mlp", 512)
    settings = {"loss_fn": loss_fn, "global_batch_size": 256, "max_steps": 4}
    settings |= {"step_execution": "eager", "use_mixed_precision": False, "allow_tf32": False}
    reference = build()
    run(folder, reference, dataset, batch_size=8, **settings)
    model = build()
    filler = None
    if GPU:
        torch.cuda.empty_cache()
        activations = 256 * 64 * scale * 4 * 10
        free, _ = torch.cuda.mem_get_info()
        filler = torch.empty(max(0, free - activations // 2), dtype=torch.uint8, device="cuda")
    started = time.perf_counter()
    manager = run(folder, model, dataset, batch_size=256, **settings)
    seconds = time.perf_counter() - started
    del filler
    worst = max(
        float((a - b).norm() / b.norm())
        for a, b in zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    )
    return {"parts": manager.trainer.memory.parts, "apart": worst, "seconds": seconds}


def table(costs: list[dict[str, Any]], nan: dict[str, Any], memory: dict[str, Any]) -> str:
    where = torch.cuda.get_device_name() if GPU else platform.processor() or "CPU"
    lines = [f"# Ready for faults: what it costs a step ({where}, torch {torch.__version__})", ""]
    lines += ["| model | steps run as | without | with | cost |", "|---|---|---|---|---|"]
    for row in costs:
        lines.append(
            f"| {row['model']} | {row['ran']} | {row['without_us']:,.1f} us | "
            f"{row['with_us']:,.1f} us | {row['cost_us']:+.1f} us ({row['cost']:+.1%}) |"
        )
    lines += ["", "| fault | outcome |", "|---|---|"]
    lines.append(
        f"| NaN in one sample | found: {nan['found']}, at step {nan['step']}, sample named: "
        f"{nan['names_sample']}, weights clean: {nan['clean']} |"
    )
    lines.append(
        f"| a micro-batch that does not fit | computed in {memory['parts']} parts, weights "
        f"{memory['apart']:.1e} from those of one that fits |"
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("faults"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    tiny = options.tiny or not GPU
    modes = ["eager"] if tiny else ["graph", "eager"]
    sizes = {"eager": (12, 1) if tiny else (240, 3), "graph": (2400, 4)}  # steps, rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs = [
            cost(folder / f"{kind}-{mode}-{i}", kind, mode, *sizes[mode])
            for i, (kind, mode) in enumerate((k, m) for k in ("mlp", "cnn") for m in modes)
        ]
        print(costs, flush=True)
        nan = nan_gate(folder / "nan")
        memory = short_memory(folder / "memory", 2 if tiny else 4096)
    text = table(costs, nan, memory)
    print(text)
    print(nan["text"])
    options.out.with_suffix(".md").write_text(text)
    result = {"costs": costs, "nan": nan, "memory": memory}
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
