"""How long an all-reduce takes: interpolated in tables of measurements, never from peak
bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CURVE_COLUMNS = ("source", "method", "hardware", "gpus", "nodes", "bytes", "time_us", "busbw_GBps")


@dataclass(frozen=True)
class Curve:
    """All-reduce times of one group of GPUs by message size, sizes ascending."""

    gpus: int
    nodes: int
    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class Interconnect:
    """A named machine type (or cluster) with its curves."""

    name: str
    about: str
    curves: tuple[Curve, ...]

    def allreduce_s(self, size_bytes: float, gpus: int, nodes: int = 1) -> float:
        """Seconds of one all-reduce. Raises ConfigError where nothing was measured to go by."""
        raise NotImplementedError

    def extrapolated(self, gpus: int, nodes: int = 1) -> bool:
        """Whether this group is larger than every one that was measured."""
        raise NotImplementedError


def named_interconnects() -> tuple[Interconnect, ...]:
    """All that ship with the product, for a listing."""
    raise NotImplementedError


def named(name: str) -> Interconnect:
    """The one of that name, or a ConfigError that lists the names."""
    raise NotImplementedError


def measured(path: Path, *, name: str | None = None) -> Interconnect:
    """Your own curve: a CSV with CURVE_COLUMNS, as `mgt check --save-curve` writes it."""
    raise NotImplementedError
