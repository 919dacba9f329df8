"""Curves for TensorBoard, written by the main rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multi_gpu_training.monitoring.loggers import LoggedRun

PACKAGE = "tensorboard"
RETRY_S = 60.0


def open_logger(run: LoggedRun) -> TensorBoardLogger | None:
    return TensorBoardLogger(run.folder / "tensorboard", run.step) if run.is_main else None


class TensorBoardLogger:
    """Scalars under their names; those after `step` are logged again and replace the old ones.

    A disk that is full interrupts the curves, never the training; the events hold the same.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._purge = step + 1 if step else None
        self._folder: Path | None = folder
        self._writer: Any = None
        self._retry_at = 0.0
        self._open()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is None and self._folder is not None and time.monotonic() > self._retry_at:
            self._open()
        try:
            for name, value in metrics.items() if self._writer is not None else ():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._interrupt(error)

    def close(self) -> None:
        self._folder = None
        self._drop()

    def _open(self) -> None:
        if self._folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge)
        except OSError as error:
            self._interrupt(error)

    def _interrupt(self, error: OSError) -> None:
        print(f"curves cannot be written: {error}; training continues", file=sys.stderr)
        self._retry_at = time.monotonic() + RETRY_S
        self._drop()

    def _drop(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
