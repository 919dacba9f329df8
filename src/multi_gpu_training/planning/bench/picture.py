"""A report as bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multi_gpu_training.planning.bench.report import Report


def draw(report: Report, path: Path) -> Path:
    """One panel a number, one bar a row. Rows without the number are named all the same."""
    # A figure of its own, without pyplot: no window system is asked and no state is left.
    from matplotlib.figure import Figure

    bars = list(report.bars)
    names = [str(row.get("case", "")) for row in report.rows]
    height = 1.2 + 0.38 * max(1, len(names))
    figure = Figure(figsize=(4.2 * max(1, len(bars)), height), layout="constrained")
    panels = figure.subplots(1, max(1, len(bars)), squeeze=False)[0]
    for index, (panel, bar) in enumerate(zip(panels, bars, strict=False)):
        values = [row.get(bar.key) for row in report.rows]
        shown = [(value or 0.0) * bar.scale for value in values]
        panel.barh(range(len(names)), shown, color="#4c78a8")
        for place, (row, value) in enumerate(zip(report.rows, values, strict=True)):
            end = shown[place]
            if value is not None and bar.low and bar.high:
                low, end = row[bar.low] * bar.scale, row[bar.high] * bar.scale
                panel.plot([low, end], [place, place], color="black", linewidth=1)
            text = " none" if value is None else f" {shown[place]:,.4g}"
            panel.text(end, place, text, va="center", fontsize=8)
        panel.set_yticks(range(len(names)), names if index == 0 else [""] * len(names))
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.set_title(bar.title, fontsize=10)
    figure.suptitle(report.title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
