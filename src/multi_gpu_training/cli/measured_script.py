"""The script or recipe that a command measures, and a runner for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from multi_gpu_training.measure.script_runner import ScriptRunner


class MeasuringFlags(Protocol):
    """The flags that say how to measure."""

    @property
    def command(self) -> list[str]: ...
    @property
    def steps(self) -> int: ...
    @property
    def warmup(self) -> int | None: ...
    @property
    def device(self) -> str: ...
    @property
    def timeout_s(self) -> float: ...


@contextmanager
def runner_for(name: str, flags: MeasuringFlags, console: Console) -> Iterator[ScriptRunner]:
    """A runner for `mgt NAME`, with a folder for as long as it is used."""
    from multi_gpu_training.distributed.identity import from_environment
    from multi_gpu_training.measure.script_runner import ScriptRunner

    if from_environment() is not None:
        raise ConfigError(f"mgt {name} starts ranks itself; start it without torchrun or srun")
    with tempfile.TemporaryDirectory(prefix=f"mgt-{name}-") as scratch:
        runner = ScriptRunner(
            command_of(flags.command, name),
            Path(scratch),
            flags.steps,
            flags.warmup,
            flags.device,
            flags.timeout_s,
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
