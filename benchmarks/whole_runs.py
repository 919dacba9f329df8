"""Whole runs on one GPU: what a step and the end of an epoch cost, against loops by hand.

    python benchmarks/whole_runs.py --rounds 5 --out whole_runs.json
    python benchmarks/whole_runs.py --models mlp --ways epochs --profile --rounds 1

Every way trains the same model on the same data, which lie on the GPU: by hand in bf16 as a plain
loop, as a CUDA graph, and as a graph of the compiled model; and by `fit` with its defaults (log,
checkpoints, fault tolerance, monitoring) in epochs of 64 steps, and the same steps as one epoch.
All ways of a model run at once, each in its own process, and take turns: one trains a window of
20 epochs while the others wait, in changing order. The GPU is awaited at both ends of a window,
nowhere else. `fit` is timed as soon as steps are recorded (`--after graph`), or, by default, once
they are compiled as well; models for which compiling is left out say so.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
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


def by_hand(way: str, case: Case, options: argparse.Namespace) -> None:
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

    def epochs(count: int) -> None:
        for _ in range(count):
            for batch in torch.randperm(len(x), device=device).split(case.batch):
                places.copy_(batch)
                run()

    epochs(2)
    turn = Turns(options)
    while turn.begin():
        epochs(options.epochs)
        turn.end(options.epochs * STEPS)


def ours(way: str, case: Case, options: argparse.Namespace) -> None:
    """`fit` with its defaults, in windows that begin and end at ends of epochs."""
    from torch.utils.data import TensorDataset

    from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

    profile = cProfile.Profile() if options.profile else None
    turn = Turns(options)
    window = options.epochs * STEPS
    wanted = "compiled graph" if options.after == "compiled" and case.compiles else "graph"

    class Clock(Callback):
        """After the first steps of an epoch that follow the wanted form."""

        ends: int | None = None

        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step == self.ends:
                if profile is not None:
                    profile.disable()
                turn.end(window, form=execution.mode)
                self.ends = None
            if self.ends is None and result.step % STEPS == 0 and self.is_ready(result.step):
                if not turn.begin():
                    if profile is not None:
                        for order in ("tottime", "cumulative"):
                            pstats.Stats(profile).sort_stats(order).print_stats(60)
                    sys.stdout.flush()
                    os._exit(0)
                self.ends = result.step + window
                if profile is not None:
                    profile.enable()

        def is_ready(self, step: int) -> bool:
            late = options.device == "cpu" or time.perf_counter() - begun > options.patience_s
            return step >= options.skip * STEPS and (execution.mode == wanted or late)

    torch.manual_seed(0)
    one = 64 if way == "one" else 1  # epochs that are one
    with tempfile.TemporaryDirectory() as folder:
        config = MultiGPUConfig(
            batch_size=case.batch,
            save_dir=folder,
            epochs=1_000_000,
            learning_rate=1e-3,
            step_execution="auto" if wanted == "compiled graph" else "graph",
            **json.loads(options.set),
        )
        manager = MultiGPUTrainingManager(config)
        execution = manager.trainer.execution
        begun = time.perf_counter()
        manager.fit(
            case.build(),
            TensorDataset(*data(case, one)),
            loss_fn=loss_fn,
            callbacks=[Clock()],
        )


class Turns:
    """Windows that are timed in turn with other processes, which wait meanwhile."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = options.device
        self.born = time.perf_counter()
        self.started = 0.0

    def begin(self) -> bool:
        """Wait for this process's turn; False when there is none any more."""
        wait(self.device)
        print("READY " + json.dumps({"after_s": time.perf_counter() - self.born}), flush=True)
        if sys.stdin.readline().strip() != "go":
            return False
        self.started = time.perf_counter()
        return True

    def end(self, steps: int, **facts: Any) -> None:
        wait(self.device)
        us = (time.perf_counter() - self.started) / steps * 1e6
        print("FOUND " + json.dumps({"us": us, **facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20, help="of a window")
    parser.add_argument("--skip", type=int, default=4, help="epochs before the first window")
    parser.add_argument("--after", default="compiled", choices=["graph", "compiled"])
    parser.add_argument("--patience-s", type=float, default=60.0, help="for the compiled form")
    parser.add_argument("--set", default="{}", help="settings of ours, as JSON")
    parser.add_argument("--device", default="cuda", help="cpu: only to try the script")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("whole_runs.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, name = options.child.split("/")
        (by_hand if way in BY_HAND else ours)(way, CASES[name], options)
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in options.models.split(","):
        ways = [w for w in options.ways.split(",") if CASES[name].compiles or w != "compiled"]
        found[name] = in_turn(name, ways, options.rounds)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{device}; torch {torch.__version__}, Python {platform.python_version()}"
    document = {"machine": machine, "cores": os.cpu_count(), "found": found}
    options.out.write_text(json.dumps(document, indent=1))
    print(table(found))


def in_turn(name: str, ways: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Start a process per way, and let one after the other time a window."""
    children = {}
    for way in ways:
        command = [sys.executable, *sys.argv, "--child", f"{way}/{name}"]
        pipe = subprocess.PIPE
        children[way] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        heard(children[way], "READY", f"{name} {way}")  # one by one: the first windows stay quiet
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            child = children[way]
            say(child, "go")
            outcome = heard(child, "FOUND", f"{name} {way}")
            found[way].append(outcome)
            print(name, way, json.dumps(outcome), flush=True)
            heard(child, "READY", "")
    for child in children.values():
        say(child, "end")
        print(child.communicate()[0] if "--profile" in sys.argv else "", end="")
    return found


def say(child: Any, word: str) -> None:
    child.stdin.write(word + "\n")
    child.stdin.flush()


def heard(child: Any, word: str, who: str) -> dict[str, Any]:
    for line in child.stdout:
        if line.startswith(word):
            told = dict(json.loads(line[len(word) :]))
            if who and word == "READY":
                print(who, json.dumps(told), flush=True)
            return told
        if ("step" in line and "graph" in line) or "compil" in line:
            print(f"  {who}: {line.strip()}", flush=True)
    raise RuntimeError(f"{who or 'a process'} ended before it said {word}")


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
