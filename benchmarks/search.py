"""Show what a search promises, on this machine's CPUs.

    python benchmarks/search.py ranks            the same study on 1 and 2 ranks
    python benchmarks/search.py kills --kills 8  kill -9 of the search, a trial's launcher, a rank
    python benchmarks/search.py random --fashion fashion-mnist
                                                 TPE against random search, study by study
    python benchmarks/search.py same             suggestions and values against a plain Optuna loop

`same` and `random` take digits, and with --fashion a part of Fashion-MNIST.

Each prints a table and exits with 1 where a promise is broken. `tests/search` holds NSGA-II against
brute force, and suggestions with pruners against plain Optuna.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Parts = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

config = MultiGPUConfig(
    global_batch_size=16, epochs=4, device="cpu", monitor=False, tensorboard=False,
    progress="off", checkpoint_frequency=2, report=False,
)
manager = MultiGPUTrainingManager(config)
random = torch.Generator().manual_seed(0)
x = torch.randn(64, 8, generator=random, dtype=torch.float64)
y = x @ torch.randn(8, 1, generator=random, dtype=torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
manager.fit(
    model,
    TensorDataset(x, y),
    TensorDataset(x[:32], y[:32]),
    loss_fn=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
)
"""


def command(script: Path, study: str, folder: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "multi_gpu_training", "search", str(script)),
        *("--save-dir", str(folder), "--study", study, "--device", "cpu", *more),
    ]


def trials_of(study: Path) -> list[dict[str, Any]]:
    """Every trial of a finished study, by its number, from Optuna's own storage."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = optuna.load_study(study_name=study.name, storage=f"sqlite:///{study / 'study.db'}")
    return [
        {
            "number": one.number,
            "state": one.state.name,
            "params": one.params,
            "values": one.values,
            "reported": one.intermediate_values,
            "run": one.user_attrs.get("mgt:run"),
        }
        for one in found.get_trials(deepcopy=False)
    ]


def compare_ranks(args: argparse.Namespace, folder: Path) -> int:
    """The same study, sequential, with one rank per trial and with two."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    space = ("--param", "learning_rate=1e-3..1e-1:log", "--param", "weight_decay=0.0..0.1")
    # ASHA prunes from the second trial on; the median pruner waits for five complete ones.
    how = (
        "--trials",
        str(args.trials),
        "--pruner",
        "asha",
        "--seed",
        "0",
        "--metric",
        "val/loss",
    )
    found = {}
    for ranks in (1, 2):
        words = (*space, *how, "--gpus-per-trial", str(ranks), "--parallel", "1")
        subprocess.run(command(script, f"ranks-{ranks}", folder, *words), check=True)
        found[ranks] = trials_of(folder / f"ranks-{ranks}")
    one, two = found[1], found[2]
    same = [a["params"] for a in one] == [b["params"] for b in two]
    states = [a["state"] for a in one] == [b["state"] for b in two]
    pruned = [a["number"] for a in one if a["state"] == "PRUNED"]
    pairs = [(a["values"][0], b["values"][0]) for a, b in zip(one, two, strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    print(f"trials {len(one)} and {len(two)}; same suggestions: {same}; same states: {states}")
    print(f"pruned: {pruned}; largest difference of a value: {worst:.1e}")
    return 0 if same and states and worst <= 1e-6 else 1


def kill_campaign(args: argparse.Namespace, folder: Path) -> int:
    """kill -9 of anything while a grid is searched; then against the undisturbed study."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    grid = ("--param", "learning_rate=0.01,0.1", "--param", "weight_decay=0.0,0.1")
    ranks = ("--gpus-per-trial", str(args.ranks))
    words = (*grid, *ranks, "--sampler", "grid", "--trials", "4", "--metric", "val/loss")
    if not (folder / "quiet" / "report.html").exists():  # of an earlier campaign in --folder
        line = command(script, "quiet", folder, *words, "--parallel", str(args.parallel))
        subprocess.run(line, check=True)
    quiet = trials_of(folder / "quiet")

    chance = random.Random(args.seed)
    study, kills, starts = folder / "killed", [], 0
    words = (*words, "--parallel", str(args.parallel))
    process = subprocess.Popen(command(script, "killed", folder, *words))
    while True:
        deadline = time.monotonic() + chance.uniform(args.least_s, args.most_s)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is not None:
            if process.returncode == 0:
                break
            if not (study / "search.yaml").exists():  # killed before it had begun
                process = subprocess.Popen(command(script, "killed", folder, *words))
                continue
            starts += 1
            again = [sys.executable, "-m", "multi_gpu_training", "search", str(study), "--resume"]
            process = subprocess.Popen(again)
            continue
        if len(kills) >= args.kills:
            continue
        below = children(process.pid)
        if not below:  # it still starts: nothing could be lost yet
            continue
        parts = [process.pid, *(one.pid for one in below)]
        victim = process.pid if chance.random() < 0.4 else chance.choice(parts)
        kind = "search" if victim == process.pid else "trial or rank"
        try:
            os.kill(victim, signal.SIGKILL)
            kills.append(kind)
            print(f"kill {len(kills)}: {kind}", flush=True)
        except ProcessLookupError:
            pass
    found = trials_of(study)
    lost = [one["number"] for one in found if one["state"] != "COMPLETE"]
    twice = len({json.dumps(one["params"], sort_keys=True) for one in found}) != len(found)
    same = [(a["params"], a["values"]) for a in quiet] == [
        (b["params"], b["values"]) for b in found
    ]
    print(
        f"{len(kills)} kills ({kills.count('search')} of the search), {starts} resumes; "
        f"{len(found)} trials of {len(quiet)}, not complete: {lost}, repeated: {twice}, "
        f"same values bit for bit: {same}"
    )
    return 0 if not lost and not twice and same and len(found) == len(quiet) else 1


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


SPACE = {
    "learning_rate": "1e-5..1.0:log",
    "weight_decay": "1e-6..1.0:log",
    "width": "4..128:log",
    "dropout": "0.0..0.8",
    "optimizer": ["adamw", "sgd"],
}


def digits_data() -> Parts:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val = order[:1200], order[1200:]
    return (x[train], y[train]), (x[val], y[val])


def fashion_data(folder: Path) -> Parts:
    """2,000 images to train and 1,000 of the test part, every other pixel."""

    def read(part: str, count: int) -> tuple[Tensor, Tensor]:
        images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
        x = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 28, 28)
        y = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
        return x[:count, ::2, ::2].flatten(1).float() / 255, y[:count]

    return read("train", 2000), read("t10k", 1000)


def trained(values: dict[str, Any], data: Parts, steps: int) -> float:
    """The validation loss of a small network after so many steps of 64; always the same."""
    (x, y), (val_x, val_y) = data
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(x.shape[1], values["width"]),
        nn.ReLU(),
        nn.Dropout(values["dropout"]),
        nn.Linear(values["width"], 10),
    )
    kind = torch.optim.AdamW if values["optimizer"] == "adamw" else torch.optim.SGD
    optimizer = kind(
        model.parameters(), values["learning_rate"], weight_decay=values["weight_decay"]
    )
    for _ in range(steps):
        rows = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = F.cross_entropy(model(val_x), val_y).item()
    return found if math.isfinite(found) else 1e9  # diverged: the worst there is


def against_random(args: argparse.Namespace, folder: Path) -> int:
    """TPE and random search on digits and a part of Fashion-MNIST; every study is shown."""
    from multi_gpu_training.search import search

    tasks = {"digits": digits_data()}
    if args.fashion is not None:
        tasks["fashion"] = fashion_data(args.fashion)
    print("| data | sampler | best validation loss, study by study | mean |\n|---|---|---|---|")
    well = True
    for task, data in tasks.items():
        best: dict[str, list[float]] = {name: [] for name in args.samplers.split(",")}
        for sampler, found in best.items():
            for seed in range(args.seed, args.seed + args.studies):
                result = search(
                    lambda values, data=data: trained(values, data, args.steps),
                    SPACE,
                    folder=folder / f"{task}-{sampler}-{seed}",
                    metric="val/loss",
                    trials=args.trials,
                    sampler=sampler,
                    seed=seed,
                    storage="memory",
                )
                assert result.best is not None
                found.append(result.best.values[0])
            shown = ", ".join(f"{value:.4f}" for value in found)
            print(f"| {task} | {sampler} | {shown} | {fmean(found):.4f} |", flush=True)
        if {"tpe", "random"} <= best.keys():
            well = well and fmean(best["tpe"]) < fmean(best["random"])
    return 0 if well else 1


def against_optuna(args: argparse.Namespace, folder: Path) -> int:
    """The same studies by a plain Optuna loop: every suggestion and value, bit for bit."""
    import optuna

    from multi_gpu_training.search import search

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tasks = {"digits": digits_data()}
    if args.fashion is not None:
        tasks["fashion"] = fashion_data(args.fashion)
    print(
        "| data | study seed | trials | same suggestions and values | best |\n|---|---|---|---|---|"
    )
    well = True
    for task, data in tasks.items():
        for seed in range(args.seed, args.seed + args.studies):

            def objective(trial: Any, data: Parts = data) -> float:
                values = {
                    "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1.0, log=True),
                    "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1.0, log=True),
                    "width": trial.suggest_int("width", 4, 128, log=True),
                    "dropout": trial.suggest_float("dropout", 0.0, 0.8),
                    "optimizer": trial.suggest_categorical("optimizer", ["adamw", "sgd"]),
                }
                return trained(values, data, args.steps)

            ours = search(
                lambda values, data=data: trained(values, data, args.steps),
                SPACE,
                folder=folder / f"{task}-{seed}",
                metric="val/loss",
                trials=args.trials,
                seed=seed,
                storage="memory",
            )
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
            plain = optuna.create_study(sampler=sampler)
            plain.optimize(objective, n_trials=args.trials)
            same = [(dict(one.params), one.values[0]) for one in ours.trials] == [
                (one.params, one.value) for one in plain.trials
            ]
            well = well and same
            print(f"| {task} | {seed} | {len(ours.trials)} | {same} | {plain.best_value:.4f} |")
    return 0 if well else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("ranks", "kills", "random", "same"))
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--studies", type=int, default=5)
    parser.add_argument("--samplers", default="tpe,optuna-tpe,random", help="random: which")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fashion", type=Path, help="random: the folder of Fashion-MNIST")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--least-s", type=float, default=1.0)
    parser.add_argument("--most-s", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0, help="random: of the first study")
    parser.add_argument("--folder", type=Path, help="keep the studies there")
    args = parser.parse_args()
    every = {"ranks": compare_ranks, "kills": kill_campaign, "random": against_random}
    run = {**every, "same": against_optuna}[args.what]
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        return run(args, args.folder)
    with tempfile.TemporaryDirectory(prefix="mgt-search-") as scratch:
        return run(args, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
