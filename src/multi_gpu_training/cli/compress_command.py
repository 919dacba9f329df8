"""`mgt compress`: make a trained model smaller, and say what that costs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from multi_gpu_training.cli.measured_script import folder_problems
from multi_gpu_training.delivery.compression_plan import MaxDrop, read_settings
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_output import brief

MOST_EPOCHS = 1_000_000


def compress(
    run: str,
    methods: list[str],
    out: str | None,
    max_drop: str | None,
    device: str,
    epochs: int | None,
    lr: float | None,
    trust: bool,
) -> int:
    """Show the table. Returns 1 if no compressed model holds."""
    settings, tolerance = read_settings(methods), MaxDrop.read(max_drop)
    problems = folder_problems("--out", out)
    if epochs is not None and not 1 <= epochs <= MOST_EPOCHS:
        problems.append(f"--epochs {brief(epochs)}: use 1 to {MOST_EPOCHS:,}")
    if lr is not None and not 0 < lr < math.inf:
        problems.append(f"--lr {lr:g}: use a number above 0")
    if problems:
        raise ConfigError(problems)
    if out is None and is_url(run):
        raise ConfigError(f"{run[:80]} is not on this machine; name a folder with --out")
    # These import torch: what is wrong with the flags was said a second before.
    from rich.console import Console

    from multi_gpu_training.delivery.compress_run import HowToTrain, compress_run
    from multi_gpu_training.delivery.compression_report import PICTURE, draw, show_table
    from multi_gpu_training.delivery.loaded_model import load
    from multi_gpu_training.launch.cpu_threads import choose_threads

    loaded = load(run, device=device, trust=trust)
    folder = Path(out) if out is not None else _beside(Path(run).expanduser())
    if (folder / "config.yaml").exists() or (folder / "checkpoints").exists():
        raise ConfigError(f"--out {folder} is a run folder; choose a folder of its own")
    taken = [setting.folder for setting in settings if (folder / setting.folder).exists()]
    if taken:
        raise ConfigError(
            f"{folder} already has {', '.join(taken)}; remove it, or choose another --out",
            code="MGT106",
        )
    # Threads that wait for a busy core would distort every time in the table.
    threads = choose_threads(None, deterministic=False) if loaded.device.type == "cpu" else None
    if threads is not None:
        print(threads, flush=True)
    found = compress_run(loaded, settings, folder, tolerance, HowToTrain(epochs, lr))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # into a file or a pipe nothing need be cut
    show_table(found, console)
    if len(found.rows) > 2 and draw(found, folder / PICTURE):
        print(f"picture: {folder / PICTURE}")
    kept = [row for row in found.rows[1:] if row.holds and row.folder]
    for row in kept:
        print(f"{row.name}: {row.folder}")
    if not kept:
        if all(row.problem is not None for row in found.rows[1:]):
            print("no model could be made; the reasons stand below the table", file=sys.stderr)
        else:
            print(f"every compressed model loses more than {max_drop}", file=sys.stderr)
    return 0 if kept else 1


def _beside(run: Path) -> Path:
    """RUN-compressed, also where RUN is one of its checkpoints."""
    folder = run.resolve()
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    return folder.with_name(f"{folder.name}-compressed")
