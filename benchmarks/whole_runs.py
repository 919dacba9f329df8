"""Whole runs on one GPU: what a step and the end of an epoch cost, against loops by hand.

    python benchmarks/whole_runs.py --rounds 5 --out whole_runs.json
    python benchmarks/whole_runs.py --models mlp --ways epochs,one --profile

Every way trains the same model on the same data, which lie on the GPU: by hand in bf16 as a plain
loop, as a CUDA graph, and as a graph of the compiled model; and by `fit` with its defaults (log,
checkpoints, fault tolerance, monitoring) in epochs of 64 steps, and the same steps as one epoch.
The GPU is awaited at both ends of what is timed, nowhere else. One process per way and round, in
alternating order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import Recurrent, mlp
from torch import Tensor, nn

STEPS = 64  # of an epoch


class ViT(nn.Module):
    """Patches of 4x4, four pre-norm blocks of width 192: 1.8M parameters."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        block = nn.TransformerEncoderLayer(
            width, 3, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> nn.Module:
    parts: list[nn.Module] = []
    for width in (inputs, outputs):
        parts += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        parts += [nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """Three levels of two convolutions with BatchNorm; a class per pixel."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            _block(i, o) for i, o in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.middle = _block(4 * width, 8 * width)
        pairs = ((8 * width, 4 * width), (4 * width, 2 * width), (2 * width, width))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, 2) for i, o in pairs)
        self.up = nn.ModuleList(_block(2 * o, o) for _, o in pairs)
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), kept.pop()], 1))
        return self.head(x)  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A GRU of two layers of 256 over a sequence, and a class for the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A model, a sample, a batch. dense: the sample has a label per pixel."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    dense: bool = False
    compiles: bool = True


CASES = {
    "vit": Case(ViT, (3, 32, 32), 128),
    "unet": Case(UNet, (3, 64, 64), 32, dense=True),
    "gru": Case(Gated, (30, 32), 64, compiles=False),
    "lstm": Case(Recurrent, (30, 32), 64, compiles=False),
    "mlp": Case(mlp, (64,), 32),
}
BY_HAND = ("plain", "graph", "compiled")
WAYS = (*BY_HAND, "epochs", "one")


def data(case: Case, epochs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    samples = STEPS * case.batch
    x = torch.randn(samples, *case.shape, generator=generator)
    labels = (samples, *case.shape[1:]) if case.dense else (samples,)
    y = torch.randint(0, 10, labels, generator=generator)
    if epochs == 1:
        return x, y
    return x.repeat(epochs, *[1] * (x.ndim - 1)), y.repeat(epochs, *[1] * (y.ndim - 1))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def by_hand(way: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """A loop of one's own, as fast as that form allows: data on the GPU, a fused optimizer."""
    device = options.device
    torch.manual_seed(0)
    model = case.build().to(device)
    if case.dense:
        model = model.to(memory_format=torch.channels_last)
    x, y = (t.to(device) for t in data(case))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True, capturable=device == "cuda")
    places = torch.zeros(case.batch, dtype=torch.int64, device=device)
    loss_of = torch.compile(loss_fn) if way == "compiled" else loss_fn
    total = torch.zeros((), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model, (x.index_select(0, places), y.index_select(0, places)))
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())

    run: Callable[[], None] = step
    if way != "plain" and device == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(4):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        run = graph.replay
    skipped = 2 if way == "plain" else 6
    for epoch in range(skipped + options.epochs):
        if epoch == skipped:
            wait(device)
            begun = time.perf_counter()
        for batch in torch.randperm(len(x), device=device).split(case.batch):
            places.copy_(batch)
            run()
    wait(device)
    steps = options.epochs * STEPS
    return {"us": (time.perf_counter() - begun) / steps * 1e6}


def ours(way: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """`fit` with its defaults. Timed from the end of an early epoch to the end of the last."""
    from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

    skipped = options.skip
    epochs = skipped + options.epochs
    first, last = skipped * STEPS, epochs * STEPS
    times: list[float] = []
    forms: list[str] = []

    class Clock(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step == first or result.step == last:
                wait(options.device)
                times.append(time.perf_counter())
                forms.append(manager.trainer.execution.mode)
                if profile is not None and result.step == first:
                    profile.enable()
                elif profile is not None:
                    profile.disable()

    profile = None
    if options.profile:
        import cProfile

        profile = cProfile.Profile()
    torch.manual_seed(0)
    model = case.build()
    one = way == "one"
    from torch.utils.data import TensorDataset

    with tempfile.TemporaryDirectory() as folder:
        config = MultiGPUConfig(
            batch_size=case.batch,
            save_dir=folder,
            epochs=1 if one else epochs,
            learning_rate=1e-3,
            **json.loads(options.set),
        )
        manager = MultiGPUTrainingManager(config)
        begun = time.perf_counter()
        manager.fit(
            model,
            TensorDataset(*data(case, epochs if one else 1)),
            loss_fn=loss_fn,
            callbacks=[Clock()],
        )
        whole = time.perf_counter() - begun
        execution = manager.trainer.execution
        form, reason = execution.mode, execution.reason
    if profile is not None:
        import pstats

        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(70)
    us = (times[1] - times[0]) / (last - first) * 1e6
    return {"us": us, "form": form, "forms": forms, "reason": reason, "whole_s": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20, help="that are timed")
    parser.add_argument("--skip", type=int, default=4, help="epochs before the clock starts")
    parser.add_argument("--set", default="{}", help="settings of ours, as JSON")
    parser.add_argument("--device", default="cuda", help="cpu: only to try the script")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("whole_runs.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, name = options.child.split("/")
        train = by_hand if way in BY_HAND else ours
        print("FOUND " + json.dumps(train(way, CASES[name], options)))
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number in range(options.rounds):
        for name in options.models.split(","):
            ways = [w for w in options.ways.split(",") if CASES[name].compiles or w != "compiled"]
            for way in ways if number % 2 == 0 else reversed(ways):
                outcome = run(way, name)
                found.setdefault(name, {}).setdefault(way, []).append(outcome)
                print(number, name, way, json.dumps(outcome), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{device}; torch {torch.__version__}, Python {platform.python_version()}"
    document = {"machine": machine, "cores": os.cpu_count(), "found": found}
    options.out.write_text(json.dumps(document, indent=1))
    print(table(found))


def run(way: str, name: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--child", f"{way}/{name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return dict(json.loads(line[6:]))
        if "--profile" in sys.argv:
            print(line)
    return {"problem": (done.stderr or done.stdout).strip()[-1500:]}


def table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    lines = ["| model | way | us per step | range | form |", "|---|---|---|---|---|"]
    for name, ways in found.items():
        for way, outcomes in ways.items():
            times = [one["us"] for one in outcomes if "us" in one]
            if times:
                form = outcomes[-1].get("form", "")
                middle = statistics.median(times)
                lines.append(
                    f"| {name} | {way} | {middle:,.0f} | {min(times):,.0f} to {max(times):,.0f} "
                    f"| {form} |"
                )
        medians = {
            way: statistics.median([one["us"] for one in outcomes if "us" in one] or [0.0])
            for way, outcomes in ways.items()
        }
        if medians.get("epochs") and medians.get("one"):
            end = (medians["epochs"] - medians["one"]) * STEPS / 1000
            lines.append(f"| {name} | end of an epoch | {end:.2f} ms | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
