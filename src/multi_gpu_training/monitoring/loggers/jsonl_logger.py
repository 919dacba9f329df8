"""Metrics as lines of this rank's event file, which report and resume read. Always on."""

from __future__ import annotations

from collections.abc import Mapping

from multi_gpu_training.monitoring.events import EventFile
from multi_gpu_training.monitoring.loggers import LoggedRun

# How the groups of metrics are called in the events.
_EVENTS = {"train": "step", "val": "validation"}


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
