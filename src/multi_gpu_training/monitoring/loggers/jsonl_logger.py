"""Metrics as lines of this rank's event file, which report and resume read. Always on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multi_gpu_training.monitoring.event_segments import marked_events
from multi_gpu_training.monitoring.events import EventFile
from multi_gpu_training.monitoring.loggers import LoggedRun

# How the groups of metrics are called in the events.
_EVENTS = {"train": "step", "val": "validation"}
_GROUPS = {event: group for group, event in _EVENTS.items()}
_MARKS = [f'"event": "{event}"'.encode() for event in (*_GROUPS, "metrics")]
# What every line holds besides metrics.
_ENVELOPE = {"v", "run", "attempt", "rank", "world_size", "host", "time", "clock", "event", "step"}


def open_logger(run: LoggedRun) -> JsonlLogger:
    return JsonlLogger(run.events)


class JsonlLogger:
    """One line per call and group; the file is the run's, and closed with it."""

    def __init__(self, events: EventFile) -> None:
        self._events = events

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        lines: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            group, _, rest = name.partition("/")
            if group in _EVENTS and rest:
                lines.setdefault(_EVENTS[group], {})[rest] = value
            else:
                lines.setdefault("metrics", {})[name] = value
        for event, values in lines.items():
            # The names of a user's own may be anything, `step` too: they get a field of their own.
            fields = {"values": values} if event == "metrics" else values
            self._events.write(event, step=step, **fields)

    def close(self) -> None:
        pass


def logged_metrics(
    current: Path, step: int, before: float
) -> Iterator[tuple[int, dict[str, float], float]]:
    """Step, metrics and time of what a rank's event files hold up to `step`, logged `before` that
    time, in the order of steps. Where steps were trained again, the last value counts."""
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for event in marked_events(current, _MARKS):
        if event["step"] <= step and event["time"] < before:
            for name, value in _metrics_of(event):
                found[event["step"], name] = float(value), float(event["time"])
    rows: dict[int, tuple[dict[str, float], float]] = {}
    for (at, name), (value, logged_at) in sorted(found.items()):
        metrics, latest = rows.get(at, ({}, 0.0))
        metrics[name] = value
        rows[at] = metrics, max(latest, logged_at)
    for at, (metrics, latest) in rows.items():
        yield at, metrics, latest


def _metrics_of(event: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if event["event"] == "metrics":
        yield from event["values"].items()
        return
    group = _GROUPS[event["event"]]
    for name, value in event.items():
        if name not in _ENVELOPE and not name.startswith("_"):
            yield f"{group}/{name}", value
