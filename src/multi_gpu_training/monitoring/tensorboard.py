"""Curves for TensorBoard, written by the main rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Curves:
    """Scalars under their names. Without a folder it writes nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
