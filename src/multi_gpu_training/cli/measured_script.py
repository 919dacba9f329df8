"""The script or recipe that a command measures, the flags that say how, and a runner for it."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.run_places import is_url, path_problem
from multi_gpu_training.safe_output import brief

if TYPE_CHECKING:
    from rich.console import Console

    from multi_gpu_training.measure.script_runner import ScriptRunner


LARGEST = 2**40  # steps, batch sizes or GPUs that anybody could mean
READ_ONLY = ("/proc", "/sys")  # root may write there, it seems


@dataclass(frozen=True)
class MeasuringFlags:
    """What was said about measuring. `planning_commands.py` explains each flag."""

    command: list[str]
    steps: int
    warmup: int | None
    device: str
    timeout: float

    def problems(self) -> list[str]:
        return [
            *place_problems(self.device, self.timeout),
            *too_small(("--steps", self.steps, 2), ("--warmup", self.warmup, 1)),
        ]


def place_problems(device: str, timeout: float) -> list[str]:
    """What is wrong with the two flags that every command has that starts ranks."""
    problems = []
    if not 0 < timeout < math.inf:
        problems.append(f"--timeout {timeout:g}: give seconds, more than 0")
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"--device {device}: use auto, cpu or cuda")
    return problems


def folder_problems(flag: str, path: str | None) -> list[str]:
    """What keeps `path` from being a folder to write to, found before hours of measuring."""
    if path is None or is_url(path):
        return []
    problem = path_problem(path)
    if problem is None:
        here = Path(path).expanduser()
        there = next((up for up in (here, *here.absolute().parents) if os.path.lexists(up)), here)
        if there.is_symlink() and not there.exists():
            problem = f"{there} is a link to nowhere"
        elif not there.is_dir():
            problem = f"{there} is not a folder"
        elif not os.access(there, os.W_OK | os.X_OK) or str(there).startswith(READ_ONLY):
            problem = f"{there} cannot be written"
    return [] if problem is None else [f"{flag} {brief(path)}: {problem}; choose another folder"]


def file_problems(flag: str, path: str | None) -> list[str]:
    """The same for a file."""
    if path is None:
        return []
    problem = path_problem(path)
    if problem is None and Path(path).is_dir():
        problem = "it is a folder"
    elif problem is None and os.path.lexists(path) and not Path(path).is_file():
        problem = "it is not a regular file"
    if problem is not None:
        return [f"{flag} {brief(path)}: {problem}; give the name of a file"]
    return folder_problems(flag, str(Path(path).absolute().parent))


def rank_problems(flag: str, ranks: int | None, device: str = "auto") -> list[str]:
    """What is wrong with a number of ranks: without GPUs each is a process on this machine."""
    from multi_gpu_training.launch.launcher import available_gpus, too_many_ranks

    # Numbers that no machine has need no look at the GPUs, which takes seconds.
    if ranks is None or ranks <= 2 or (problem := too_many_ranks(ranks)) is None:
        return []
    gpus = available_gpus() if device != "cpu" else 0
    return [f"{flag} {brief(ranks, 40)}: {problem}"] if ranks > gpus else []


def too_small(*flags: tuple[str, int | None, int]) -> list[str]:
    """Of (name, value, least), those that were given and are less, or beyond any reason."""
    return [
        f"{name} {brief(value, 40)}: use at least {least}"
        + (f" and at most {LARGEST:,}" if value > LARGEST else "")
        for name, value, least in flags
        if value is not None and not least <= value <= LARGEST
    ]


def numbers(flag: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text[:80]}: use numbers like 128,256,512") from None
    if min(found) < 1:
        raise ConfigError(f"{flag} {text[:80]}: each must be at least 1")
    if max(found) > LARGEST:
        raise ConfigError(f"{flag} {text[:80]}: each must be at most {LARGEST:,}")
    return found


@contextmanager
def runner_for(name: str, flags: MeasuringFlags, console: Console) -> Iterator[ScriptRunner]:
    """A runner for `mgt NAME`, with a folder for as long as it is used."""
    from multi_gpu_training.distributed.identity import from_environment
    from multi_gpu_training.measure.script_runner import ScriptRunner

    # Under a launcher every rank would start a measurement of its own.
    if from_environment() is not None:
        raise ConfigError(
            f"mgt {name} starts ranks itself; start it without torchrun or srun", code="MGT202"
        )
    with tempfile.TemporaryDirectory(prefix=f"mgt-{name}-") as scratch:
        runner = ScriptRunner(
            command_of(flags.command, name),
            Path(scratch),
            flags.steps,
            flags.warmup,
            flags.device,
            flags.timeout,
            say=lambda text: console.print(f"  {text}", markup=False),
        )
        if flags.device == "cuda" and not runner.gpus:
            raise ConfigError(
                "--device cuda: torch sees no GPU; `mgt info` shows why", code="MGT201"
            )
        yield runner


def command_of(words: list[str], command: str) -> list[str]:
    """What runs once per rank: a script, or `mgt train` of a recipe or config."""
    target = words[0]
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise ConfigError(f"mgt {command} {target}: no such file", code="MGT104")
        return words
    given = [
        word for word in words[1:] if re.match(r"(--num[-_]gpus|(num_gpus|world_size)=)", word)
    ]
    if given and command in ("verify", "bench"):  # profile and check have the flag themselves
        raise ConfigError(f"{given[0]}: mgt {command} chooses the ranks itself; use --ranks")
    return ["-m", "multi_gpu_training", "train", *words]
