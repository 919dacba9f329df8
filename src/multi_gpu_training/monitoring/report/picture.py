"""The curves of a run as a picture, metrics.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from multi_gpu_training.monitoring.report import curves
from multi_gpu_training.monitoring.report.charts import Series
from multi_gpu_training.monitoring.report.run_record import RunRecord

MOST = 6
MOST_POINTS = 2_000


def draw_run(run: RunRecord, path: Path | BinaryIO) -> None:
    """Loss, speed and what else was logged or read of the devices."""
    panels = curves.training_curves([run], ["training"])
    chosen = [(name, "step", series) for name, series in panels.items()][:4]
    for (title, unit), series in curves.device_curves(run).items():
        chosen.append((f"{title} ({unit})", "seconds", series))
    draw(chosen[:MOST], path, run.name)


def draw(
    panels: Sequence[tuple[str, str, Sequence[Series]]], path: Path | BinaryIO, title: str = ""
) -> None:
    """A picture with a panel for each (name, unit of x, lines). Nothing without panels."""
    if not panels:
        return
    # Not pyplot: it keeps state for the whole process and asks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, x_unit, series) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        for line in series:
            stride = -(-len(line.x) // MOST_POINTS) or 1
            x, y = line.x[::stride], line.y[::stride]
            axes.plot(x, y, linewidth=1.2, label=line.name, marker="o" if len(x) < 3 else "")
        axes.set_title(name, fontsize=10, parse_math=False)  # a name may hold any number of $
        axes.set_xlabel(x_unit, fontsize=8)
        axes.grid(alpha=0.3)
        if len(series) > 1:
            for text in axes.legend(fontsize=7).get_texts():
                text.set_parse_math(False)
    figure.suptitle(title, parse_math=False)
    figure.savefig(path, dpi=100)
