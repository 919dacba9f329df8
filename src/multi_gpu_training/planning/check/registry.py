"""The checks of a machine, in order. A new one is a function in any module of this package:

    @check(order=35)
    def clock(context: Context) -> Iterator[Finding]:
        yield from judge(look(), context.ranks_here)

It looks, judges what it saw, and says what to do. Modules are found by themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.planning.check.check_report import Finding
from multi_gpu_training.planning.check.nvml import Gpu, Nvml, Port
from multi_gpu_training.planning.check.topology import Topology

PACKAGE = "multi_gpu_training.planning.check"


@dataclass(frozen=True)
class CheckOptions:
    """What `mgt check` was asked. `hosts` are the flags of several machines, `save_url` is where
    runs are uploaded to; `save_dir` is then the folder of their local copies."""

    device: str = "auto"
    num_gpus: int = -1
    save_dir: Path = Path("runs")
    timeout_s: float = 60.0
    hosts: Mapping[str, Any] = field(default_factory=dict)
    save_url: str | None = None


@dataclass
class Context:
    """What a check may look at. `gpu_count` are the GPUs that the ranks here will use."""

    options: CheckOptions
    env: Mapping[str, str]
    topology: Topology
    nvml: Nvml
    gpu_count: int = 0
    problems: list[Finding] = field(default_factory=list)  # with RANK, WORLD_SIZE and the like
    # What earlier checks saw: the GPUs that torch shows, and how each is connected.
    gpus: Sequence[Gpu] = ()
    ports: Mapping[int, Port] = field(default_factory=dict)

    @property
    def ranks_here(self) -> int:
        return self.topology.ranks_here(self.gpu_count)


Check = Callable[[Context], Iterable[Finding]]
_checks: list[tuple[int, Check]] = []


def check(order: int) -> Callable[[Check], Check]:
    """Register a check of this machine; lower numbers come first."""

    def register(function: Check) -> Check:
        _checks.append((order, function))
        return function

    return register


def all_checks() -> list[Check]:
    """Every check of this package, in order."""
    # Importing a module is what registers its checks.
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{PACKAGE}.{module.name}")
    return [function for _, function in sorted(_checks, key=lambda entry: entry[0])]
