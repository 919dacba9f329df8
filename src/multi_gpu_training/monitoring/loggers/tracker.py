"""Experiment trackers: feed W&B, MLflow and Trackio without letting them hold up training.

A `Tracker` knows one library; a `TrackerLogger` is the logger around it. Metrics go through a
bounded queue to a thread, which opens the tracker, catches up after a resume and hands metrics
over. Whatever goes wrong there costs one warning, and training continues.

One run, each value once, after any kill: the id of the tracker's run lies in the run folder; values
that the tracker holds already are not sent again; values up to the resumed step that never reached
it are taken from the run's events.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.loggers import LoggedRun
from multi_gpu_training.monitoring.loggers.jsonl_logger import logged_metrics
from multi_gpu_training.redaction import redact
from multi_gpu_training.safe_files import read_json, write_atomically

MOST_WAITING = 10_000  # calls of `log` that wait for the tracker; later ones are dropped
MOST_AT_ONCE = 100
TOGETHER_S = 0.5  # how long to collect: many small writes would compete with training for the GIL
RETRY_S = (1.0, 5.0, 15.0, 60.0)
OPEN_S = 30.0  # for a server to accept or refuse the credentials before training starts
# How long the end of a run may wait: a local tracker will get there, a server may be away for good,
# and after a signal the scheduler will not wait either.
CLOSE_LOCAL_S, CLOSE_REMOTE_S, CLOSE_STOPPED_S = 120.0, 20.0, 5.0


class TrackedMetrics(NamedTuple):
    """Metrics of one step, and when they were logged: seconds since 1970."""

    step: int
    metrics: dict[str, float]
    time: float


class Tracker(Protocol):
    """One run in one tracking library. All calls come from one thread.

    name: for messages. remote: whether it talks to a server. `open` begins the run or continues it,
    and may be called again after an error; it raises ConfigError for what only the user can put
    right. `has` says whether the run held a value before it was opened.
    """

    name: str
    remote: bool

    def open(self) -> None: ...

    def has(self, metric: str, step: int) -> bool: ...

    def log(self, rows: list[TrackedMetrics]) -> None: ...

    def close(self) -> None: ...


class TrackerLogger:
    """Hands metrics to a tracker in a thread. `log` never waits."""

    def __init__(self, tracker: Tracker, run: LoggedRun) -> None:
        self._tracker = tracker
        self._journal = run.folder / "events" / "rank-0.jsonl"
        self._began = time.time()  # what is logged from now on comes through the queue
        self._resumed_at = run.step
        self._is_stopping = run.is_stopping
        self._waiting: queue.Queue[TrackedMetrics] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._opened = threading.Event()
        self._refused: ConfigError | None = None
        self._sent: dict[str, int] = {}  # the last step of each metric
        self._dropped = 0
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"mgt-{tracker.name}", daemon=True)
        self._thread.start()
        # A long run that is restarted must not end because a key has expired meanwhile.
        if run.step == 0 and tracker.remote:
            answered = self._opened.wait(OPEN_S)
            self._opened.set()  # a later refusal is a warning
            if answered and self._refused is not None:
                raise self._refused

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._refused is not None:
            return
        try:
            self._waiting.put_nowait(TrackedMetrics(step, dict(metrics), time.time()))
        except queue.Full:
            self._dropped += 1
            self._warn(f"{MOST_WAITING} logs are waiting, and later ones are dropped")

    def close(self) -> None:
        """Hand over what is left, for a limited time."""
        self._closing.set()
        began = time.monotonic()
        limit = CLOSE_REMOTE_S if self._tracker.remote else CLOSE_LOCAL_S
        while self._thread.is_alive():
            if self._is_stopping():
                limit = min(limit, CLOSE_STOPPED_S)
            if time.monotonic() - began > limit:
                break
            self._thread.join(0.05)
        self._given_up.set()
        left = self._waiting.qsize() + self._dropped
        if self._refused is None and (self._thread.is_alive() or left):
            self._warned = False
            self._warn(f"the end of the run came before it had taken all metrics ({left} logs)")

    def _warn(self, problem: str) -> None:
        if self._warned:
            return
        self._warned = True
        problem = " ".join(redact(problem).split())
        print(
            f"warning: {self._tracker.name}: {problem}; training continues, the run's events hold "
            "all metrics, and a resumed run sends what is missing",
            file=sys.stderr,
        )

    # In the thread

    def _run(self) -> None:
        failures, rows, opened = 0, list[TrackedMetrics](), False
        while True:
            try:
                if not opened:
                    self._tracker.open()
                    opened = True
                    self._opened.set()
                    rows = [*self._missed(), *rows]
                if not rows:
                    rows = self._take()
                while rows:
                    self._tracker.log(rows[:MOST_AT_ONCE])
                    del rows[:MOST_AT_ONCE]  # only now: an error brings them again
                failures = 0
                if self._closing.is_set() and self._waiting.empty():
                    self._tracker.close()
                    return
            except ConfigError as error:
                self._refused = error
                if self._opened.is_set() or self._resumed_at or not self._tracker.remote:
                    self._warn(error.problems[0].removeprefix("loggers: "))
                self._opened.set()
                return
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")
                pause = RETRY_S[min(failures, len(RETRY_S) - 1)]
                # A closing run leaves little time: try again soon, until `close` gives up.
                if self._closing.wait(pause) and self._given_up.wait(min(pause, 1.0)):
                    return
                failures += 1

    def _take(self) -> list[TrackedMetrics]:
        """What has come in the last moment; nothing is waited for once the run is closing."""
        rows: list[TrackedMetrics] = []
        self._closing.wait(TOGETHER_S)
        with contextlib.suppress(queue.Empty):
            while len(rows) < MOST_AT_ONCE:
                rows.append(self._waiting.get_nowait())
        return self._new(rows)

    def _missed(self) -> list[TrackedMetrics]:
        """What was logged up to the resumed step and is not in the tracker."""
        if not self._resumed_at:
            return []
        found = logged_metrics(self._journal, self._resumed_at, self._began)
        return self._new(TrackedMetrics(*row) for row in found)

    def _new(self, rows: Iterable[TrackedMetrics]) -> list[TrackedMetrics]:
        """The rows without values that the tracker has. Each metric has one value per step: after
        going back to a checkpoint, steps come again."""
        new: list[TrackedMetrics] = []
        for step, metrics, logged_at in rows:
            kept = {}
            for name, value in metrics.items():
                if step > self._sent.get(name, -1):
                    self._sent[name] = step
                    if not self._tracker.has(name, step):
                        kept[name] = value
            if kept:
                new.append(TrackedMetrics(step, kept, logged_at))
        return new


# The tracker's run, remembered in the run folder


def remembered(folder: Path, tracker: str) -> dict[str, Any]:
    """What `remember` wrote; empty for a new run."""
    try:
        return read_json(folder / f"{tracker}.json", dict[str, Any])
    except (OSError, ValueError):
        return {}


def remember(folder: Path, tracker: str, **facts: Any) -> None:
    """Keep the tracker's run id beside the checkpoints, for whoever resumes the run."""
    write_atomically(folder / f"{tracker}.json", json.dumps(facts, indent=1) + "\n")
