"""A forecast as rows: the table with guide 002's columns, JSON, and `forecast.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from multi_gpu_training.planning.bench.report import (
    Column,
    Report,
    Row,
    machine,
    memory,
    milliseconds,
    number,
    share,
)
from multi_gpu_training.planning.estimate.memory import (
    MemoryForecast,
    available_bytes,
    largest_batch,
)
from multi_gpu_training.planning.estimate.wording import (
    duration,
    hours,
    measured_lines,
    money,
    times,
)
from multi_gpu_training.planning.forecast.profile import StepProfile
from multi_gpu_training.planning.forecast.result import Forecast
from multi_gpu_training.planning.forecast.result import Row as ForecastRow

SCHEMA = 1
DOES_NOT_FIT = "memory: does not fit"


@dataclass(frozen=True)
class Outcome:
    """What was measured and what was forecast from it. `length` says how much training time and
    cost are for."""

    profile: StepProfile
    forecast: Forecast
    length: str = ""
    notes: tuple[str, ...] = ()
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [self._row(row) for row in self.forecast.rows])

    def _row(self, row: ForecastRow) -> Row:
        """A forecast's row with guide 002's names, memory, and whether it fits."""
        found: Row = asdict(row)
        taken = MemoryForecast.of(self.profile.memory)
        room = available_bytes(self.profile)
        known = taken is not None and (taken.grows or row.per_rank_batch in _sizes(self.profile))
        found |= {
            "theoretical_speedup": float(row.gpus),
            "actual_speedup": row.speedup,
            "peak_bytes": taken.peak(row.per_rank_batch) if taken is not None and known else None,
            "fits": taken.fits(row.per_rank_batch, room) if taken and room and known else None,
        }
        if found["fits"] is False:
            found["limit"] = DOES_NOT_FIT
        return found

    # As a table

    def report(self) -> Report:
        forecast = self.forecast
        title = f"{self.profile.name} on {self.profile.device}"
        if any(row.gpus > 1 for row in forecast.rows):
            title += f", {forecast.interconnect}, {forecast.scaling} scaling"
        return Report("estimate", title, self._columns(), self.rows, notes=self._notes())

    def _columns(self) -> list[Column]:
        columns = [
            Column("GPUs", lambda row: number(row["gpus"])),
            Column("theoretical", lambda row: times(row["theoretical_speedup"])),
            Column("actual", lambda row: times(row["actual_speedup"])),
            Column("efficiency", lambda row: share(row["efficiency"])),
        ]
        if self.length:
            columns.append(Column(f"time ({self.length})", lambda row: duration(row["training_s"])))
            columns.append(Column("GPU-hours", lambda row: hours(row["gpu_hours"])))
        if any(row["cost"] is not None for row in self.rows):
            columns.append(Column("cost", lambda row: money(row["cost"], self.currency)))
        if any(row["electricity_cost"] is not None for row in self.rows):
            columns.append(Column("electricity", lambda row: money(row["electricity_cost"], "")))
        columns += [
            Column("samples/s", lambda row: number(row["samples_per_s"])),
            Column("step", lambda row: milliseconds(row["step_s"])),
            Column(f"{self.forecast.band_level:.0%} band", _band),
            Column("exposed communication", _exposed),
            Column("batch/GPU", lambda row: number(row["per_rank_batch"])),
            Column("memory/GPU", lambda row: memory(row["peak_bytes"])),
            Column("limit", lambda row: str(row["limit"])),
        ]
        return columns

    @property
    def currency(self) -> str:
        prices = self.forecast.prices
        return prices[0].currency if prices else ""

    def _notes(self) -> list[str]:
        forecast, found = self.forecast, []
        if any(row.gpus > 1 for row in forecast.rows):
            found.append(f"all-reduce times: {forecast.interconnect_source}")
            found.append(f"band: {forecast.band_meaning}")
        if not forecast.prices:
            found.append("no price was given (--price, --catalog): GPU-hours only")
        return [*found, *forecast.notes, *self.notes]

    # As files

    def as_dict(self) -> dict[str, Any]:
        """What `forecast.json` holds: `gpus` by number, for a later run to be compared with."""
        forecast, prices = self.forecast.to_json(), self.forecast.prices
        return {
            "schema": SCHEMA,
            "kind": "forecast",
            "date": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "length": self.length or None,
            "gpus": {str(row["gpus"]): _comparable(row) for row in self.rows},
            **{key: value for key, value in forecast.items() if key != "rows"},
            "price": asdict(prices[0]) if len(prices) == 1 else None,
            "notes": self._notes(),
            "largest_batch": largest_batch(self.profile),
            "profile": asdict(self.profile),
            "machine": machine(),
        }

    def save(self, folder: Path) -> list[Path]:
        """profile.json, forecast.json, estimate.md and estimate.png in `folder`."""
        from multi_gpu_training.planning.estimate.picture import draw

        folder.mkdir(parents=True, exist_ok=True)
        names = ("profile.json", "forecast.json", "estimate.md", "estimate.png")
        profile, forecast, text, picture = (folder / name for name in names)
        self.profile.save(profile)
        forecast.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        report = self.report()
        lines = "\n".join(f"- {line}" for line in measured_lines(self.profile))
        text.write_text(f"# {report.title}\n\n{report.markdown()}\n## Measured\n\n{lines}\n")
        return [profile, forecast, text, draw(self, picture)]


def _comparable(row: Row) -> dict[str, Any]:
    """The keys that `mgt report` reads, and everything else. low and high bound the step."""
    return {
        "step_time_s": row["step_s"],
        "samples_per_s": row["samples_per_s"],
        "low": row["low_step_s"],
        "high": row["high_step_s"],
        **{key: value for key, value in row.items() if key not in ("gpus", "samples_per_s")},
    }


def _sizes(profile: StepProfile) -> set[int]:
    return {point.per_rank_batch for point in profile.memory}


def _band(row: Row) -> str:
    return f"{milliseconds(row['low_step_s'])} - {milliseconds(row['high_step_s'])}"


def _exposed(row: Row) -> str:
    if row["gpus"] == 1:
        return "-"
    waits = row["exposed_communication_s"]
    return f"{milliseconds(waits)} ({waits / row['step_s']:.0%})"
