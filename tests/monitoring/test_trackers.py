"""W&B, MLflow and Trackio: one run, each value once, and training never waits for them."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import Callback, ConfigError
from multi_gpu_training.monitoring.loggers import LoggedRun
from multi_gpu_training.monitoring.loggers.tracker import (
    TrackedMetrics,
    TrackerLogger,
    remember,
    remembered,
)
from multi_gpu_training.monitoring.loggers.trackio_logger import TrackioOptions, TrackioTracker

SCRIPT = Path(__file__).parent / "tracked_run.py"
Points = Counter[tuple[str, int]]


class Service:
    """A tracker in memory. `values` outlive the process, as a server's do."""

    name, remote = "Service", False

    def __init__(self, values: list[tuple[str, int, float]] | None = None) -> None:
        self.values = values if values is not None else []
        self.held: set[tuple[str, int]] = set()
        self.closed = False

    def open(self) -> None:
        self.held = {(name, step) for name, step, _ in self.values}

    def has(self, metric: str, step: int) -> bool:
        return (metric, step) in self.held

    def log(self, rows: list[TrackedMetrics]) -> None:
        self.values += [(name, row.step, v) for row in rows for name, v in row.metrics.items()]

    def close(self) -> None:
        self.closed = True

    def points(self) -> Points:
        return Counter((name, step) for name, step, _ in self.values)


class Attached(Callback):
    """Feeds a tracker as the loggers of the config are fed, from the events of the same run."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.logger: TrackerLogger | None = None

    def on_setup(self, run: Any) -> None:
        opened = LoggedRun(
            run.folder, run.config, True, run.step, run.records.events, {}, lambda: False
        )
        self.logger = TrackerLogger(self.tracker, opened)
        run.records.loggers.loggers.append(self.logger)


SETTINGS: dict[str, Any] = {
    "training_mode": "single",
    "batch_size": 4,
    "epochs": 5,
    "log_every": 1,
    "run_name": "it",
    "enable_fault_tolerance": True,
    "checkpoint_frequency": 5,
}


def train(folder: Path, tracker: Any, *callbacks: Callback, **settings: Any) -> None:
    manager = manager_for(folder, **SETTINGS, **settings)
    manager.fit(
        line(),
        points(16),
        loss_fn=squares,
        optimizer=sgd,
        callbacks=[Attached(tracker), *callbacks],
    )


def everything(name: str = "train/loss", steps: int = 20) -> Points:
    return Counter((name, step) for step in range(1, steps + 1))


class Stop(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        if result.step == 13:
            raise KeyboardInterrupt


def of(name: str, found: Points) -> Points:
    return Counter({key: count for key, count in found.items() if key[0] == name})


def test_each_value_is_sent_once_after_a_resume_also_those_that_a_kill_lost(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Service(), Stop())
    # What a kill leaves: values beyond the checkpoint of step 10, and none of the last before it.
    server = Service([("train/loss", step, 0.0) for step in (1, 2, 3, 4, 5, 6, 11, 12)])
    train(tmp_path, server, resume="auto")
    assert of("train/loss", server.points()) == everything()
    assert max(server.points().values()) == 1
    sent = [step for name, step, value in server.values if name == "train/loss" and value]
    assert {7, 8, 9, 10} <= set(sent) and not {5, 6, 11, 12} & set(sent)


def test_a_tracker_that_is_away_never_holds_up_training_and_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multi_gpu_training.monitoring.loggers.tracker.CLOSE_LOCAL_S", 0.2)
    monkeypatch.setattr("multi_gpu_training.monitoring.loggers.tracker.MOST_WAITING", 8)
    back = threading.Event()

    class Away(Service):
        def open(self) -> None:
            back.wait(60)

    class Broken(Service):
        def open(self) -> None:
            raise ConnectionError("https://me:secret@server is away")

    away = Away()
    train(tmp_path / "away", away)
    assert not away.values  # 20 steps ran, and their metrics are dropped
    said = capsys.readouterr().err
    assert said.count("warning: Service: 8 logs are waiting, and later ones are dropped") == 1
    assert "came before it had taken all metrics" in said
    back.set()
    train(tmp_path / "broken", Broken())
    said = capsys.readouterr().err
    assert said.count("ConnectionError: https://***@server is away") == 1


def test_a_tracker_that_comes_back_gets_everything_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multi_gpu_training.monitoring.loggers.tracker.RETRY_S", (0.01,))

    class Flaky(Service):
        failures = 3

        def log(self, rows: list[TrackedMetrics]) -> None:
            if self.failures:
                self.failures -= 1
                raise TimeoutError
            super().log(rows)

    flaky = Flaky()
    train(tmp_path, flaky)
    steps = [step for name, step, _ in flaky.values if name == "train/loss"]
    assert steps == list(range(1, 21))
    assert flaky.closed


def test_a_refused_key_stops_a_new_run_and_never_a_resumed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(Service):
        remote = True

        def open(self) -> None:
            raise ConfigError("loggers: Service does not accept the credentials; run `login`")

    with pytest.raises(ConfigError, match="does not accept the credentials; run `login`"):
        train(tmp_path, Refusing())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Service(), Stop(), resume="auto")
    train(tmp_path, Refusing(), resume="auto")
    assert "warning: Service: Service does not accept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"loggers": ["wandb", "tensorbored"]}, "'tensorbored' is not a logger; there are csv"),
        (
            {"loggers": ["mlflow"], "logger_options": {"mlflow": {"project": "x"}}},
            r"logger_options.mlflow.project='x': .*; it takes experiment, tracking_uri, name",
        ),
        (
            {"loggers": ["wandb"], "logger_options": {"wandb": {"mode": "live"}}},
            r"logger_options.wandb.mode='live': input should be 'offline' or 'online'",
        ),
        (
            {"logger_options": {"wandb": {"project": "x"}}},
            r"logger_options.wandb is set, but wandb is not among the loggers; add it",
        ),
        ({"loggers": ["csv"], "logger_options": {"csv": {"a": 1}}}, "csv: this logger takes no"),
    ],
)
def test_bad_loggers_and_options_are_one_sentence_each(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    manager = manager_for(tmp_path, training_mode="single", **settings)
    with pytest.raises(ConfigError, match=problem):
        manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.setattr("multi_gpu_training.monitoring.loggers.installed", lambda package: False)
    manager = manager_for(tmp_path, training_mode="single", loggers=[name])
    wanted = rf"needs the package {name}, .* pip install 'multi-gpu-training\[{name}\]'"
    with pytest.raises(ConfigError, match=wanted):
        manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)


def test_a_file_store_that_mlflow_refuses_and_an_upload_nobody_asked_for_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multi_gpu_training.monitoring.loggers.installed", lambda package: True)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/mine")
    for name, options, problem in (
        ("mlflow", {"tracking_uri": "file:./mlruns"}, "is a file store, .* give sqlite:///"),
        ("trackio", {}, "TRACKIO_SPACE_ID would make Trackio send metrics away"),
    ):
        manager = manager_for(
            tmp_path, training_mode="single", loggers=[name], logger_options={name: options}
        )
        with pytest.raises(ConfigError, match=problem):
            manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)


# With the real libraries


def wandb_points(run: Path) -> Points:
    """The history of all W&B files of the run, read with W&B's own messages."""
    from wandb.proto import wandb_internal_pb2

    found: Points = Counter()
    for file in run.glob("wandb/offline-run-*/*.wandb"):
        for raw in _leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            row: dict[str, Any] = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = row.pop("trainer/global_step", None)
            names = [name for name in row if not name.startswith("_")]
            found.update((name, step) for name in names if step is not None)
    return found


def _leveldb_records(data: bytes) -> list[bytes]:
    """Records of a log in LevelDB's format, which W&B writes: blocks of 32 KiB, a header of 7 bytes
    for the file and for every chunk."""
    records, parts, place = [], b"", 7
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
known = json.load(open(sys.argv[1] + "/mlflow.json"))
client = MlflowClient(tracking_uri=known["tracking_uri"])
runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
assert [(r.info.run_id, r.info.status) for r in runs] == [(known["run_id"], "FINISHED")], runs
params, names = runs[0].data.params, runs[0].data.metrics
assert params["learning_rate"] and params["run_name"] == "it", params
history = {name: client.get_metric_history(known["run_id"], name) for name in names}
print(json.dumps([(name, m.step) for name, found in history.items() for m in found]))
"""
READ_TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
assert len(trackio.Api().runs("multi-gpu-training")) == 1
rows = SQLiteStorage.get_logs("multi-gpu-training", "it")
print(json.dumps([(name, row["step"]) for row in rows for name in row]))
"""


def told_points(run: Path, script: str) -> Points:
    """The (name, step) that a script prints. In its own process: these libraries warn on import."""
    told = subprocess.run(
        [sys.executable, "-c", script, str(run)],
        env=environment(run.parent.parent),
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    own = {"step", "timestamp"}  # columns of Trackio's rows
    return Counter((name, step) for name, step in json.loads(told.stdout) if name not in own)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_one_run_and_every_step_once_after_kill_9_and_resume(
    tmp_path: Path, tracker: str, ranks: int
) -> None:
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: pip install 'multi-gpu-training[{tracker}]'")
    command = [sys.executable, str(SCRIPT), str(tmp_path), tracker, str(ranks)]
    first, second = (
        subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
        for _ in range(2)
    )
    assert first.returncode != 0 and (tmp_path / "killed").exists(), first.stderr
    assert second.returncode == 0, second.stderr
    assert not re.search("warning: (W&B|MLflow|Trackio)", second.stderr), second.stderr
    run = tmp_path / "custom" / "it"
    scripts = {"mlflow": READ_MLFLOW, "trackio": READ_TRACKIO}
    found = told_points(run, scripts[tracker]) if tracker in scripts else wandb_points(run)
    assert of("train/loss", found) == everything()
    assert of("twice", found) == everything("twice")
    assert of("val/loss", found) == Counter(("val/loss", step) for step in (4, 8, 12, 16, 20))
    assert max(found.values()) == 1
    if tracker == "wandb":
        assert len(list(run.glob("wandb/offline-run-*"))) == 1


@pytest.mark.engines
@pytest.mark.filterwarnings("default")  # MLflow and its database library warn of themselves
def test_a_database_that_a_kill_left_half_made_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed: pip install 'multi-gpu-training[mlflow]'")
    from multi_gpu_training.monitoring.loggers.mlflow_logger import MlflowOptions, MlflowTracker

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # which loading it sets for good

    database = tmp_path / "mlflow" / "mlflow.db"
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as opened, opened:
        opened.execute("CREATE TABLE registered_models (name VARCHAR(256) NOT NULL)")
    tracker = MlflowTracker(MlflowOptions(), tmp_path, {}, 0)
    tracker.open()
    tracker.log([TrackedMetrics(1, {"loss": 0.5}, 1.0)])
    tracker.close()
    with closing(sqlite3.connect(database)) as opened:
        assert opened.execute("SELECT key, step, value FROM metrics").fetchall() == [
            ("loss", 1, 0.5)
        ]


@pytest.mark.engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tracker", "options", "status", "said"),
    [
        (
            "wandb",
            {"mode": "online"},
            401,
            r"W&B does not accept the credentials .* run `wandb login`",
        ),
        (
            "mlflow",
            {"tracking_uri": "http://127.0.0.1:{port}"},
            401,
            r"accept the credentials \(HTTP 401\); set MLFLOW_TRACKING_USERNAME and",
        ),
        (
            "mlflow",
            {"tracking_uri": "http://127.0.0.1:{port}", "experiment": "theirs"},
            403,
            r"does not let you write to the experiment 'theirs' \(HTTP 403\); ask for",
        ),
    ],
)
def test_wrong_credentials_are_one_sentence_before_training(
    tmp_path: Path, tracker: str, options: dict[str, str], status: int, said: str
) -> None:
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: pip install 'multi-gpu-training[{tracker}]'")
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = str(server.server_address[1])
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from tiny import *\n"
        "m = manager_for(Path(sys.argv[2]), training_mode='single', loggers=[sys.argv[3]],\n"
        "    logger_options={sys.argv[3]: json.loads(sys.argv[4])})\n"
        "m.fit(line(), points(16), loss_fn=squares, optimizer=sgd)\n"
    )
    given = json.dumps(options).replace("{port}", port)
    tests = str(SCRIPT.parent.parent)
    ended = subprocess.run(
        [sys.executable, "-c", script, tests, str(tmp_path), tracker, given],
        env={
            **environment(tmp_path),
            "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
            "WANDB_API_KEY": "0" * 40,
        },
        capture_output=True,
        text=True,
    )
    server.shutdown()
    server.server_close()
    assert ended.returncode != 0, ended.stderr
    assert re.search(said, ended.stderr), ended.stderr[-3000:]


def test_a_run_killed_before_trackio_wrote_its_project_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        def runs(self, project: str) -> Any:
            raise ValueError(f"Project {project!r} does not exist")

    stand_in = ModuleType("trackio")
    begun = SimpleNamespace(id="new")
    stand_in.Api, stand_in.init = Nothing, lambda **given: begun  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    remember(tmp_path, "trackio", run_id="old")
    TrackioTracker(TrackioOptions(), tmp_path, {}).open()
    assert remembered(tmp_path, "trackio")["run_id"] == "new"
