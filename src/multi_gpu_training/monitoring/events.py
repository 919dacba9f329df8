"""The log: messages with fields, for people on the console and for programs in the events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.event_crc import with_crc
from multi_gpu_training.monitoring.event_segments import (
    SEGMENT_BYTES,
    close_segment,
    merge_segments,
)
from multi_gpu_training.redaction import redact
from multi_gpu_training.safe_files import check_folder, open_regular

SCHEMA = 2  # lines end with a checksum


class EventFile:
    """One JSON line per event, written at once: readable after any crash.

    `event_segments` says how the files are kept from growing without end.

    A disk that is full or gone interrupts the recording, never the training: it goes on when
    there is space again, and an `events_lost` line says how many are missing.
    """

    def __init__(
        self,
        path: Path | None,
        on_deleted: Callable[[], None] = lambda: None,
        **identity: Any,
    ) -> None:
        self.identity = {"v": SCHEMA, **identity, "host": socket.gethostname()}
        self.lost = 0
        self._path = path
        self._missed = False  # the file is gone and could not be made again
        self._on_deleted = on_deleted
        self._file: BinaryIO | None = None
        self._torn = False  # the last line may have been cut short
        self._turn = threading.Lock()  # the device is watched by another thread
        if path is not None:
            try:
                self._open(path)
            except OSError as error:
                print(f"no events are recorded: {error}; training continues", file=sys.stderr)

    def write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        with self._turn:
            self._write(event, fields)

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        record = {
            **self.identity,
            "time": time.time(),
            "clock": time.perf_counter(),
            "event": event,
            **{key: _plain(value) for key, value in fields.items()},
        }
        self._look_for_file()
        if self.lost:
            note = {**record, "event": "events_lost", "count": self.lost}
            note = {key: note[key] for key in (*self.identity, "time", "clock", "event", "count")}
            if not self._append(note):
                self.lost += 1
                return
            self.lost = 0
        if not self._append(record):
            self.lost = 1
        elif self._bytes >= self._full_at:
            self._begin_next()

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_folder(path.parent)
        descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._opened = os.fstat(descriptor)
        self._bytes = self._opened.st_size
        # A disk that was full may have cut the last line of an earlier start.
        self._torn = os.pread(descriptor, 1, max(0, self._bytes - 1)) not in (b"", b"\n")
        self._full_at = SEGMENT_BYTES

    def _begin_next(self) -> None:
        """Close the file that is full, and go on in a new one."""
        assert self._file is not None and self._path is not None
        full, closed = self._file, None
        try:
            closed = close_segment(self._path)
            self._open(self._path)
        except OSError:  # a disk in trouble: this file goes on growing, and it is tried later
            self._full_at = self._bytes + SEGMENT_BYTES
            if closed is not None:
                with contextlib.suppress(OSError):
                    closed.rename(self._path)
            return
        full.close()
        with contextlib.suppress(OSError, ValueError):  # then there is one segment more
            merge_segments(self._path)

    def _look_for_file(self) -> None:
        """Begin a new file where somebody has deleted the run folder, or moved it away: nobody
        would find what is written into the old one."""
        assert self._file is not None and self._path is not None
        try:
            if os.path.samestat(self._path.lstat(), self._opened):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        old = self._file
        try:
            self._on_deleted()
            self._open(self._path)
        except (OSError, ConfigError) as error:
            if not self._missed:  # tried again with the next event
                self._missed = True
                print(
                    f"warning: {self._path} was deleted or moved and cannot be recreated "
                    f"({error}); further events are lost; training continues",
                    file=sys.stderr,
                )
            return
        self._missed = False
        old.close()
        text = (
            f"{self._path} was deleted or moved during the run and has been recreated without its "
            "old content. Do not touch the folder of a run before it ends"
        )
        print(f"warning: {text}", file=sys.stderr)
        note = {**self.identity, "time": time.time(), "clock": time.perf_counter()}
        self._append({**note, "event": "log", "level": "warning", "message": text})

    def _append(self, record: dict[str, Any]) -> bool:
        assert self._file is not None
        raw = (b"\n" if self._torn else b"") + with_crc(json.dumps(record)) + b"\n"
        try:
            written = self._file.write(raw)
            self._bytes += written or 0
            if written == len(raw):
                self._torn = False
                return True
            self._torn = True
            problem: object = "No space left on device"
        except OSError as error:
            problem = error
        if not self.lost:
            print(f"an event could not be recorded: {problem}; training continues", file=sys.stderr)
        return False

    def close(self) -> None:
        # Another thread may be writing. Not for ever: a signal may have stopped this very write.
        held = self._turn.acquire(timeout=1.0)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        if held:
            self._turn.release()


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
        if level == "info":
            self._console.line(message + shown)
        else:
            self._console.warn(f"{level}: {message}{shown}")
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
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, (int, float, bool, type(None))):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
