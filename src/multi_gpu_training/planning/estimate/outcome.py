"""A forecast as rows: the table with guide 002's columns, JSON, and files with a picture of speed,
efficiency, cost and time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from multi_gpu_training.extras import can_draw
from multi_gpu_training.measure.case import percentile
from multi_gpu_training.measure.memory_model import MemoryModel
from multi_gpu_training.monitoring.report.picture import readable
from multi_gpu_training.planning.bench.result_table import (
    Column,
    ResultTable,
    Row,
    counted,
    machine,
    memory,
    milliseconds,
    number,
    share,
)
from multi_gpu_training.planning.forecast.profile import StepProfile
from multi_gpu_training.planning.forecast.result import Forecast, ForecastRow, Strategy

SCHEMA = 1
DOES_NOT_FIT = "memory: does not fit"
# The parts of a step in the picture: their keys in a row, and their colours.
PARTS = {
    "compute": ("compute_s", "#4c78a8"),
    "exposed communication": ("exposed_communication_s", "#e45756"),
    "stragglers": ("straggler_s", "#f58518"),
    "input": ("input_wait_s", "#72b7b2"),
    "unexplained": ("unexplained_s", "#bab0ac"),
}
BLUE, GREY = "#4c78a8", "#888888"


@dataclass(frozen=True)
class Outcome:
    """What was measured and what was forecast from it. `length` says how much training time and
    cost are for."""

    profile: StepProfile
    forecast: Forecast
    length: str = ""
    notes: tuple[str, ...] = ()
    strategy: Strategy = "ddp"
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [self._row(row) for row in self.forecast.rows])

    def _row(self, row: ForecastRow) -> Row:
        """A forecast's row with guide 002's names, memory, and whether it fits."""
        found: Row = asdict(row)
        taken = MemoryModel.from_points(self.profile.memory)
        room = available_bytes(self.profile)
        batch, measured = row.per_rank_batch, {p.per_rank_batch for p in self.profile.memory}
        if taken is not None and not taken.grows and batch not in measured:
            taken = None  # one batch says nothing of another
        # Sharded ranks leave a part of what was measured to each other.
        away = self.profile.sharded_away_bytes(row.gpus) if self.strategy == "fsdp" else 0.0
        found |= {
            "theoretical_speedup": float(row.gpus),
            "actual_speedup": row.speedup,
            "peak_bytes": taken.peak(batch) - away if taken is not None else None,
            "fits": taken.fits(batch, room + away) if taken is not None and room else None,
        }
        if row.gpus == 1:
            # Measured, not forecast: its band is how much its own steps differ.
            steps = self.profile.step_times_s
            low, high = (
                min(row.step_s, percentile(steps, 10)),
                max(row.step_s, percentile(steps, 90)),
            )
            found |= {"low_step_s": low, "high_step_s": high}
            found["low_samples_per_s"] = row.samples_per_s * row.step_s / high
            found["high_samples_per_s"] = row.samples_per_s * row.step_s / low
            if row.cost is not None:
                found["low_cost"] = row.cost * low / row.step_s
                found["high_cost"] = row.cost * high / row.step_s
        if found["fits"] is False:
            found["limit"] = DOES_NOT_FIT  # whatever limits its speed, it will not run
        return found

    # As tables

    @property
    def unit(self) -> str:
        """What there are several of: on CPUs a rank is a process."""
        return "rank" if self.profile.device == "CPU" else "GPU"

    @property
    def title(self) -> str:
        forecast = self.forecast
        title = f"{self.profile.name} on {self.profile.device}"
        if any(row.gpus > 1 for row in forecast.rows):
            sharded = ", fsdp" if self.strategy == "fsdp" else ""
            title += f"{sharded}, {forecast.interconnect}, {forecast.scaling} scaling"
        return title

    def tables(self) -> list[ResultTable]:
        """Speed and cost with guide 002's columns, then what a step is made of. Each fits 100
        columns, and each row has its band."""
        unit, band = self.unit, f"{self.forecast.band_level:.0%} band"
        count = Column(f"{unit}s", lambda row: number(row["gpus"]))
        speed = [
            count,
            Column("theoretical", lambda row: times(row["theoretical_speedup"])),
            Column("actual", lambda row: times(row["actual_speedup"])),
            Column("efficiency", lambda row: share(row["efficiency"])),
            Column(band, _efficiency_band),
        ]
        if self.length:
            speed.append(Column(f"time ({self.length})", lambda row: duration(row["training_s"])))
            speed.append(Column(f"{unit}-hours", lambda row: hours(row["gpu_hours"])))
        if any(row["cost"] is not None for row in self.rows):
            speed.append(Column("cost", lambda row: money(row["cost"], self.currency)))
        if any(row["electricity_cost"] is not None for row in self.rows):
            speed.append(Column("electricity", lambda row: money(row["electricity_cost"], "")))
        step = [
            count,
            Column("samples/s", lambda row: number(row["samples_per_s"])),
            Column("step", lambda row: milliseconds(row["step_s"])),
            Column(band, _band),
            Column("exposed communication", _exposed),
            Column(f"batch per {unit}", lambda row: number(row["per_rank_batch"])),
            Column(f"memory per {unit}", lambda row: memory(row["peak_bytes"])),
            Column("limit", lambda row: str(row["limit"])),
        ]
        return [
            ResultTable("estimate", self.title, speed, self.rows),
            ResultTable("step", "A step", step, self.rows, notes=self._notes()),
        ]

    @property
    def currency(self) -> str:
        prices = self.forecast.prices
        return prices[0].currency if prices else ""

    def _notes(self) -> list[str]:
        forecast, found = self.forecast, []
        if any(row.gpus > 1 for row in forecast.rows):
            found.append(f"all-reduce times: {forecast.interconnect_source}")
            found.append(f"band: {forecast.band_meaning}")
        short = [row["gpus"] for row in self.rows if row["fits"] is False and row["gpus"] > 1]
        if short and self.strategy == "ddp":
            found.append(f"a copy per GPU does not fit on {short[0]}; --strategy fsdp splits it")
        if not forecast.prices:
            found.append(f"no price was given (--price, --catalog): {self.unit}-hours only")
        return [*found, *forecast.notes, *self.notes]

    def as_dict(self) -> dict[str, Any]:
        """What `forecast.json` holds: `gpus` by number, for a later run to be compared with."""
        forecast, prices = self.forecast.to_json(), self.forecast.prices
        return {
            "schema": SCHEMA,
            "kind": "forecast",
            "date": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "length": self.length or None,
            "strategy": self.strategy,
            "gpus": {str(row["gpus"]): _comparable(row) for row in self.rows},
            **{key: value for key, value in forecast.items() if key != "rows"},
            "price": asdict(prices[0]) if len(prices) == 1 else None,
            "notes": self._notes(),
            "largest_batch": largest_batch(self.profile),
            "profile": asdict(self.profile),
            "machine": machine(),
        }


def _comparable(row: Row) -> dict[str, Any]:
    """The keys that `mgt report` reads, and everything else. low and high bound the step."""
    return {
        "step_time_s": row["step_s"],
        "samples_per_s": row["samples_per_s"],
        "low": row["low_step_s"],
        "high": row["high_step_s"],
        **{key: value for key, value in row.items() if key not in ("gpus", "samples_per_s")},
    }


def _band(row: Row) -> str:
    low, high = milliseconds(row["low_step_s"]), milliseconds(row["high_step_s"])
    value, _, unit = low.partition(" ")
    return f"{value if high.endswith(unit) else low} - {high}"


def _efficiency_band(row: Row) -> str:
    return f"{100 * row['low_efficiency']:.0f} - {share(row['high_efficiency'])}"


def _exposed(row: Row) -> str:
    if row["gpus"] == 1:
        return "-"
    waits = row["exposed_communication_s"]
    return f"{milliseconds(waits)} ({waits / row['step_s']:.0%})"


def available_bytes(profile: StepProfile) -> int | None:
    """What torch's allocator can have of the device; None on CPUs."""
    if profile.memory_total_bytes is None:
        return None
    return profile.memory_total_bytes - profile.memory_outside_bytes


def largest_batch(profile: StepProfile) -> int | None:
    """Samples per GPU that fit; None where that is not known."""
    taken, room = MemoryModel.from_points(profile.memory), available_bytes(profile)
    return taken.largest_batch(room) if taken is not None and room is not None else None


# In words


def measured_lines(profile: StepProfile) -> list[str]:
    """What was measured, in sentences."""
    times = profile.step_times_s
    low, middle, high = (percentile(times, p) for p in (10, 50, 90))
    rate = profile.per_rank_batch * profile.accumulation / median(times)
    lines = [
        f"{profile.device}, {profile.precision}: batch {profile.per_rank_batch}"
        + (f" x {profile.accumulation} micro-batches" if profile.accumulation > 1 else "")
        + f", step {milliseconds(middle)} (10 % - 90 %: {milliseconds(low)} - "
        f"{milliseconds(high)}), {number(rate)} samples/s, {profile.execution} steps",
        f"forward {milliseconds(profile.forward_s)}, backward {milliseconds(profile.backward_s)}, "
        f"optimizer {milliseconds(profile.optimizer_s)}",
        f"{counted(len(profile.buckets), 'bucket')} of gradients, "
        f"{size(profile.gradient_bytes)}: "
        + ", ".join(
            f"{size(bucket.size_bytes)} after {milliseconds(bucket.ready_s)}"
            for bucket in profile.buckets[:6]
        )
        + (" ..." if len(profile.buckets) > 6 else ""),
    ]
    if profile.data_on_device:
        lines.append("the data is on the GPU: nothing is loaded")
    elif profile.loader_rates:
        rates = ", ".join(
            f"{workers}: {number(found)}" for workers, found in sorted(profile.loader_rates.items())
        )
        lines.append(f"samples/s read, by number of workers: {rates}")
    if profile.memory:
        points = ", ".join(f"{p.per_rank_batch}: {memory(p.peak_bytes)}" for p in profile.memory)
        fitting = largest_batch(profile)
        lines.append(
            f"peak memory by batch: {points}"
            + (f"; up to {number(fitting)} fit" if fitting is not None else "")
        )
    if profile.power_w is not None:
        lines.append(f"{profile.power_w:.0f} W while training")
    return lines


# How values are shown


def size(count: float) -> str:
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 2**10:.0f} kB"


def times(value: float) -> str:
    """As guide 002 shows it: `1.9x`."""
    return f"{value:.2f}x" if value < 10 and value != round(value) else f"{value:,.1f}x"


def duration(seconds: float | None) -> str:
    """As guide 002 shows it: `10.2 minutes`."""
    if seconds is None:
        return "-"
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 60:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.1f} seconds" if seconds >= 1 else f"{seconds:.2g} seconds"


def hours(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float | None, currency: str) -> str:
    if value is None:
        return "-"
    sign = {"USD": "$", "EUR": "€", "": ""}.get(currency, f"{currency} ")
    return f"{sign}{value:,.2f}" if value >= 0.005 or value == 0 else f"{sign}{value:.2g}"


# As files


def save(outcome: Outcome, folder: Path) -> list[Path]:
    """Write profile.json, forecast.json, estimate.md and, where matplotlib is installed,
    estimate.png to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("profile.json", "forecast.json", "estimate.md", "estimate.png")
    profile, forecast, text, picture = (folder / name for name in names)
    outcome.profile.save(profile)
    forecast.write_text(json.dumps(outcome.as_dict(), indent=1) + "\n")
    speed, step = (table.markdown() for table in outcome.tables())
    lines = "\n".join(f"- {line}" for line in measured_lines(outcome.profile))
    text.write_text(f"# {outcome.title}\n\n{speed}\n{step}\n## Measured\n\n{lines}\n")
    return [profile, forecast, text, *([draw(outcome, picture)] if can_draw(picture) else [])]


def draw(outcome: Outcome, path: Path) -> Path:
    """Write the picture and say where."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    speed, efficiency, cost, parts = figure.subplots(2, 2).flat
    figure.suptitle(outcome.title, parse_math=False)
    rows, unit = outcome.rows, f"{outcome.unit}s"
    gpus = [row["gpus"] for row in rows]
    _speed(speed, rows, gpus, unit)
    _efficiency(efficiency, rows, gpus, unit)
    _cost(cost, outcome, gpus, unit)
    _parts(parts, rows, gpus, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _by_gpus(axes: Any, gpus: list[int], unit: str, label: str) -> None:
    if len(gpus) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel(unit)
    axes.set_ylabel(label, parse_math=False)
    readable(axes.yaxis)
    axes.grid(alpha=0.3)


def _from_zero(axes: Any, values: list[float], room: float = 1.08) -> None:
    """The axis begins at 0 and ends above the highest of `values`."""
    axes.set_ylim(0, room * max(values))


def _speed(axes: Any, rows: list[dict[str, Any]], gpus: list[int], unit: str) -> None:
    found, lows, highs = (
        [row[f"{end}samples_per_s"] for row in rows] for end in ("", "low_", "high_")
    )
    base = found[0] / rows[0]["actual_speedup"]  # one GPU, which need not be a row
    linear = [base * count for count in gpus]
    axes.plot(gpus, linear, "--", color=GREY, label="linear")
    axes.fill_between(gpus, lows, highs, color=BLUE, alpha=0.2, label="band")
    axes.plot(gpus, found, "o-", color=BLUE, label="forecast")
    if gpus[-1] > 16 * gpus[0]:
        axes.set_yscale("log")
    else:
        _from_zero(axes, [*linear, *highs])
    _by_gpus(axes, gpus, unit, "samples per second")
    axes.set_title("Speed")
    axes.legend(fontsize=8)


def _efficiency(axes: Any, rows: list[dict[str, Any]], gpus: list[int], unit: str) -> None:
    middle, low, high = (
        [100 * row[f"{end}efficiency"] for row in rows] for end in ("", "low_", "high_")
    )
    axes.fill_between(gpus, low, high, color=BLUE, alpha=0.2)
    axes.plot(gpus, middle, "o-", color=BLUE)
    _from_zero(axes, [100, *high])
    _by_gpus(axes, gpus, unit, "% of linear")
    axes.set_title("Efficiency")


def _cost(axes: Any, outcome: Outcome, gpus: list[int], unit: str) -> None:
    """Money where there is a price, else GPU-hours, else GPU-hours of a million samples."""
    rows, highest = outcome.rows, []
    if all(row["cost"] is not None for row in rows):
        values = [row["cost"] for row in rows]
        title, label = f"Cost of {outcome.length}", outcome.currency
        lowest, highest = ([row[key] for row in rows] for key in ("low_cost", "high_cost"))
        axes.fill_between(gpus, lowest, highest, color=BLUE, alpha=0.2)
    elif all(row["gpu_hours"] is not None for row in rows):
        values, title = [row["gpu_hours"] for row in rows], f"Cost of {outcome.length}"
        label = f"{outcome.unit}-hours"
    else:
        values = [1e6 * row["gpus"] / row["samples_per_s"] / 3600 for row in rows]
        title, label = "Cost of a million samples", f"{outcome.unit}-hours"
    axes.plot(gpus, values, "o-", color=BLUE)
    _from_zero(axes, [*values, *highest])
    rises = outcome.forecast.cost_rises_from
    if rises is not None and gpus[0] <= rises <= gpus[-1]:
        axes.axvline(rises, color=GREY, linestyle=":", label=f"+10 % from {rises} {unit} on")
        axes.legend(fontsize=8)
    _by_gpus(axes, gpus, unit, label)
    axes.set_title(title)


def _parts(axes: Any, rows: list[dict[str, Any]], gpus: list[int], unit: str) -> None:
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for label, (key, colour) in PARTS.items():
        heights = [1e3 * row[key] for row in rows]
        if any(heights):
            axes.bar(places, heights, bottom=bottom, color=colour, label=label, width=0.7)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(list(places), [f"{count:,}" for count in gpus], fontsize=8)
    axes.set_xlabel(unit)
    axes.set_ylabel("ms per step")
    axes.grid(alpha=0.3, axis="y")
    axes.set_title("Where the time of a step goes")
    _from_zero(axes, bottom, room=1.3)  # for the legend, which would hide the highest bar
    readable(axes.yaxis)
    axes.legend(fontsize=8, loc="upper left", ncols=3)
