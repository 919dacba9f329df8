"""What it costs to be ready for NaN and for too little memory, and what happens when they come.

    python benchmarks/faults.py --out faults          # on a GPU: about 3 minutes
    python benchmarks/faults.py --out faults --tiny   # tries the script out on a CPU

Prints a table and writes it as faults.md and faults.json. "Without" is the same training with
nothing that looks for NaN, copies what a lack of memory would take back, or notes where the rank
is. Recorded steps: whole runs with and without take turns, and a cost is the median of their
differences. Eager steps: one run changes from with to without and back every BLOCK steps, and a
cost is the difference of the medians over blocks. "launcher" compares a script that is run alone
with the same under `mgt run`, where heartbeat and supervision watch it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training import loop, step_state, stopping, trainer
from multi_gpu_training.training.nan_guard import NanGuard
from multi_gpu_training.training.runner import eager, selection
from multi_gpu_training.training.state_rollback import StepStart

GPU = torch.cuda.is_available()
BLOCK = 20


@dataclass(frozen=True)
class Case:
    """A training whose steps are timed."""

    model: str
    execution: str
    batch: int
    epoch_steps: int
    steps: int
    rounds: int


CASES = [
    Case("mlp", "graph", 64, 64, 2400, 5),
    Case("mlp", "graph", 64, 512, 6000, 5),
    Case("mlp", "eager", 64, 500, 4000, 2),
    Case("cnn", "graph", 64, 64, 1600, 5),
    Case("cnn", "eager", 64, 100, 1600, 2),
    Case("wide mlp", "eager", 4096, 100, 1600, 2),
    Case("wide cnn", "eager", 1024, 20, 480, 1),
]
TINY = [Case(model, "eager", 16, 4, 4 * BLOCK, 1) for model in ("mlp", "cnn")]


def mlp(width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def cnn(channels: int = 32) -> nn.Module:
    """Ten convolutions with BatchNorm: thirty buffers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 3
    for _ in range(10):
        layers += [nn.Conv2d(width, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        width = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


MODELS = {
    "mlp": mlp,
    "wide mlp": lambda: mlp(4096),
    "cnn": cnn,
    "wide cnn": lambda: cnn(256),
}


def data(kind: str, samples: int) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    shape = (64,) if "mlp" in kind else (3, 16, 16)
    inputs = torch.randn(samples, *shape, generator=random)
    return TensorDataset(inputs, torch.randint(10, (samples,), generator=random))


class Clock(Callback):
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.step_s = first, last, math.nan

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step in (self.first, self.last):
            if GPU:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step == self.last:
                self.step_s = (now - self._began) / (self.last - self.first)
            self._began = now


class Alternate(Callback):
    """Switches the readiness of eager steps off and on, every BLOCK steps, and times both."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"without": [], "with": []}
        self._began: float | None = None

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step % BLOCK:
            return
        if GPU:
            torch.cuda.synchronize()
        now = time.perf_counter()
        name = "without" if "keep" in vars(manager.trainer.eager.start) else "with"
        if self._began is not None and step > 10 * BLOCK * GPU:
            self.times[name].append((now - self._began) / BLOCK * 1e6)
        self._switch(manager.trainer, off=name == "with")
        self._began = time.perf_counter()

    def _switch(self, trainer: Any, off: bool) -> None:
        gate, optimizer = trainer.nan_guard, vars(trainer.optimizer)
        if off:
            trainer.eager.start.keep = lambda: None
            self._kept = gate.mode, optimizer.pop("found_inf", None)
            gate.mode = "none"
            return
        del vars(trainer.eager.start)["keep"]
        gate.mode, found = self._kept
        if found is not None:
            optimizer["found_inf"] = found
        gate.start()


@contextmanager
def unready() -> Iterator[None]:
    """Steps without the gate for NaN, copies of BatchNorm's buffers, and notes of the place."""
    with ExitStack() as stack:

        def put(holder: Any, name: str, instead: Any) -> None:
            stack.enter_context(mock.patch.object(holder, name, instead))

        put(NanGuard, "attach", lambda self, optimizer: None)
        put(StepStart, "keep", lambda self: None)
        for name in ("note_step", "note_phase", "note_count"):
            for module in (trainer, step_state, eager, selection, loop, stopping):
                if hasattr(module, name):
                    put(module, name, lambda *_, **__: None)
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
        callbacks=hooks,
    )
    return manager


def step_us(folder: Path, case: Case, *hooks: Callback) -> tuple[float, str]:
    clock = Clock(case.steps // 4, case.steps)
    done = run(
        folder,
        MODELS[case.model](),
        data(case.model, case.batch * case.epoch_steps),
        batch_size=case.batch,
        max_steps=case.steps,
        step_execution=case.execution,
        callbacks=[clock, *hooks],
    )
    return clock.step_s * 1e6, done.trainer.execution.mode


def cost(folder: Path, case: Case) -> dict[str, Any]:
    times: dict[str, list[float]] = {"without": [], "with": []}
    mode = ""
    if case.execution == "eager":
        for _ in range(case.rounds):
            alternate = Alternate()
            mode = step_us(folder, case, alternate)[1]
            for name, found in alternate.times.items():
                times[name] += found
        return row(case, mode, times)
    ways = [("without", unready), ("with", ready)]
    for number in range(case.rounds):
        for name, context in ways if number % 2 else reversed(ways):
            with context():
                taken, mode = step_us(folder, case)
            times[name].append(taken)
    return row(case, mode, times)


def launched(folder: Path, case: Case) -> dict[str, Any]:
    """The same step in a script of its own: alone, and under `mgt run`."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    alone = [sys.executable, __file__]
    watched = [sys.executable, "-m", "multi_gpu_training", "run", "--num-gpus", "1", __file__]
    mode = ""
    for number in range(case.rounds):
        for name in ("without", "with") if number % 2 else ("with", "without"):
            command = watched if name == "with" else alone
            given = ["--one", json.dumps(asdict(case)), "--out", str(folder / "one.json")]
            done = subprocess.run([*command, *given], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            taken, mode = json.loads((folder / "one.json").read_text())
            times[name].append(taken)
    return {**row(case, mode, times), "model": f"{case.model}, launcher"}


def row(case: Case, mode: str, times: dict[str, list[float]]) -> dict[str, Any]:
    without = statistics.median(times["without"])
    if case.execution == "eager":
        extra = statistics.median(times["with"]) - without
    else:
        both = zip(times["without"], times["with"], strict=True)
        extra = statistics.median(after - before for before, after in both)
    return {
        "model": case.model,
        "asked": case.execution,
        "ran": mode,
        "epoch_steps": case.epoch_steps,
        "without_us": without,
        "with_us": statistics.median(times["with"]),
        "cost_us": extra,
        "cost": extra / without,
        "ok": extra <= max(5.0, 0.01 * without),
        "rounds": times,
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
    return {"parts": manager.trainer.oom.parts, "apart": worst, "seconds": seconds}


def table(costs: list[dict[str, Any]], nan: dict[str, Any], memory: dict[str, Any]) -> str:
    where = torch.cuda.get_device_name() if GPU else platform.processor() or "CPU"
    lines = [f"# Ready for faults: what it costs a step ({where}, torch {torch.__version__})", ""]
    lines += ["| model | steps run as | steps of an epoch | without | with | cost | noise | |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in costs:
        lines.append(
            f"| {row['model']} | {row['ran']} | {row['epoch_steps']} | {row['without_us']:,.1f} us "
            f"| {row['with_us']:,.1f} us | {row['cost_us']:+.1f} us ({row['cost']:+.1%}) "
            f"| {noise(row):.1f} us | {'yes' if row['ok'] else 'no'} |"
        )
    lines += ["", "Allowed: 1 % of the step or 5 us. Noise: standard error of the median without."]
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


def noise(row: dict[str, Any]) -> float:
    rounds = row["rounds"]["without"]
    if len(rounds) < 2:
        return math.nan
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    # Of a median over n rounds, as if they were independent.
    return 0.93 * (high - low) / math.sqrt(len(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("faults"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tiny = options.tiny or not GPU
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.one:
            found = step_us(folder, Case(**json.loads(options.one)))
            options.out.write_text(json.dumps(found))
            return
        costs = []
        for case in TINY if tiny else CASES:
            costs.append(cost(folder / "cost", case))
            print(costs[-1], flush=True)
        costs.append(launched(folder, TINY[0] if tiny else Case("mlp", "graph", 64, 512, 6000, 3)))
        print(costs[-1], flush=True)
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
