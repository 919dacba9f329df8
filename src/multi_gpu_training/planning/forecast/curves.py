"""Tables of measured all-reduce times: one curve for each group of GPUs."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multi_gpu_training.errors import ConfigError

CURVE_COLUMNS = ("source", "method", "hardware", "gpus", "nodes", "bytes", "time_us", "busbw_GBps")
NEEDED = ("gpus", "nodes", "bytes", "time_us")


@dataclass(frozen=True)
class Curve:
    """All-reduce times of one group of GPUs by message size, sizes ascending."""

    gpus: int
    nodes: int
    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    source: str

    def time_s(self, size_bytes: float) -> float:
        first, last = self.sizes_bytes[0], self.sizes_bytes[-1]
        if size_bytes <= first:
            return self.times_s[0]
        if size_bytes >= last:
            return self.times_s[-1] * size_bytes / last
        logs = np.interp(math.log(size_bytes), np.log(self.sizes_bytes), np.log(self.times_s))
        return math.exp(float(logs))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that has at least the columns NEEDED."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in NEEDED if column not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(
                f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"'mgt check --save-curve' writes {', '.join(CURVE_COLUMNS)}"
            )
        return list(reader)


def curves_of(path: Path, rows: Iterable[dict[str, str]], default: str) -> tuple[Curve, ...]:
    """One curve for each group of GPUs; several sources of one group give their geometric mean."""
    points: dict[tuple[int, int], dict[str, dict[int, float]]] = defaultdict(dict)
    for number, row in enumerate(rows, start=2):
        try:
            gpus, nodes, size = int(row["gpus"]), int(row["nodes"]), int(float(row["bytes"]))
            time = float(row["time_us"]) * 1e-6
            if not (gpus >= 1 and 1 <= nodes <= gpus and size > 0 and 0 < time < math.inf):
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError(
                f"{path}, line {number}: gpus, nodes, bytes and time_us must be positive numbers, "
                f"and nodes at most gpus; found {[row.get(column) for column in NEEDED]}"
            ) from None
        source = row.get("source") or default
        if gpus > 1:
            points[gpus, nodes].setdefault(source, {})[size] = time
    return tuple(_merged(gpus, nodes, points[gpus, nodes]) for gpus, nodes in sorted(points))


def _merged(gpus: int, nodes: int, sources: dict[str, dict[int, float]]) -> Curve:
    single = [
        Curve(gpus, nodes, tuple(sorted(times)), tuple(times[s] for s in sorted(times)), source)
        for source, times in sources.items()
    ]
    sizes = sorted({size for curve in single for size in curve.sizes_bytes})
    times = []
    for size in sizes:
        covering = [c for c in single if c.sizes_bytes[0] <= size <= c.sizes_bytes[-1]]
        times.append(math.exp(np.mean([math.log(c.time_s(size)) for c in covering])))
    # A first small message often carries the setting up of connections: never slower than a
    # larger one.
    monotonic = np.minimum.accumulate(times[::-1])[::-1]
    return Curve(
        gpus, nodes, tuple(sizes), tuple(float(t) for t in monotonic), "; ".join(sorted(sources))
    )
