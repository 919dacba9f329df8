"""The table and the picture of `mgt compress`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from multi_gpu_training.delivery.compress_run import Compressed, Compression
from multi_gpu_training.extras import can_draw

PICTURE = "pareto.png"
CPU_NOTE = "2:4 sparsity is computed faster only on GPUs with sparse tensor cores, not here"
EAGER_NOTE = (
    "quantised weights are unpacked at every call here: they save memory and disk, not time; "
    "for speed on a CPU use quantize:onnx-int8"
)


def show_table(found: Compression, console: Console) -> None:
    """Size, speed and accuracy of every model, beside the original."""
    first = found.rows[0]
    table = Table(title="Compression", title_justify="left")
    for name in ("model", "size", "latency", "samples/s", *_metric_names(found)):
        table.add_column(name, justify="left" if name == "model" else "right", overflow="fold")
    for row in found.rows:
        if row.problem is not None:
            table.add_row(row.name, "failed")
            continue
        speed, plain = row.speed, first.speed
        ratios = [
            f" (x{row.bytes / first.bytes:.3f})",
            f" (x{speed.latency_s / plain.latency_s:.2f})",
            f" (x{speed.samples_per_s / plain.samples_per_s:.2f})",
        ]
        size, latency, rate = ratios if row is not first else [""] * 3
        cells = [
            row.name,
            _size(row.bytes) + size,
            f"{1000 * speed.latency_s:.2f} ms{latency}",
            f"{speed.samples_per_s:,.0f}{rate}",
            _number(found.metric, row.metrics.get(found.metric)),
            "" if row is first else _drop(found.metric, row.drop),
            "" if row is first else ("kept" if row.holds else "too much lost"),
        ]
        table.add_row(*cells)
    console.print(table)
    for row in found.rows:
        if row.problem is not None:
            console.print(f"{row.name}: {row.problem}", markup=False)
    for note in _notes(found.rows):
        console.print(note, markup=False)


def _metric_names(found: Compression) -> tuple[str, ...]:
    return ("perplexity" if found.metric == "loss" else found.metric, "lost", "")


def _number(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{math.exp(min(value, 700.0)):.4g}" if metric == "loss" else f"{value:.4f}"


def _drop(metric: str, drop: float | None) -> str:
    if drop is None:
        return "-"
    return f"{100 * drop:+.2f} {'%' if metric == 'loss' else 'points'}"


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _notes(rows: list[Compressed]) -> list[str]:
    names = [row.name for row in rows if row.problem is None]
    notes = []
    if any("prune:2:4" in name for name in names):
        notes.append(CPU_NOTE)
    if any("quantize:" in name and "onnx" not in name for name in names):
        notes.append(EAGER_NOTE)
    return notes


def draw(found: Compression, path: Path) -> bool:
    """Size and latency of each model against what it lost; lines join the models that no other
    one beats in both. False where there is nothing to compare or no matplotlib."""
    rows = [row for row in found.rows if row.drop is not None and math.isfinite(row.drop)]
    if len(rows) < 2 or not can_draw(path):
        return False
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    first = rows[0]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    sizes = [row.bytes / first.bytes for row in rows]
    delays = [row.speed.latency_s / first.speed.latency_s for row in rows]
    panels = (("size of the weights", sizes), ("latency of one sample", delays))
    lost = [100 * float(row.drop or 0.0) for row in rows]
    for axis, (label, values) in zip(axes, panels, strict=True):
        _panel(axis, f"{label}, relative to the original", values, lost)
    unit = "% of perplexity" if found.metric == "loss" else f"points of {found.metric}"
    axes[0].set_ylabel(f"lost, {unit}")
    figure.draw_without_rendering()  # names are placed by pixels
    for axis, (_, values) in zip(axes, panels, strict=True):
        _name_points(axis, values, lost, [row.name for row in rows])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _panel(axis: Any, label: str, values: list[float], lost: list[float]) -> None:
    front = pareto(values, lost)
    axis.plot([values[i] for i in front], [lost[i] for i in front], color="0.7", zorder=1)
    for number, (x, y) in enumerate(zip(values, lost, strict=True)):
        axis.scatter([x], [y], color="C0" if number in front else "0.6", zorder=2)
    axis.set_xlabel(label)
    axis.margins(0.15)
    axis.grid(alpha=0.3)


def _name_points(axis: Any, values: list[float], lost: list[float], names: list[str]) -> None:
    """Write each name beside its point: towards the middle, and above or below other names."""
    middle = (min(values) + max(values)) / 2
    taken: list[Any] = []
    for x, y, name in sorted(zip(values, lost, names, strict=True), key=lambda point: point[1]):
        side, shift = ("right", -5) if x > middle else ("left", 5)
        for rise in (4, -10, 15, -21, 26, -32, 37):
            text = axis.annotate(
                name, (x, y), (shift, rise), textcoords="offset points", fontsize=8, ha=side
            )
            extent = text.get_window_extent()
            if rise == 37 or not any(extent.overlaps(other) for other in taken):
                break
            text.remove()
        taken.append(extent)


def pareto(values: list[float], lost: list[float]) -> list[int]:
    """Which models no other one beats in both, by growing value; less is better in either."""
    front: list[int] = []
    for number in sorted(range(len(values)), key=lambda i: (values[i], lost[i])):
        if not front or lost[number] < lost[front[-1]]:
            front.append(number)
    return front
