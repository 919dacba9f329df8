"""Write the pictures in docs/pictures: what commands print at several widths, and curves of runs.

    python scripts/make_screenshots.py WORKING_FOLDER [PICTURE ...]

trains the image recipe in WORKING_FOLDER for a minute. Look at the pictures before you commit them.
Needs matplotlib.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
RUN = "runs/image/shown"
SLOW = "runs/custom/slow-loader"
# A run with something to report: rank 1 reads its samples slowly.
SLOW_LOADER = """
import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

config = MultiGPUConfig(global_batch_size=32, epochs=4, run_name="slow-loader", num_workers=0)
manager = MultiGPUTrainingManager(config)


class Images(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        if os.environ["RANK"] == "1":
            time.sleep(0.01)
        return torch.full((3, 16, 16), index / 1600), index % 10


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
manager.fit(model, Images())
"""
# Picture -> its width in columns, and the command.
SHOWN = {
    "help": (80, ["train", "image", "--help"]),
    # Short: the README's first screen shows it.
    "training": (100, ["train", "image", "--epochs", "5", "--run-name", "shown"]),
    "report": (100, ["report", SLOW]),
    "report-wide": (200, ["report", SLOW, "--no-html"]),
    "estimate": (
        100,
        [
            *("estimate", "image", "--mode", "cnn", "--device", "cpu", "--gpus", "1,2,4,8"),
            *("--gpus-per-node", "1", "--interconnect", "ethernet-10g", "--price", "0.05"),
            *("--price-source", "price list of the provider", "--out", "ex"),
        ],
    ),
}


def screenshot(name: str, width: int, words: list[str], folder: Path) -> None:
    """Run `mgt WORDS` and write what it prints as docs/pictures/NAME.svg."""
    # The colours of a help make its picture three times as large.
    colour = {"NO_COLOR": "1"} if "--help" in words else {"FORCE_COLOR": "1"}
    env = {**os.environ, "COLUMNS": str(width), "TERM": "xterm-256color", **colour}
    done = subprocess.run(
        [sys.executable, "-m", "multi_gpu_training", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    console = Console(width=width, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(Text.from_ansi(f"$ mgt {' '.join(words)}\n{done.stdout.rstrip()}"))
    console.save_svg(str(PICTURES / f"{name}.svg"), title=f"{width} columns")


def train_with_a_slow_loader(folder: Path) -> None:
    shutil.rmtree(folder / SLOW, ignore_errors=True)
    (folder / "slow_loader.py").write_text(SLOW_LOADER)
    command = ["run", "--num-gpus", "2", "slow_loader.py"]
    subprocess.run(
        [sys.executable, "-m", "multi_gpu_training", *command],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def loss_curves(folder: Path) -> None:
    """Train on one rank and on four, and draw both losses as docs/pictures/loss-1-4.svg."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "loss-1-4"  # the same file from the same figures
    _, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    for ranks, style in ((1, {"linewidth": 5, "alpha": 0.35}), (4, {"linestyle": "--"})):
        name = f"ranks-{ranks}"
        shutil.rmtree(folder / "runs/image" / name, ignore_errors=True)
        command = ["train", "image", "--num-gpus", str(ranks), "--run-name", name, "--epochs", "10"]
        subprocess.run(
            [sys.executable, "-m", "multi_gpu_training", *command]
            + ["global_batch_size=64", "log_every=2", "seed=0"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = (folder / "runs/image" / name / "events/rank-0.jsonl").read_text().splitlines()
        steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
        label = "1 rank" if ranks == 1 else f"{ranks} ranks"
        axes.plot([e["step"] for e in steps], [e["loss"] for e in steps], label=label, **style)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.legend()
    pyplot.savefig(PICTURES / "loss-1-4.svg", metadata={"Date": None})


if __name__ == "__main__":
    where, asked = Path(sys.argv[1]), sys.argv[2:] or [*SHOWN, "metrics", "loss-1-4"]
    for picture, (columns, command) in SHOWN.items():
        if picture in asked:
            if picture == "training":
                shutil.rmtree(where / RUN, ignore_errors=True)
            if picture == "report":
                train_with_a_slow_loader(where)
            screenshot(picture, columns, command, where)
            print(f"{picture}.svg: mgt {' '.join(command)}")
    if "metrics" in asked:
        curves = RUN.replace("shown", "curves")
        shutil.rmtree(where / curves, ignore_errors=True)
        command = ["train", "image", "--epochs", "40", "--run-name", "curves"]
        subprocess.run(
            [sys.executable, "-m", "multi_gpu_training", *command], cwd=where, check=True
        )
        shutil.copyfile(where / curves / "metrics.png", PICTURES / "metrics.png")
    if "loss-1-4" in asked:
        loss_curves(where)
