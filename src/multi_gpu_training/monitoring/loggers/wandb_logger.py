"""Metrics for Weights & Biases. Nothing leaves the machine unless `mode: online` is set."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.loggers import LoggedRun
from multi_gpu_training.monitoring.loggers.tracker import (
    TrackedMetrics,
    TrackerLogger,
    remember,
    remembered,
)

PACKAGE = "wandb"
# W&B raises one class for a server that is away and for one that refuses.
_REFUSAL = re.compile(r"\b40[13]\b|unauthori|authenticat|permission|API key", re.IGNORECASE)
STEP = "trainer/global_step"  # the name that Lightning uses: dashboards fit both


class WandbOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    project: str = "multi-gpu-training"
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: list[str] = []
    mode: Literal["offline", "online"] = "offline"


OPTIONS = WandbOptions


def open_logger(run: LoggedRun) -> TrackerLogger | None:
    if not run.is_main:
        return None
    options = WandbOptions(**run.options("wandb"))
    if options.mode == "online":
        _load()  # its seconds must not count as the server's
    return TrackerLogger(WandbTracker(options, run.folder, run.settings), run)


class WandbTracker:
    """One W&B run: offline as one folder `wandb/offline-run-*` in the run folder."""

    name = "W&B"

    def __init__(self, options: WandbOptions, folder: Path, settings: Mapping[str, Any]) -> None:
        self.remote = options.mode == "online"
        self._options = options
        self._folder = folder
        self._settings = settings
        self._run: Any = None
        self._held: set[tuple[str, int]] = set()

    def open(self) -> None:
        wandb = _load()
        options = self._options
        known = remembered(self._folder, "wandb")
        run_id = known.get("run_id") or secrets.token_hex(8)
        remember(self._folder, "wandb", run_id=run_id, project=options.project)
        if not self.remote:
            # A W&B file cannot be continued, and a kill costs its tail. A new one takes its place:
            # it gets everything up to the resumed step from the run's events.
            for old in (self._folder / "wandb").glob(f"offline-run-*-{run_id}"):
                shutil.rmtree(old)
        try:
            self._run = wandb.init(
                project=options.project,
                entity=options.entity,
                name=options.name or self._folder.name,
                group=options.group,
                tags=options.tags or None,
                id=run_id,
                resume="allow" if self.remote else None,
                mode=options.mode,
                dir=str(self._folder),
                config=dict(self._settings),
                reinit="create_new",  # the user may have a W&B run of their own
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_git=True,
                    save_code=False,
                    x_disable_meta=True,
                    x_disable_stats=True,
                    finish_timeout=15,
                ),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            usage = isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError)
            if not usage and not _REFUSAL.search(reason):
                raise
            raise ConfigError(
                f"loggers: W&B does not accept the credentials ({reason}); run `wandb login`, set "
                "WANDB_API_KEY, or set logger_options.wandb.mode=offline"
            ) from None
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        if self.remote and known:
            past = wandb.Api().run(self._run.path).scan_history()
            self._held = {(name, row[STEP]) for row in past if STEP in row for name in row}

    def has(self, metric: str, step: int) -> bool:
        return (metric, step) in self._held

    def log(self, rows: list[TrackedMetrics]) -> None:
        # Without `step=`: W&B drops values that come after those of a later step.
        for step, metrics, logged_at in rows:
            self._run.log({**metrics, STEP: step, "_timestamp": logged_at})

    def close(self) -> None:
        self._run.finish()


def _load() -> Any:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it reports to W&B even offline
    import wandb

    return wandb
