"""Metrics as `metrics.csv` in the run folder: one row per step and name, easy to pivot.

After a resume, rows of steps that are trained again are dropped, so that each step stands once.
"""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from multi_gpu_training.monitoring.loggers import LoggedRun

COLUMNS = ("step", "name", "value")


def open_logger(run: LoggedRun) -> CsvLogger | None:
    return CsvLogger(run.folder / "metrics.csv", run.step) if run.is_main else None


class CsvLogger:
    """Appends rows. A disk that is full interrupts it, never the training."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            kept = [row for row in _rows(path) if int(row["step"]) <= step]
            draft = path.with_suffix(".draft")
            with draft.open("w", newline="") as file:
                table = csv.DictWriter(file, COLUMNS)
                table.writeheader()
                table.writerows(kept)
            draft.replace(path)  # never without the rows of before
            self._file = path.open("a", newline="", buffering=1)
        except (OSError, ValueError, KeyError) as error:
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
        print(f"{self._path} cannot be written: {error}; training goes on", file=sys.stderr)
        with contextlib.suppress(OSError):
            self.close()
        self._file = None


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
