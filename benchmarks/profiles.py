"""`mgt profile` on the GPU: does it name the kernel that a trace made by hand names?

    python benchmarks/profiles.py --out profiles.json

Each model trains three times with the defaults of `fit`: under `mgt profile`, under torch.profiler
started by a callback that knows nothing of ours, and without a trace. The first two must agree on
the longest kernel. The first and the last show what steps cost after those that were traced.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import mlp
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from whole_runs import ViT

TRACED = (60, 64)
TIMED = (100, 300)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    if not torch.cuda.is_available():
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=500))
    return GPT2LMHeadModel(GPT2Config())


def text(words: int, samples: int = 512, length: int = 512) -> Dataset[Any]:
    tokens = torch.randint(0, words, (samples, length if torch.cuda.is_available() else 16))
    return TensorDataset(tokens, tokens)


def labelled(*shape: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(4096, *shape), torch.randint(0, 10, (4096,)))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def predict_words(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch[0], labels=batch[1]).loss  # type: ignore[no-any-return]


# name: model, data, loss, batch size
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Dataset[Any]], Any, int]] = {
    "mlp": (mlp, lambda: labelled(64), classify, 32),
    "vit": (ViT, lambda: labelled(3, 32, 32), classify, 128),
    "gpt2": (gpt2, lambda: text(500 if not torch.cuda.is_available() else 50257), predict_words, 8),
}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(name: str, way: str | None, out: Path) -> None:
    """The script that is traced. It says how long steps take behind the traced ones."""
    from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

    build, data, loss_fn, batch = CASES[name]

    class Clock(Callback):
        begun = 0.0

        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step in TIMED:
                wait()
                now = time.perf_counter()
                if result.step == TIMED[1]:
                    us = (now - self.begun) / (TIMED[1] - TIMED[0]) * 1e6
                    out.write_text(json.dumps({"us": us, "mode": mode(), "kernels": kernels}))
                self.begun = now

    class ByHand(Callback):
        profiler: Any = None

        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step == TRACED[0] - 1:
                wait()
                kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
                self.profiler = torch.profiler.profile(activities=kinds)
                self.profiler.__enter__()
            elif result.step == TRACED[1]:
                wait()
                self.profiler.__exit__(None, None, None)
                for event in self.profiler.events():
                    if event.device_type == torch.autograd.DeviceType.CUDA:
                        kernels[event.name] += event.device_time

    kernels: Counter[str] = Counter()
    callbacks: list[Callback] = [Clock()]
    if way == "by hand":
        callbacks.insert(0, ByHand())
    torch.manual_seed(0)
    folder = os.environ.get("PROFILES_FOLDER", "runs")
    config = MultiGPUConfig(
        batch_size=batch,
        save_dir=folder,
        max_steps=TIMED[1],
        epochs=10_000,
        progress="off",
        profile_steps="{}-{}".format(*TRACED) if way == "traced" else None,
    )
    manager = MultiGPUTrainingManager(config)

    def mode() -> str:
        return str(manager.trainer.execution.mode)

    manager.fit(build(), data(), loss_fn=loss_fn, callbacks=callbacks)


def started(name: str, folder: str, way: str) -> tuple[dict[str, Any], str]:
    """Run this script for `name` once; what its clock found, and what was printed."""
    out = Path(folder) / "found.json"
    out.unlink(missing_ok=True)
    tail = ["--child", name, "--way", way, "--out", str(out)]
    command = [sys.executable, __file__, *tail]
    if way == "mgt profile":
        steps = ["--steps", "{}-{}".format(*TRACED), "--ranks", "0"]
        command = [sys.executable, "-m", "multi_gpu_training", "profile", *steps, __file__]
        command += ["--", *tail]
    environment = {**os.environ, "PROFILES_FOLDER": folder}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    printed = done.stdout + done.stderr
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{printed[-3000:]}")
    return json.loads(out.read_text()) if out.exists() else {}, printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("profiles.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.child, options.way, options.out)
        return
    found: dict[str, Any] = {}
    for name in options.models.split(","):
        after: dict[str, list[float]] = {"traced": [], "plain": []}
        with tempfile.TemporaryDirectory() as folder:
            _, printed = started(name, folder, "mgt profile")
            print(printed, flush=True)
            by_hand, _ = started(name, folder, "by hand")
            for _ in range(options.rounds):
                for way, times in after.items():
                    times.append(started(name, folder, way)[0]["us"])
        top = Counter(by_hand["kernels"]).most_common(5)
        ratio = statistics.median(after["traced"]) / statistics.median(after["plain"])
        found[name] = {
            "mode": by_hand["mode"],
            "by hand": top,
            "after": after,
            "ratio": ratio,
            "printed": printed,
        }
        print(name, by_hand["mode"], "by hand:", json.dumps(top, indent=1))
        print(f"{name}: steps after the traced ones / steps of a run without: {ratio:.3f}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{device}; torch {torch.__version__}, Python {platform.python_version()}"
    options.out.write_text(json.dumps({"machine": machine, "found": found}, indent=1))


if __name__ == "__main__":
    main()
