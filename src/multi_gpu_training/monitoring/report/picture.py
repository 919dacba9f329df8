"""The curves of a run as a picture, metrics.png, and axes that a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from multi_gpu_training.monitoring.report import curves
from multi_gpu_training.monitoring.report.charts import Series, robust_limits
from multi_gpu_training.monitoring.report.run_record import RunRecord

MOST = 6
MOST_POINTS = 2_000
WIDE = 30.0  # times the small values are the large ones, from which on an axis is logarithmic
SMOOTHED = 100  # points of a line, from which on its running mean is drawn over it
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#888888")
# What is logged, in words: title, label of its axis, factor, whether the axis begins at 0.
LOGGED = {
    "loss": ("Loss", "loss", 1.0, False),
    "samples_per_s": ("Speed", "samples per second", 1.0, True),
    "accuracy": ("Accuracy", "%", 100.0, False),
    "lr": ("Learning rate", "learning rate", 1.0, True),
    "grad_norm": ("Gradient norm", "norm before clipping", 1.0, False),
    "input_wait": ("Waiting for data", "% of the time", 100.0, True),
}


class Panel:
    """One pair of axes: a title, the label of each axis, and its lines."""

    def __init__(
        self,
        title: str,
        y_label: str,
        lines: Sequence[Series],
        x_label: str = "step",
        from_zero: bool = False,
    ) -> None:
        self.title, self.y_label, self.x_label = title, y_label, x_label
        self.from_zero = from_zero
        finite = [(line, np.isfinite(line.x) & np.isfinite(line.y)) for line in lines]
        self.lines = [
            Series(line.name, line.x[good], line.y[good], line.colour)
            for line, good in finite
            if good.any()
        ]


def logged_panel(name: str, lines: Sequence[Series]) -> Panel:
    """The panel of something that is logged at every few steps."""
    title, label, factor, from_zero = LOGGED.get(name, (name, name, 1.0, False))
    scaled = [Series(s.name, s.x, s.y * factor, s.colour) for s in lines]
    return Panel(title, label, scaled, "optimizer step", from_zero)


def draw_run(run: RunRecord, path: Path | BinaryIO) -> None:
    """Loss, speed and what else was logged or read of the devices."""
    logged = curves.training_curves([run], ["training"])
    panels = [logged_panel(name, series) for name, series in logged.items()][:4]
    for (title, unit), series in curves.device_curves(run).items():
        panels.append(device_panel(title, unit, series))
    draw(panels[:MOST], path, run.name)


def device_panel(title: str, unit: str, series: Sequence[Series]) -> Panel:
    last = max((float(line.x[-1]) for line in series if len(line.x)), default=0.0)
    scale, x_label = (60.0, "minutes") if last > 600 else (1.0, "seconds")
    timed = [Series(s.name, s.x / scale, s.y, s.colour) for s in series]
    return Panel(title, unit, timed, f"{x_label} since the start", from_zero=True)


def draw(panels: Sequence[Panel], path: Path | BinaryIO, title: str = "") -> None:
    """Write a picture of the panels; nothing without panels that have lines."""
    panels = [panel for panel in panels if panel.lines]
    if panels:
        figure_of(panels, title).savefig(path, dpi=100)


def figure_of(panels: Sequence[Panel], title: str = "") -> Any:
    """The panels as a figure of matplotlib."""
    # Not pyplot: it keeps state for the whole process and asks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(rows, columns, number), panel)
    figure.suptitle(title, parse_math=False)
    return figure


def _draw_panel(axes: Any, panel: Panel) -> None:
    for number, line in enumerate(panel.lines):
        colour = COLOURS[number % len(COLOURS)]
        stride = -(-len(line.x) // MOST_POINTS) or 1
        x, y = line.x[::stride], line.y[::stride]
        dots = "o" if len(x) < 30 else ""
        noisy = len(x) >= SMOOTHED
        axes.plot(
            x,
            y,
            color=colour,
            linewidth=0.8 if noisy else 1.4,
            alpha=0.35 if noisy else 1.0,
            marker=dots,
            markersize=3,
            label=None if noisy else line.name,
        )
        if noisy:
            axes.plot(x, running_mean(y), color=colour, linewidth=1.6, label=line.name)
    # A name may hold any number of $.
    axes.set_title(panel.title, fontsize=10, parse_math=False)
    axes.set_xlabel(panel.x_label, fontsize=8, parse_math=False)
    axes.set_ylabel(panel.y_label, fontsize=8, parse_math=False)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    _limit(axes, np.concatenate([line.y for line in panel.lines]), panel.from_zero)
    readable(axes.xaxis)
    if len(panel.lines) > 1:
        for text in axes.legend(fontsize=7).get_texts():
            text.set_parse_math(False)


def _limit(axes: Any, values: np.ndarray, from_zero: bool) -> None:
    """Rates begin at 0. Elsewhere a few extremes must not press all the rest flat: the title
    counts those that lie outside."""
    if from_zero:
        top = robust_limits(values)[1]
        axes.set_ylim(min(0.0, float(values.min())), 1.08 * top if top > 0 else 1.0)
        readable(axes.yaxis)
        return
    small, large = np.quantile(values, [0.02, 0.98])
    if small > 0 and large > WIDE * small:
        axes.set_yscale("log")
        low, high = (10**end for end in robust_limits(np.log10(values[values > 0])))
        axes.set_ylim(low / 1.1, high * 1.1)
    else:
        low, high = robust_limits(values)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)
    readable(axes.yaxis)
    outside = values[(values < low) | (values > high)]
    if len(outside):
        most = float(outside[np.maximum(low - outside, outside - high).argmax()])
        way = "up" if most > high else "down"
        points = "1 point" if len(outside) == 1 else f"{len(outside):,} points"
        title = f"{axes.get_title()} ({points} outside, {way} to {short_number(most)})"
        axes.set_title(title, fontsize=10, parse_math=False)


def running_mean(y: np.ndarray) -> np.ndarray:
    """Of a twentieth of the points around each; an outlier does not pull it: the median first."""
    width = max(3, len(y) // 40) | 1
    padded = np.pad(y, width // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    return np.asarray(np.median(windows, axis=1))


def readable(axis: Any) -> None:
    """Ticks as 1, 2 and 5 times a power of ten, written as people write them, on log axes too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), _fixed()):
        low, high = sorted(axis.get_view_interval())
        decades = np.log10(high / low) if low > 0 else 9.0
        subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0, 3.0) if decades < 4 else (1.0,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=20))
        axis.set_minor_formatter(NullFormatter())
    if not isinstance(axis.get_major_locator(), _fixed()):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _fixed() -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator


def short_number(value: float) -> str:
    """1500 as 1.5k, 0.00012 as 1.2e-4."""
    size = abs(value)
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= scale:
            return f"{value / scale:.4g}{unit}"
    if size == 0 or size >= 1e-3:
        return f"{value:.4g}"
    return f"{value:.3g}".replace("e-0", "e-")
