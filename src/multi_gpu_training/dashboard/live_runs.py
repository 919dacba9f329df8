"""Runs below some folders or URLs, looked at again and again, each time only at what changed.

Nothing here compares the clock of this machine with that of another: a run has gone quiet when
*this* process has seen no change of its files for a while, whatever time they carry.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from multi_gpu_training.checkpoint.run_lock import owner
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.monitoring.report.run_record import Most, RunReader, RunRecord
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_output import printable
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError
from multi_gpu_training.storage.remote_view import fetch_record, is_running

DEPTH = 4  # of run folders below a folder that is watched
MOST_RUNS = 2_000
SHOWN = Most(steps=600, samples=90, readings=90)  # what a chart can show
TELL_S = 0.3  # between partial lists while many runs are read for the first time
LONG_BYTES = 8 * 2**20  # of events, from which reading a run for the first time takes a while
QUIET_S = 60.0  # without a change, after which a run that holds no lock counts as killed
REMOTE_S = 10.0  # between looks at object storage, which runs write every 30 s or so
ENDED = ("finished", "failed", "stopped")
_INDEX = re.compile(r"(.+)/events/index-[0-9]{1,7}\.json")
Shape = tuple[object, ...]


class LiveRun:
    """One run as its folder shows it. `look` notices changes; `version` counts them.

    state: running, finished, failed, stopped, killed, quiet (no sign of life, and not long enough
    watched to call it killed) or unreadable.
    """

    def __init__(self, path: Path, name: str, url: str | None = None) -> None:
        self.path, self.name, self.url = path, printable(name), url
        self.id = hashlib.sha256((url or os.fspath(path.absolute())).encode()).hexdigest()[:12]
        self.version = 0
        self.record: RunRecord | None = None
        self.state = "quiet"
        self.problem: str | None = None
        self.remote_running = False  # what the lease of a run at a URL says
        self.changed_at: float | None = None  # by this process's clock; None: not since it looks
        self._first_look: float | None = None
        self._reader = RunReader(path, SHOWN)
        self._shape: Shape = ()

    @property
    def looked_at(self) -> bool:
        return self._first_look is not None

    def silent_s(self, now: float) -> float | None:
        """Seconds since this process saw the run write something."""
        since = self.changed_at if self.changed_at is not None else self._first_look
        return None if since is None else now - since

    def look(self, now: float) -> None:
        """Read what is new. Raises FileNotFoundError once the folder is gone."""
        shape = (_shape(self.path, self.url is None), self.remote_running)
        if shape != self._shape:
            self._read()
            if self._first_look is not None and shape[0] != self._shape[0]:
                self.changed_at = now
            self._shape = shape
            self.version += 1
        elif self.record is not None and self.record.state not in ENDED:
            self._read_lock()
        if self._first_look is None:
            self._first_look = now
        state = self._judge(now)
        if state != self.state:
            self.state = state
            self.version += 1

    def _read(self) -> None:
        try:
            self.record, self.problem = self._reader.read(), None
        except MultiGPUError as error:
            if not self.path.is_dir():
                raise FileNotFoundError(self.path) from None
            self.record, self.problem = None, str(error).removeprefix("mgt report: ")

    def _read_lock(self) -> None:
        """A run that is killed changes no file: only its lock is free."""
        assert self.record is not None
        held = owner(self.path) is not None
        if held != (self.record.state == "running"):
            self._read()

    def _judge(self, now: float) -> str:
        if self.record is None:
            return "unreadable"
        told = self.record.state
        if told == "running" or told in ENDED:
            return "running" if self.remote_running else told
        if self.remote_running:
            return "running"
        # No end is recorded and nobody holds the lock. On this machine, that is a dead process.
        if self.url is None and self.record.environment.get("host") == socket.gethostname():
            return "killed"
        silent = self.silent_s(now)
        if silent is None or silent < QUIET_S:
            return "quiet" if self.changed_at is None else "running"
        return "killed"


class LiveRuns:
    """All runs below `roots`. `poll` looks once; `watch` does so in a thread until `close`.

    `version` grows with every change. `reading`: how many runs were found but not read yet; None
    before the folders were looked at.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = [root for root in roots if not is_url(root)]
        self.urls = [root.rstrip("/") for root in roots if is_url(root)]
        self.runs: dict[str, LiveRun] = {}
        self.problems: list[str] = []
        self.version = 0
        self.reading: int | None = None
        self._remote: dict[str, LiveRun] = {}
        self._remote_problems: list[str] = []
        self._remote_seen = not self.urls
        self._turn = threading.Lock()
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []

    def poll(self, now: float | None = None) -> None:
        """Find runs, and read what they have written since the last time."""
        now = time.monotonic() if now is None else now
        with self._turn:
            before = {run.id: run.version for run in self.runs.values()}
            known = {run.id: run for run in self.runs.values()}
            there: dict[str, LiveRun] = {}
            for run in (*self._local(known), *self._remote.values()):
                if len(there) < MOST_RUNS:
                    there[run.id] = run
            # Short ones first: a list that waits for the longest run looks empty for seconds.
            sizes = {key: _bytes_of_events(r) for key, r in there.items() if key not in known}
            told, was_reading = time.monotonic(), self.reading
            for run in sorted(there.values(), key=lambda run: sizes.get(run.id, -1)):
                long = sizes.get(run.id, 0) > LONG_BYTES
                if sizes and (long or time.monotonic() - told > TELL_S):
                    waiting = {key for key in sizes if key in there and not there[key].looked_at}
                    self.runs = {one.id: one for one in there.values() if one.id not in waiting}
                    self.reading = len(waiting)
                    self.version += 1
                    told = time.monotonic()
                try:
                    run.look(now)
                except OSError as error:
                    if isinstance(error, FileNotFoundError) and run.url is None:
                        del there[run.id]  # deleted while the page is open
                    else:
                        run.record, run.problem = None, f"cannot be read: {error.strerror or error}"
            self.runs, self.reading = there, 0 if self._remote_seen else None
            problems = [*self._missing(), *self._remote_problems]
            if {run.id: run.version for run in there.values()} != before or (
                (problems, self.reading) != (self.problems, was_reading)
            ):
                self.problems = problems
                self.version += 1

    def _missing(self) -> Iterator[str]:
        for root in self.roots:
            if not os.path.lexists(root):
                yield f"{root} is not there yet: runs appear here once one has begun"
            elif not Path(root).is_dir():
                yield f"{root} is not a folder; give one that runs are kept in"

    def _local(self, known: dict[str, LiveRun]) -> Iterator[LiveRun]:
        for root in self.roots:
            base = Path(root)
            for path in run_folders(base):
                inside = path != base
                name = path.relative_to(base).as_posix() if inside else path.name
                run = LiveRun(path, name)
                yield known.get(run.id, run)

    def poll_remote(self) -> None:
        """Download what changed at the URLs. Slow: never in the thread that polls folders."""
        found: dict[str, LiveRun] = {}
        problems = []
        for url in self.urls:
            try:
                for address in _remote_runs(url):
                    name = address.removeprefix(url).strip("/") or address.rpartition("/")[2]
                    path = fetch_record(address)
                    run = self._remote.get(address) or LiveRun(path, name, address)
                    run.remote_running = is_running(address)
                    found[address] = run
            except (StorageError, ConfigError, ValueError, OSError) as error:
                problems.append(f"{url}: {error}")
                found |= {a: r for a, r in self._remote.items() if a.startswith(url)}
        with self._turn:
            self._remote, self._remote_problems = found, problems
            self._remote_seen = True

    def watch(self, interval_s: float = 0.5) -> None:
        """Look every `interval_s` in a thread, and at URLs in another."""
        self._start("watch-runs", self.poll, interval_s)
        if self.urls:
            self._start("fetch-runs", self.poll_remote, REMOTE_S)

    def _start(self, name: str, look: Callable[[], None], interval_s: float) -> None:
        def run() -> None:
            while not self._end.is_set():
                look()
                self._end.wait(interval_s)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(5.0)


def run_folders(base: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The folders below `base`, or `base` itself, that hold events; not inside of one that does."""
    try:
        with os.scandir(base) as entries:
            inside = [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            ]
    except OSError:
        return
    if "events" in inside:
        yield base
    elif depth:
        for name in sorted(inside):
            yield from run_folders(base / name, depth - 1)


def _bytes_of_events(run: LiveRun) -> int:
    try:
        with os.scandir(run.path / "events") as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:
        return 0


def _remote_runs(url: str) -> list[str]:
    """The addresses of runs at a URL: of the run that it names, or of all below it."""
    names = RemoteFolder(url).files()
    if any(name.startswith("events/index-") for name in names):
        return [url]
    return sorted({f"{url}/{found[1]}" for name in names if (found := _INDEX.fullmatch(name))})


def _shape(path: Path, by_inode: bool) -> Shape:
    """What differs once anything that is shown has changed. A downloaded copy has new inodes every
    time: `by_inode` is False."""
    files = []
    with os.scandir(path / "events") as entries:
        for entry in entries:
            facts = entry.stat(follow_symlinks=False)
            files.append((entry.name, facts.st_ino if by_inode else 0, facts.st_size))
    for name in ("config.yaml", "environment.json", "forecast.json", "profile", "memory"):
        try:
            facts = (path / name).lstat()
            files.append((name, facts.st_size, facts.st_mtime_ns if by_inode else 0))
        except OSError:
            continue
    return tuple(sorted(files))
