"""How long an all-reduce takes: interpolated in tables of measurements, never from peak
bandwidth.

Between measured sizes the time is interpolated in log-log; below the smallest it is that of the
smallest, above the largest it grows with the size. To a number of GPUs that was not measured it is
carried over from the nearest group of the same kind (within one node, or across nodes):

    time(N) = latency * log2(N) / log2(M) + (time(M) - latency) * ((N - 1) / N) / ((M - 1) / M)

with M measured GPUs and the time of the smallest message for latency: the depth of a tree, and the
bytes that a ring sends through each link. Never from one node to several, nor back: where there is
neither table nor measurement, there is an error. Networks were measured between nodes that are fast
inside; an all-reduce across slower ones takes at least as long as within one of them.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import UnreadableFile, read_csv
from multi_gpu_training.safe_output import brief

ABOUT = {
    "v100-nvlink": "V100 SXM2 node, 2-8 GPUs on NVLink 2",
    "a100-nvlink": "A100 SXM node, 2-8 GPUs on NVSwitch",
    "h100-nvlink": "H100 SXM node of 8",
    "h200-nvlink": "H200 SXM node of 8",
    "b200-nvlink": "B200 SXM node of 8",
    "pcie-gen3": "4 V100 on PCIe 3 without NVLink",
    "infiniband-4x100g": "network: DGX-1 nodes with InfiniBand",
    "infiniband-8x200g": "network: nodes of 8 with 200 Gb/s InfiniBand per GPU",
    "efa-32x100g": "network: H100 nodes of 8 with 3,200 Gb/s EFA",
    "efa-8x400g": "network: B200 nodes of 8 with 3,200 Gb/s EFA",
    "fabric-100GBps": "network: nodes of 8, about 100 GB/s per node",
    "ethernet-100g": "network: V100 nodes of 8 with 100 Gb/s (EFA)",
    "ethernet-10g": "network: 10 Gb/s class, measured between 2 nodes of one GPU",
}
CURVE_COLUMNS = ("source", "method", "hardware", "gpus", "nodes", "bytes", "time_us", "busbw_GBps")
NEEDED = ("gpus", "nodes", "bytes", "time_us")


# Tables of measured times: one curve for each group of GPUs


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
    try:
        names, rows = read_csv(path)
    except UnreadableFile as error:
        raise ConfigError(f"{error}; 'mgt check --save-curve' writes one") from None
    missing = [column for column in NEEDED if column not in names]
    if missing:
        raise ConfigError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"'mgt check --save-curve' writes {', '.join(CURVE_COLUMNS)}"
        )
    return rows


def curves_of(path: Path, rows: Iterable[dict[str, str]], default: str) -> tuple[Curve, ...]:
    """One curve for each group of GPUs; several sources of one group give their geometric mean."""
    points: dict[tuple[int, int], dict[str, dict[int, float]]] = defaultdict(dict)
    for number, row in enumerate(rows, start=2):
        try:
            gpus, nodes, size = int(row["gpus"]), int(row["nodes"]), int(float(row["bytes"]))
            time = float(row["time_us"]) * 1e-6
            if not (gpus >= 1 and 1 <= nodes <= gpus and size > 0 and 0 < time < math.inf):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"{path}, line {number}: gpus, nodes, bytes and time_us must be positive numbers, "
                f"and nodes at most gpus; found {brief([row.get(column) for column in NEEDED])}"
            ) from None
        source = row.get("source") or default
        if gpus > 1:  # `mgt check` on one rank measures no exchange
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


# What connects GPUs


@dataclass(frozen=True)
class Interconnect:
    """A named machine type, network or both, with its curves."""

    name: str
    about: str
    curves: tuple[Curve, ...]

    def allreduce_s(self, size_bytes: float, gpus: int, nodes: int = 1) -> float:
        """Seconds of one all-reduce. Raises ConfigError where nothing was measured to go by."""
        if gpus <= 1:
            return 0.0
        time = self._carried_s(size_bytes, gpus, nodes)
        inside = self._inside(gpus, nodes)
        return max(time, self._carried_s(size_bytes, inside, 1)) if inside > 1 else time

    def _carried_s(self, size_bytes: float, gpus: int, nodes: int) -> float:
        """Carried over from the nearest group of that kind."""
        curve = self.nearest(gpus, nodes)
        time, latency = curve.time_s(size_bytes), curve.times_s[0]
        depth = math.log2(gpus) / math.log2(curve.gpus)
        ring = ((gpus - 1) / gpus) / ((curve.gpus - 1) / curve.gpus)
        return latency * depth + (time - latency) * ring

    def nearest(self, gpus: int, nodes: int) -> Curve:
        """The measured group that stands for this one."""
        kind = [curve for curve in self.curves if (curve.nodes > 1) == (nodes > 1)]
        if not kind:
            raise ConfigError(self._refusal(gpus, nodes))
        return min(
            kind,
            # On a log scale; of two as near, the larger one.
            key=lambda curve: (
                abs(math.log2(curve.gpus / gpus)) + abs(math.log2(curve.nodes / nodes)),
                -curve.gpus,
            ),
        )

    def extrapolated(self, gpus: int, nodes: int = 1) -> bool:
        """Whether this group, or what of it lies in one node, is larger than every one of its
        kind that was measured."""
        kind = [curve.gpus for curve in self.curves if (curve.nodes > 1) == (nodes > 1)]
        inside = self._inside(gpus, nodes)
        return (gpus > 1 and gpus > max(kind, default=0)) or (
            inside > 1 and self.extrapolated(inside)
        )

    def _inside(self, gpus: int, nodes: int) -> int:
        """GPUs in each of several nodes, where it is known how fast those exchange; else 0."""
        known = nodes > 1 and any(curve.nodes == 1 for curve in self.curves)
        return math.ceil(gpus / nodes) if known else 0

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys(curve.source for curve in self.curves))

    @property
    def kind(self) -> str:
        """`node`, `network`, or `node and network`."""
        kinds = {"network" if curve.nodes > 1 else "node" for curve in self.curves}
        return " and ".join(sorted(kinds, key=("node", "network").index))

    def _refusal(self, gpus: int, nodes: int) -> str:
        asked = f"{gpus} GPUs on {nodes} node{'s' if nodes > 1 else ''}"
        if nodes > 1:
            there = "only within one node"
            remedy = f"add a network, e.g. {self.name}+{_names('network')[0]}"
            listing = f"networks: {', '.join(_names('network'))}"
        else:
            there = "only across nodes"
            remedy = f"add a node type, e.g. {_names('node')[0]}+{self.name}"
            listing = f"node types: {', '.join(_names('node'))}"
        return (
            f"interconnect {self.name} was asked for {asked} and was measured {there}: {remedy} "
            f"({listing}), or measure yours with 'mgt check --save-curve FILE'"
        )


def named_interconnects() -> tuple[Interconnect, ...]:
    """All that ship with the product, for a listing: node types first, then networks."""
    table = _shipped()
    return tuple(table[name] for name in ABOUT)


def named(name: str) -> Interconnect:
    """The one of that name, or `node+network`; else a ConfigError that lists the names."""
    table = _shipped()
    parts = [part.strip() for part in name.split("+")]
    unknown = [part for part in parts if part not in table]
    if unknown:
        raise ConfigError(
            f"no all-reduce times for {', '.join(unknown)!r}; there are {', '.join(ABOUT)}, or "
            "node+network of them; measure your own with 'mgt check --save-curve FILE'"
        )
    links = [table[part] for part in parts]
    if len(links) == 1:
        return links[0]
    if sorted(link.kind for link in links) != ["network", "node"]:
        said = ", ".join(f"{link.name} is a {link.kind}" for link in links)
        raise ConfigError(
            f"interconnect {name}: {said}; join one node type ({', '.join(_names('node'))}) and "
            f"one network ({', '.join(_names('network'))})"
        )
    return joined(*links)


def joined(node: Interconnect, network: Interconnect) -> Interconnect:
    """Nodes of the one kind with the other between them."""
    return Interconnect(
        f"{node.name}+{network.name}",
        f"{node.about}; {network.about}",
        node.curves + network.curves,
    )


def measured(path: Path, *, name: str | None = None) -> Interconnect:
    """Your own curve: a CSV with CURVE_COLUMNS, as `mgt check --save-curve` writes it."""
    if not path.is_file():
        raise ConfigError(
            f"no all-reduce curve at {path}; 'mgt check --save-curve' writes one", code="MGT104"
        )
    curves = curves_of(path, read_rows(path), str(path))
    if not curves:
        raise ConfigError(f"{path} holds no time of two or more GPUs: nothing to forecast from")
    return Interconnect(name or path.stem, f"measured: {path}", curves)


@cache
def _shipped() -> dict[str, Interconnect]:
    path = Path(str(files(__package__) / "allreduce.csv"))
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            groups[row["hardware"]].append(row)
    return {
        name: Interconnect(name, about, curves_of(path, groups[name], name))
        for name, about in ABOUT.items()
    }


def _names(kind: str) -> list[str]:
    return [each.name for each in named_interconnects() if each.kind == kind]
