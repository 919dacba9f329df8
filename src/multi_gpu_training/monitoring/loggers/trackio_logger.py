"""Metrics for Trackio, in its own local database; `trackio sync` uploads them later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.loggers import LoggedRun
from multi_gpu_training.monitoring.loggers.tracker import (
    TrackedMetrics,
    TrackerLogger,
    remember,
    remembered,
)

PACKAGE = "trackio"
# Trackio itself would send metrics where these point.
SENDING = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID")


class TrackioOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    project: str = "multi-gpu-training"
    name: str | None = None
    group: str | None = None


OPTIONS = TrackioOptions


def open_logger(run: LoggedRun) -> TrackerLogger | None:
    if not run.is_main:
        return None
    found = [name for name in SENDING if os.environ.get(name)]
    if found:
        raise ConfigError(
            f"loggers: {' and '.join(found)} would make Trackio send metrics away; this logger "
            "writes locally only, so unset it, and upload with `trackio sync` after the run"
        )
    options = TrackioOptions(**run.options("trackio"))
    return TrackerLogger(TrackioTracker(options, run.folder, run.settings), run)


class TrackioTracker:
    """One run of a Trackio project in TRACKIO_DIR."""

    name = "Trackio"
    remote = False

    def __init__(self, options: TrackioOptions, folder: Path, settings: Mapping[str, Any]) -> None:
        self._options = options
        self._folder = folder
        self._settings = settings
        self._run: Any = None

    def open(self) -> None:
        import trackio

        options = self._options
        known = remembered(self._folder, "trackio")
        # Trackio cannot drop the steps that are trained again: the run is written anew, with what
        # the events hold up to the resumed step.
        try:
            for old in trackio.Api().runs(options.project) if known else ():
                if old.id == known["run_id"]:
                    old.delete()
        except ValueError:  # killed before Trackio had written the project: nothing to delete
            pass
        self._run = trackio.init(
            project=options.project,
            name=options.name or self._folder.name,
            group=options.group,
            config=dict(self._settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        remember(self._folder, "trackio", run_id=self._run.id, project=options.project)

    def has(self, metric: str, step: int) -> bool:
        return False

    def log(self, rows: list[TrackedMetrics]) -> None:
        for step, metrics, _ in rows:
            self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
