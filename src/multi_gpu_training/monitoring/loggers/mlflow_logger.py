"""Metrics for MLflow: in a database of the run folder, or on the server that the user names."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
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

PACKAGE = "mlflow"
MOST_PARAMS = 100  # per call, as MLflow allows
LONGEST_PARAM = 500


class MlflowOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    experiment: str = "multi-gpu-training"
    tracking_uri: str | None = None
    name: str | None = None


OPTIONS = MlflowOptions


def open_logger(run: LoggedRun) -> TrackerLogger | None:
    if not run.is_main:
        return None
    options = MlflowOptions(**run.options("mlflow"))
    uri = options.tracking_uri or ""
    scheme = uri.partition(":")[0] if ":" in uri else ("file" if uri else "")
    if scheme == "file" and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() != "true":
        raise ConfigError(
            f"logger_options.mlflow.tracking_uri={uri!r} is a file store, which MLflow 3 refuses; "
            "give sqlite:////absolute/path.db, or leave it out for a database in the run folder"
        )
    tracker = MlflowTracker(options, run.folder, run.settings, run.step)
    if tracker.remote:
        _load()  # its seconds must not count as the server's
    return TrackerLogger(tracker, run)


class MlflowTracker:
    """One MLflow run, through MlflowClient alone: the user's active run stays as it is."""

    name = "MLflow"

    def __init__(
        self, options: MlflowOptions, folder: Path, settings: Mapping[str, Any], step: int
    ) -> None:
        self.remote = (options.tracking_uri or "").startswith(("http://", "https://", "databricks"))
        self._options = options
        self._folder = folder
        self._settings = settings
        self._step = step
        self._database = folder / "mlflow" / "mlflow.db"
        self._client: Any = None
        self._run_id = ""
        self._held: set[tuple[str, int]] = set()

    def open(self) -> None:
        _load()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        own = self._options.tracking_uri is None
        if own:
            self._database.parent.mkdir(exist_ok=True)
            # Not one that this process has open, nor one that holds our run already.
            if self._client is None and not remembered(self._folder, "mlflow"):
                _drop_if_unfinished(self._database)
        uri = self._options.tracking_uri or f"sqlite:///{self._database.resolve()}"
        self._client = MlflowClient(tracking_uri=uri)
        try:
            known = remembered(self._folder, "mlflow")
            if known and known.get("tracking_uri") == uri and (not own or self._database.exists()):
                self._run_id = str(known["run_id"])
                if own:
                    _forget_after(self._database, self._run_id, self._step)
                self._client.update_run(self._run_id, status="RUNNING")
                self._held = set(self._values())
            else:
                self._begin(own)
                remember(self._folder, "mlflow", run_id=self._run_id, tracking_uri=uri)
        except MlflowException as error:
            status = error.get_http_status_code()
            if self.remote and status in {401, 403}:
                raise ConfigError(f"loggers: {self._refusal(uri, status)}") from None
            raise

    def _refusal(self, uri: str, status: int) -> str:
        if status == 403:
            return (
                f"MLflow at {uri} knows you, but does not let you write to the experiment "
                f"{self._options.experiment!r} (HTTP 403); ask for the right to edit it, or name "
                "another in logger_options.mlflow.experiment"
            )
        return (
            f"MLflow at {uri} does not accept the credentials (HTTP 401); set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )

    def has(self, metric: str, step: int) -> bool:
        return (_allowed(metric), step) in self._held

    def log(self, rows: list[TrackedMetrics]) -> None:
        from mlflow.entities import Metric

        # The time belongs to the value: MLflow ignores what an error makes us send twice.
        values = [
            Metric(_allowed(name), value, int(logged_at * 1000), step)
            for step, metrics, logged_at in rows
            for name, value in metrics.items()
        ]
        for start in range(0, len(values), 1000):
            self._client.log_batch(self._run_id, metrics=values[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _begin(self, own: bool) -> None:
        from mlflow.entities import Param

        client, name = self._client, self._options.experiment
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            artifacts = (self._folder / "mlflow" / "artifacts").resolve().as_uri() if own else None
            experiment_id = client.create_experiment(name, artifact_location=artifacts)
        run_name = self._options.name or self._folder.name
        self._run_id = client.create_run(experiment_id, run_name=run_name).info.run_id
        params = [
            Param(_allowed(key), value[:LONGEST_PARAM]) for key, value in _flat(self._settings)
        ]
        for start in range(0, len(params), MOST_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + MOST_PARAMS])

    def _values(self) -> Iterator[tuple[str, int]]:
        for name in self._client.get_run(self._run_id).data.metrics:
            for found in self._client.get_metric_history(self._run_id, name):
                yield name, found.step


def _load() -> None:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow  # noqa: F401


def _drop_if_unfinished(database: Path) -> None:
    """Delete a database without values, which a kill may have left half made: MLflow can neither
    use nor complete it."""
    if not database.exists():
        return
    try:
        with closing(sqlite3.connect(database)) as opened:
            used = opened.execute("SELECT 1 FROM metrics LIMIT 1").fetchone() is not None
    except sqlite3.OperationalError as error:
        used = "no such table" not in str(error)  # one that is locked or unreadable stays
    if not used:
        for end in ("", "-journal", "-wal", "-shm"):
            database.with_name(database.name + end).unlink(missing_ok=True)


def _forget_after(database: Path, run_id: str, step: int) -> None:
    """Drop values of steps that are trained again, as the other files of the run folder do. MLflow
    itself has no call for it, so on a server the first values stay."""
    with closing(sqlite3.connect(database)) as opened, opened:
        for table in ("metrics", "latest_metrics"):
            opened.execute(f"DELETE FROM {table} WHERE run_uuid = ? AND step > ?", (run_id, step))
        # Without a latest value a metric is missing in the list of the run.
        opened.execute(
            "INSERT OR IGNORE INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
            "SELECT key, value, timestamp, max(step), is_nan, run_uuid FROM metrics "
            "WHERE run_uuid = ? GROUP BY key",
            (run_id,),
        )


def _allowed(name: str) -> str:
    """The name in the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
