"""`mgt profile`: trace a few steps of a training, or show what the traces of a run found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from multi_gpu_training.cli.measured_script import command_of, place_problems
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.safe_output import printable

if TYPE_CHECKING:
    from multi_gpu_training.monitoring.profiling.step_tracer import ProfileRequest

ON_GPU, ON_CPU = "60-64", "6-8"  # on a GPU, steps are recorded before these


def profile(words: list[str], steps: str | None, ranks: str, num_gpus: int, device: str) -> int:
    """Show the profiles of a run folder; of a recipe, config or script make one first."""
    folder = Path(words[0])
    if folder.is_dir() and len(words) == 1:
        return show(folder)
    command_of(words, "profile")  # refuses a script that does not exist
    problems = place_problems(device, 1.0)
    if problems:
        raise ConfigError(problems)
    from multi_gpu_training.monitoring.profiling.step_tracer import ProfileRequest

    if steps is None:
        from multi_gpu_training.accelerator import choose

        steps = ON_GPU if choose(device) == "cuda" else ON_CPU
    MultiGPUConfig(profile_steps=steps, profile_ranks=ranks)  # says what is wrong with them
    return show(_traced(words, ProfileRequest(steps, ranks, device=device), num_gpus))


def _traced(command: list[str], asked: ProfileRequest, num_gpus: int) -> Path:
    """Train until the steps are traced; returns the folder of that run."""
    from multi_gpu_training.monitoring.profiling.step_tracer import VARIABLE

    with tempfile.TemporaryDirectory(prefix="mgt-profile-") as scratch:
        told = Path(scratch) / "folder"
        request = replace(asked, out=str(told))
        environment = {**os.environ, VARIABLE: request.save(Path(scratch))}
        done = subprocess.run(
            _started(command, asked.device, num_gpus), env=environment, check=False
        )
        if done.returncode:
            raise SystemExit(done.returncode)
        if not told.is_file():
            raise ConfigError(
                f"mgt profile {command[0]}: it ended without a training; it must train with a "
                "MultiGPUTrainingManager"
            )
        return Path(told.read_text())


def _started(command: list[str], device: str, num_gpus: int) -> list[str]:
    mgt = [sys.executable, "-m", "multi_gpu_training"]
    count = ["--num-gpus", str(num_gpus)]
    if command[0].endswith(".py"):
        return [*mgt, "run", *count, *command]
    return [*mgt, "train", command[0], *count, f"device={device}", *command[1:]]


def show(folder: Path) -> int:
    from multi_gpu_training.monitoring.profiling.trace_summary import write_summary
    from multi_gpu_training.monitoring.profiling.trace_view import (
        MOST_PROFILES,
        profiles_of,
        show_profiles,
    )

    problems: list[str] = []
    place = folder / "profile"
    if place.is_symlink():  # summaries are written beside the traces
        raise ConfigError(f"{place} is a symbolic link; give the run that the traces belong to")
    for trace in sorted(place.glob("rank-*.json.gz"))[:MOST_PROFILES]:
        summary = trace.with_name(trace.name.removesuffix(".json.gz") + ".summary.json")
        if not summary.exists():  # the run was killed before it could read its traces
            try:
                write_summary(trace)
            except (OSError, ValueError, MultiGPUError) as error:
                reason = getattr(error, "strerror", None) or error
                problems.append(f"{trace.name} cannot be read: {reason!s:.200}")
    found = profiles_of(folder, problems)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    for problem in problems:
        console.print(printable(problem), markup=False)
    if not found:
        raise ConfigError(
            f"mgt profile {folder}: there is no profile in it; train with profile_steps=20-24, or "
            "give `mgt profile` the recipe or script"
        )
    show_profiles(found, console)
    return 0
