"""Trials per minute on one GPU: a search of ours against Optuna around a plain loop.

    python benchmarks/search_gpu.py --out search_gpu.json            about two minutes on an H200
    python benchmarks/search_gpu.py --device cpu --quick             tries the script

Everybody searches the same learning rate, weight decay and clipping norm for the same small CNN
on the same made-up images, with Optuna's TPE and its median pruner, one validation per epoch.

plain      Optuna's own PyTorch example: a DataLoader, `.to(device)`, an eager step, `trial.report`
resident   the same with all data on the GPU and batches by index: the fastest plain loop
function   `search(function)`: trials one after another in this process, steps through a manager
runs       `mgt search SCRIPT --trials-per-gpu N`: every trial is a run of its own, with events and
           checkpoints; small ones share the GPU

Needs torch, this package and Optuna 5: the wheels optuna, alembic, mako, colorlog, tqdm (pure
Python), sqlalchemy, markupsafe, greenlet (cp312, manylinux x86_64), and numpy, packaging, PyYAML,
typing-extensions, which are there with torch and this package. Fetch them with
    pip download --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
        --no-deps -d wheels optuna==5.0.0 alembic mako colorlog tqdm sqlalchemy markupsafe greenlet
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
SAMPLER = "optuna-tpe"  # with Optuna's own arguments, as in the plain loops
PARAMS = {
    "learning_rate": "1e-4..1e-1:log",
    "weight_decay": "1e-4..1.0:log",
    "max_grad_norm": "0.1..10.0:log",
}
SEED = 0
TRAIN, VAL, EPOCHS = "MGT_SEARCH_TRAIN", "MGT_SEARCH_VAL", "MGT_SEARCH_EPOCHS"


def build() -> nn.Module:
    torch.manual_seed(SEED)
    widths, layers = (1, 16, 32, 64), []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 3 * 3, 10))


def images(count: int, seed: int) -> TensorDataset:
    """Ten noisy patterns: learnt in a few epochs, and not by every learning rate."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, 10, (count,), generator=random)
    noise = torch.randn(count, 1, 28, 28, generator=random)
    return TensorDataset(0.25 * patterns[labels] + noise, labels)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# Optuna around a plain loop


def suggested(trial: Any) -> dict[str, float]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-4, 1.0, log=True),
        "max_grad_norm": trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True),
    }


def plain(asked: argparse.Namespace, folder: Path, resident: bool = False) -> dict[str, Any]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    device = torch.device(asked.device)
    train, val = images(asked.train, 2), images(asked.val, 3)
    steps = 0

    def batches(data: TensorDataset, shuffle: bool) -> Callable[[], Iterator[Any]]:
        if not resident:
            loader = DataLoader(
                data, BATCH, shuffle=shuffle, drop_last=shuffle, pin_memory=device.type == "cuda"
            )
            return lambda: ([part.to(device, non_blocking=True) for part in b] for b in loader)
        x, y = (part.to(device) for part in data.tensors)

        def cut() -> Iterator[Any]:
            rows = len(x) // BATCH * BATCH if shuffle else len(x)
            order = (torch.randperm if shuffle else torch.arange)(len(x), device=device)
            for first in range(0, rows, BATCH):
                chosen = order[first : first + BATCH]
                yield x[chosen], y[chosen]

        return cut

    train_batches, val_batches = batches(train, True), batches(val, False)

    def objective(trial: Any) -> float:
        nonlocal steps
        values = suggested(trial)
        model = build().to(device)
        optimizer = torch.optim.AdamW(
            model.parameters(), values["learning_rate"], weight_decay=values["weight_decay"]
        )
        found = 0.0
        for epoch in range(asked.epochs):
            model.train()
            for batch in train_batches():
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), values["max_grad_norm"])
                optimizer.step()
                steps += 1
            model.eval()
            with torch.no_grad():
                sums = [F.cross_entropy(model(x), y, reduction="sum") for x, y in val_batches()]
                found = (torch.stack(sums).sum() / asked.val).item()
            trial.report(found, epoch + 1)
            if trial.should_prune():
                raise optuna.TrialPruned
        return found

    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'plain.db'}",
        sampler=optuna.samplers.TPESampler(seed=SEED),
        pruner=optuna.pruners.MedianPruner(),
    )
    begun = time.perf_counter()
    study.optimize(objective, n_trials=asked.trials)
    took = time.perf_counter() - begun
    return summary(took, [t.state.name.lower() for t in study.trials], study.best_value, steps)


# Ours


def settings_of_a_run() -> dict[str, Any]:
    return {
        "batch_size": BATCH,
        "monitor": False,
        "tensorboard": False,
        "report": False,
        "progress": "off",
    }


def function(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
    from multi_gpu_training.search import search

    train, val = images(asked.train, 2), images(asked.val, 3)
    steps = 0

    def objective(values: dict[str, Any]) -> Iterator[float]:
        nonlocal steps
        manager = MultiGPUTrainingManager(
            MultiGPUConfig(
                **settings_of_a_run(),
                **values,
                training_mode="single",
                device=asked.device,
                epochs=asked.epochs,
                save_dir=str(folder / "kept"),
                enable_fault_tolerance=False,
            )
        )
        manager.setup_training(build(), train, val, loss_fn=loss_fn)
        for epoch in range(asked.epochs):
            manager.train_epoch(manager.train_loader, epoch)
            steps += asked.train // BATCH
            yield manager.validate_epoch()["loss"]
        manager.finish()

    begun = time.perf_counter()
    found = search(
        objective, PARAMS, folder=folder / "function", metric="val/loss", trials=asked.trials,
        sampler=SAMPLER, pruner="median", seed=SEED,
    )  # fmt: skip
    took = time.perf_counter() - begun
    return summary(took, [t.state for t in found.trials], found.best.values[0], steps)


def runs(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from multi_gpu_training.search import search

    script = folder / "train.py"
    script.write_text(Path(__file__).read_text())
    os.environ.update({TRAIN: str(asked.train), VAL: str(asked.val), EPOCHS: str(asked.epochs)})
    side_by_side = {"trials_per_gpu": asked.parallel}
    if asked.device == "cpu":
        side_by_side = {"parallel": asked.parallel}
    begun = time.perf_counter()
    found = search(
        str(script), PARAMS, folder=folder / "runs", metric="val/loss", trials=asked.trials,
        sampler=SAMPLER, pruner="median", seed=SEED, words=["--as-trial"], device=asked.device,
        **side_by_side,
    )  # fmt: skip
    took = time.perf_counter() - begun
    validated = sum(len(t.reported) for t in found.trials)
    steps = validated * (asked.train // BATCH)
    return summary(took, [t.state for t in found.trials], found.best.values[0], steps)


def as_trial() -> None:
    """What each trial of `runs` executes: the values come through the config."""
    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

    config = MultiGPUConfig(**settings_of_a_run(), epochs=int(os.environ[EPOCHS]))
    manager = MultiGPUTrainingManager(config)
    train, val = images(int(os.environ[TRAIN]), 2), images(int(os.environ[VAL]), 3)
    manager.fit(build(), train, val, loss_fn=loss_fn)


def summary(took: float, states: list[str], best: float, steps: int) -> dict[str, Any]:
    return {
        "trials_per_min": 60 * len(states) / took,
        "seconds": took,
        "complete": states.count("complete"),
        "pruned": states.count("pruned"),
        "failed": states.count("fail"),
        "steps": steps,
        "best": best,
    }


WAYS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "plain": plain,
    "resident": lambda asked, folder: plain(asked, folder, resident=True),
    "function": function,
    "runs": runs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--train", type=int, default=9_600)
    parser.add_argument("--val", type=int, default=2_048)
    parser.add_argument("--parallel", type=int, default=8, help="trials that share the GPU")
    parser.add_argument("--quick", action="store_true", help="tiny: only tries the script")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.quick:
        asked.trials, asked.epochs, asked.train, asked.val, asked.parallel = 3, 2, 1_280, 256, 2
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    # Loading CUDA and choosing kernels is not what a search costs: everybody finds them done,
    # except the processes of `runs`, whose own start-up counts.
    loss_fn(build().to(device), [t.to(device) for t in images(BATCH, 0).tensors]).backward()
    found: dict[str, Any] = {"machine": name, "torch": torch.__version__}
    found["asked"] = {key: str(value) for key, value in vars(asked).items()}
    for way in asked.ways.split(","):
        with tempfile.TemporaryDirectory(prefix="mgt-search-") as scratch:
            found[way] = WAYS[way](asked, Path(scratch))
        row = found[way]
        print(
            f"{way:9s} {row['trials_per_min']:7.1f} trials/min  {row['seconds']:6.1f} s  "
            f"{row['complete']} complete, {row['pruned']} pruned, {row['failed']} failed, "
            f"{row['steps']} steps, best {row['best']:.4f}",
            flush=True,
        )
        if asked.out:  # what is there counts if the time runs out
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    rivals = [found[w]["trials_per_min"] for w in ("plain", "resident") if w in found]
    ours = [found[w]["trials_per_min"] for w in ("function", "runs") if w in found]
    if not rivals or not ours:
        return 0
    ratio = max(ours) / max(rivals)
    print(f"ours / fastest plain loop: {ratio:.2f} (1.5 asked)")
    return 0 if ratio >= 1.5 or asked.quick else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-trial"]:
        as_trial()
    else:
        sys.exit(main())
