"""Write the pictures in docs/pictures: what commands print at several widths, and a run's curves.

    python scripts/make_screenshots.py WORKING_FOLDER

trains the image recipe in WORKING_FOLDER for half a minute. Look at the pictures before you commit
them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
RUN = "runs/image/shown"
# Picture -> its width in columns, and the command.
SHOWN = {
    "help": (80, ["train", "image", "--help"]),
    "training": (100, ["train", "image", "--epochs", "20", "--run-name", "shown"]),
    "report": (100, ["report", RUN]),
    "report-wide": (200, ["report", RUN, "--no-html"]),
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


if __name__ == "__main__":
    where = Path(sys.argv[1])
    shutil.rmtree(where / RUN, ignore_errors=True)
    for picture, (columns, command) in SHOWN.items():
        screenshot(picture, columns, command, where)
        print(f"{picture}.svg: mgt {' '.join(command)}")
    shutil.copyfile(where / RUN / "metrics.png", PICTURES / "metrics.png")
