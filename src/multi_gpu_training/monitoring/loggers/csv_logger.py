"""Metrics as `metrics.csv` in the run folder: one row per step and name, easy to pivot.

After a resume, rows of steps that are trained again are dropped, so that each step stands once.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from multi_gpu_training.monitoring.loggers import LoggedRun
from multi_gpu_training.safe_files import open_regular, write_atomically

COLUMNS = ("step", "name", "value")


def open_logger(run: LoggedRun) -> CsvLogger | None:
    return CsvLogger(run.folder / "metrics.csv", run.step) if run.is_main else None


class CsvLogger:
    """Appends rows. A disk that is full interrupts it, never the training."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            text = io.StringIO(newline="")
            table = csv.writer(text)
            table.writerow(COLUMNS)
            table.writerows(row for row in _rows(path) if int(row[0]) <= step)
            write_atomically(path, text.getvalue())  # never without the rows of before
            flags = os.O_WRONLY | os.O_APPEND
            self._file = os.fdopen(open_regular(path, flags), "a", newline="", buffering=1)
        except (OSError, ValueError, csv.Error) as error:
            self._give_up(error)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._file is None:
            return
        try:
            csv.writer(self._file).writerows([step, name, v] for name, v in metrics.items())
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: Exception) -> None:
        print(f"{self._path} cannot be written: {error}; training continues", file=sys.stderr)
        with contextlib.suppress(OSError):
            self.close()
        self._file = None


def _rows(path: Path) -> list[list[str]]:
    """The rows below the title; a ValueError if this is not one of our tables."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return []
    with os.fdopen(descriptor, newline="") as file:
        title, *rows = list(csv.reader(file)) or [list(COLUMNS)]
    if tuple(title) != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        raise ValueError("it is not a table of metrics; move it away")
    return rows
