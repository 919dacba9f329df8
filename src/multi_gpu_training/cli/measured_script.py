"""The script or recipe that a command measures, the flags that say how, and a runner for it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from multi_gpu_training.measure.script_runner import ScriptRunner


@dataclass(frozen=True)
class MeasuringFlags:
    """What was said about measuring. `cli/app.py` holds the defaults and explains each flag."""

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


def too_small(*flags: tuple[str, int | None, int]) -> list[str]:
    """Of (name, value, least), those that were given and are less."""
    return [
        f"{name} {value}: use at least {least}"
        for name, value, least in flags
        if value is not None and value < least
    ]


def numbers(flag: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: give numbers like 128,256,512") from None
    if min(found) < 1:
        raise ConfigError(f"{flag} {text}: each must be at least 1")
    return found


@contextmanager
def runner_for(name: str, flags: MeasuringFlags, console: Console) -> Iterator[ScriptRunner]:
    """A runner for `mgt NAME`, with a folder for as long as it is used."""
    from multi_gpu_training.distributed.identity import from_environment
    from multi_gpu_training.measure.script_runner import ScriptRunner

    # Under a launcher every rank would start a measurement of its own.
    if from_environment() is not None:
        raise ConfigError(f"mgt {name} starts ranks itself; start it without torchrun or srun")
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
            raise ConfigError("--device cuda: torch sees no GPU; `mgt info` shows why")
        yield runner


def command_of(words: list[str], command: str) -> list[str]:
    """What runs once per rank: a script, or `mgt train` of a recipe or config."""
    target = words[0]
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise ConfigError(f"mgt {command} {target}: no such file")
        return words
    return ["-m", "multi_gpu_training", "train", *words]
