"""The log: messages with fields, for people on the console and for programs in the events."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from multi_gpu_training.monitoring.console import Console

SCHEMA = 1


class EventFile:
    """One JSON line an event, flushed at once: readable after any crash.

    A disk that is full or gone ends the recording, never the training.
    """

    def __init__(self, path: Path | None, **identity: Any) -> None:
        self.identity = {"v": SCHEMA, **identity, "host": socket.gethostname()}
        self.lost = 0
        self._file: TextIO | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a")
            except OSError as error:
                self._give_up(error)

    def write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        record = {
            **self.identity,
            "time": time.time(),
            "clock": time.perf_counter(),
            "event": event,
            **{key: _plain(value) for key, value in fields.items()},
        }
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        print(f"events are no longer recorded: {error}", file=sys.stderr)
        self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class StructuredLogger:
    """`logger.info("saved", step=7, loss=0.3)` prints on the main rank, records on all."""

    def __init__(self, console: Console, events: EventFile) -> None:
        self._console = console
        self._events = events

    def info(self, message: str, **fields: Any) -> None:
        self._log("info", message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._log("warning", message, fields)

    def error(self, message: str, **fields: Any) -> None:
        self._log("error", message, fields)

    def record(self, event: str, **fields: Any) -> None:
        """Into the events only."""
        self._events.write(event, **fields)

    def _log(self, level: str, message: str, fields: dict[str, Any]) -> None:
        shown = "".join(f"  {key}={format_value(value)}" for key, value in fields.items())
        prefix = "" if level == "info" else f"{level}: "
        self._console.line(prefix + message + shown)
        self._events.write("log", level=level, message=message, **fields)


def format_value(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
