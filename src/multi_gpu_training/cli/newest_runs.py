"""The newest runs here, for a command that was given none."""

from __future__ import annotations

import shlex
from pathlib import Path

from multi_gpu_training.safe_output import printable

SHOWN = 3


def suggestions(command: str) -> list[str]:
    """The command with each of the newest runs in ./runs, the newest first."""
    found = []
    for config in Path("runs").glob("*/*/config.yaml"):
        run = config.parent
        if command == "resume" and run.parent.name == "custom":
            continue  # its script resumes it
        try:
            found.append((max(run.stat().st_mtime, (run / "events").stat().st_mtime), str(run)))
        except OSError:  # removed meanwhile, or it has not begun
            continue
    newest = sorted(found, reverse=True)[:SHOWN]
    return [f"mgt {command} {shlex.quote(printable(run))}" for _, run in newest]
