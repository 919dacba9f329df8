"""A forecast as files: its figures, the table, and a picture of speed, efficiency, cost, time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from multi_gpu_training.planning.estimate.outcome import Outcome, measured_lines

PARTS = {
    "compute": ("compute_s", "#4c78a8"),
    "exposed communication": ("exposed_communication_s", "#e45756"),
    "stragglers": ("straggler_s", "#f58518"),
    "input": ("input_wait_s", "#72b7b2"),
    "unexplained": ("unexplained_s", "#bab0ac"),
}
BLUE, GREY = "#4c78a8", "#888888"


def save(outcome: Outcome, folder: Path) -> list[Path]:
    """Write profile.json, forecast.json, estimate.md and estimate.png to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("profile.json", "forecast.json", "estimate.md", "estimate.png")
    profile, forecast, text, picture = (folder / name for name in names)
    outcome.profile.save(profile)
    forecast.write_text(json.dumps(outcome.as_dict(), indent=1) + "\n")
    report = outcome.report()
    lines = "\n".join(f"- {line}" for line in measured_lines(outcome.profile))
    text.write_text(f"# {report.title}\n\n{report.markdown()}\n## Measured\n\n{lines}\n")
    return [profile, forecast, text, draw(outcome, picture)]


def draw(outcome: Outcome, path: Path) -> Path:
    """Write the picture and say where."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    speed, efficiency, cost, parts = figure.subplots(2, 2).flat
    figure.suptitle(outcome.report().title)
    rows = outcome.rows
    gpus = [row["gpus"] for row in rows]
    _speed(speed, rows, gpus)
    _efficiency(efficiency, rows, gpus)
    _cost(cost, outcome, gpus)
    _parts(parts, rows, gpus)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _by_gpus(axes: Any, gpus: list[int]) -> None:
    if len(gpus) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(count) for count in gpus], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("GPUs")
    axes.grid(alpha=0.3)


def _from_zero(axes: Any, values: list[float], room: float = 1.08) -> None:
    """The axis begins at 0 and ends above the highest of `values`."""
    axes.set_ylim(0, room * max(values))


def _speed(axes: Any, rows: list[dict[str, Any]], gpus: list[int]) -> None:
    found, lows, highs = (
        [row[f"{end}samples_per_s"] for row in rows] for end in ("", "low_", "high_")
    )
    base = found[0] / rows[0]["actual_speedup"]  # one GPU, which need not be a row
    axes.plot(gpus, [base * count for count in gpus], "--", color=GREY, label="linear")
    axes.fill_between(gpus, lows, highs, color=BLUE, alpha=0.2, label="band")
    axes.plot(gpus, found, "o-", color=BLUE, label="forecast")
    if len(gpus) > 1:
        axes.set_yscale("log")
    _by_gpus(axes, gpus)
    axes.set_title("samples/s")
    axes.legend(fontsize=8)


def _efficiency(axes: Any, rows: list[dict[str, Any]], gpus: list[int]) -> None:
    middle, low, high = (
        [100 * row[f"{end}efficiency"] for row in rows] for end in ("", "low_", "high_")
    )
    axes.fill_between(gpus, low, high, color=BLUE, alpha=0.2)
    axes.plot(gpus, middle, "o-", color=BLUE)
    _from_zero(axes, [100, *high])
    _by_gpus(axes, gpus)
    axes.set_title("efficiency, %")


def _cost(axes: Any, outcome: Outcome, gpus: list[int]) -> None:
    """Money where there is a price, else GPU-hours, else GPU-seconds of a million samples."""
    rows, highest = outcome.rows, []
    if all(row["cost"] is not None for row in rows):
        values = [row["cost"] for row in rows]
        title = f"cost of {outcome.length}, {outcome.currency}"
        lowest, highest = ([row[key] for row in rows] for key in ("low_cost", "high_cost"))
        axes.fill_between(gpus, lowest, highest, color=BLUE, alpha=0.2)
    elif all(row["gpu_hours"] is not None for row in rows):
        values, title = [row["gpu_hours"] for row in rows], f"GPU-hours of {outcome.length}"
    else:
        values = [1e6 * row["gpus"] / row["samples_per_s"] / 3600 for row in rows]
        title = "GPU-hours of a million samples"
    axes.plot(gpus, values, "o-", color=BLUE)
    _from_zero(axes, [*values, *highest])
    rises = outcome.forecast.cost_rises_from
    if rises is not None and gpus[0] <= rises <= gpus[-1]:
        axes.axvline(rises, color=GREY, linestyle=":", label=f"+10 % from {rises} GPUs on")
        axes.legend(fontsize=8)
    _by_gpus(axes, gpus)
    axes.set_title(title)


def _parts(axes: Any, rows: list[dict[str, Any]], gpus: list[int]) -> None:
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for label, (key, colour) in PARTS.items():
        heights = [1e3 * row[key] for row in rows]
        if any(heights):
            axes.bar(places, heights, bottom=bottom, color=colour, label=label, width=0.7)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(list(places), [str(count) for count in gpus], fontsize=8)
    axes.set_xlabel("GPUs")
    axes.grid(alpha=0.3, axis="y")
    axes.set_title("where a step's time goes, ms")
    _from_zero(axes, bottom, room=1.3)  # for the legend, which would hide the highest bar
    axes.legend(fontsize=8, loc="upper left", ncols=3)
