"""The curves of runs: what was logged against steps, what was read from devices against time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from multi_gpu_training.monitoring.report.charts import Series
from multi_gpu_training.monitoring.report.event_schema import is_number
from multi_gpu_training.monitoring.report.history import Event
from multi_gpu_training.monitoring.report.run_record import RunRecord

IDENTITY = {"v", "attempt", "rank", "world_size", "time", "clock", "step", "epoch"}
FIRST = ("loss", "samples_per_s", "accuracy", "lr", "grad_norm", "input_wait")
DEVICE = {
    "gpu_utilization": ("GPU use", "%", 1.0),
    "memory_bytes": ("Memory", "GB", 1 / 2**30),
    "power_w": ("Power", "W", 1.0),
    "sm_clock_mhz": ("Clock", "MHz", 1.0),
    "cpu_percent": ("CPU use of the rank", "%", 1.0),
}
MOST_LINES = 8


def training_curves(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, list[Series]]:
    """What was logged, by name; a line a run, and beside it what validation gave."""
    found: dict[str, list[Series]] = {}
    keys = dict.fromkeys(
        key
        for run in runs
        for event in run.steps[:: max(1, len(run.steps) // 50)]
        for key, value in event.items()
        if key not in IDENTITY and is_number(value)
    )
    for key in sorted(keys, key=lambda k: FIRST.index(k) if k in FIRST else len(FIRST)):
        series = [
            _series(run.steps, "step", key, name, i)
            for i, (run, name) in enumerate(zip(runs, names, strict=True))
        ]
        found[key] = [s for s in series if len(s.x)]
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        for key, series_of_key in _validation(run, name, i + len(runs)).items():
            found.setdefault(key, []).append(series_of_key)
    return {key: series for key, series in found.items() if series}


def device_curves(run: RunRecord) -> dict[tuple[str, str], list[Series]]:
    """Readings of the devices, a line a rank; of very many ranks the first."""
    found = {}
    for key, (title, unit, factor) in DEVICE.items():
        series = []
        for i, rank in enumerate(run.ranks[:MOST_LINES]):
            one = _series(run.devices.get(rank, []), "time", key, f"rank {rank}", i)
            one.x, one.y = one.x - run.began, one.y * factor
            series += [one] if len(one.x) else []
        if series:
            found[title, unit] = series
    return found


def _validation(run: RunRecord, name: str, colour: int) -> dict[str, Series]:
    rows: list[Event] = []
    for event in run.epochs:
        if isinstance(event.get("val"), dict) and is_number(event.get("step")):
            rows.append({"step": event["step"], **event["val"]})
    keys = dict.fromkeys(k for row in rows for k, v in row.items() if is_number(v) and k != "step")
    shown = "validation" if name == "training" else f"{name} validation"
    return {key: _series(rows, "step", key, shown, colour) for key in keys}


def _series(rows: Sequence[Event], x: str, y: str, name: str, colour: int) -> Series:
    pairs = [
        (float(row[x]), float(row[y]))
        for row in rows
        if is_number(row.get(x)) and is_number(row.get(y))
    ]
    points = np.array(pairs, dtype=np.float64).reshape(len(pairs), 2)
    return Series(name, points[:, 0], points[:, 1], colour)
