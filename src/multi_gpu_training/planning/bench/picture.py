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
    for index, (panel, (title, key)) in enumerate(zip(panels, bars, strict=False)):
        values = [row.get(key) for row in report.rows]
        panel.barh(range(len(names)), [value or 0.0 for value in values], color="#4c78a8")
        for place, value in enumerate(values):
            text = " none" if value is None else f" {value:,.4g}"
            panel.text(value or 0.0, place, text, va="center", fontsize=8)
        panel.set_yticks(range(len(names)), names if index == 0 else [""] * len(names))
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.set_title(title, fontsize=10)
    figure.suptitle(report.title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
