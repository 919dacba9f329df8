"""Copies a run to object storage while it trains. Nothing here ever stops or slows the training.

Two threads: one sends checkpoints, the newest first; the other keeps the lease, and sends events
and small files every `upload_every` seconds, also while a large checkpoint is on its way. A failure
is reported once, counted, and tried again; what is on the disk stays there until it is uploaded or
retention drops it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import read_bytes
from multi_gpu_training.storage.event_mirror import EventMirror
from multi_gpu_training.storage.lease import BEAT_S, Lease, LeaseLost, take_lease
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError
from multi_gpu_training.storage.remote_run import RemoteRun, uploaded_name
from multi_gpu_training.training.callbacks import RunLog

LONGEST_PAUSE_S = 60.0
LARGEST_FILE = 32 * 2**20  # of those beside checkpoints and events


@dataclass(frozen=True)
class UploadPlan:
    """What is uploaded, where to, and what is kept there."""

    folder: Path
    url: str
    identity: Identity
    keep_last: int = 3
    keep_best: int = 1
    every_s: float = 30.0
    whole: bool = True  # False on further machines: the events of their ranks only


class Uploader:
    """The uploads of one run folder. `start` it, `wake` it after a save, `close` it at the end.

    lease: the right to write; None where storage could not be reached when ranks were restarted,
    and then it is taken as soon as it can be.
    """

    def __init__(self, plan: UploadPlan, lease: Lease | None, log: RunLog) -> None:
        self.plan = plan
        self._lease = lease
        self._log = log
        # One connection for both threads: making one takes a second of the interpreter's time.
        self._remote = RemoteFolder(plan.url) if lease is None else lease.folder
        self._run = RemoteRun(self._remote)
        self._mirror = EventMirror(self._remote, plan.folder / "events", plan.identity.rank)
        self._sent: dict[str, tuple[int, int]] = {}  # small files: time of change and size
        self._there: set[str] | None = None  # names of complete checkpoints there
        self._dropped: set[str] = set()  # by retention: not to be sent again
        self._lineage: list[dict[str, int]] | None = None
        self._outage = Outage(plan, log)
        self._lost = False
        self._news, self._end = threading.Event(), threading.Event()
        self._deadline = float("inf")
        self._threads = [threading.Thread(target=self._watch, name="run-uploader", daemon=True)]
        if plan.whole:
            send = threading.Thread(target=self._send, name="checkpoint-uploader", daemon=True)
            self._threads.append(send)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There is a new checkpoint."""
        self._news.set()

    def close(self, wait_s: float, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait for the last uploads, at most `wait_s` seconds, and say what is missing then."""
        begun = time.monotonic()
        self._deadline = begun + wait_s
        self._end.set()
        self._news.set()
        told = False
        for thread in reversed(self._threads):
            while thread.is_alive() and time.monotonic() < self._deadline:
                thread.join(0.05)
                if not told and time.monotonic() - begun > 2.0:
                    told = True
                    say(f"uploading the rest to {self.plan.url}, for at most {wait_s:g} s")
        if self._lost:
            return
        missing = self.missing()
        if any(thread.is_alive() for thread in self._threads) or self._outage.going_on:
            missing.append("the last events and files")
        elif self._lease is not None:
            with contextlib.suppress(StorageError):
                self._lease.release()
        if missing:
            failed = f" ({self._outage.failures} attempts failed)" * bool(self._outage.failures)
            self._log.warning(
                f"not uploaded to {self.plan.url} within {wait_s:g} s{failed}: "
                f"{', '.join(missing)}. Everything is in {self.plan.folder}; upload it with: "
                f"mgt checkpoints upload {self.plan.folder}"
            )

    def missing(self) -> list[str]:
        """The checkpoints on this disk that are not known to be there."""
        return [path.name for path in self._pending()] if self.plan.whole else []

    # Checkpoints

    def _send(self) -> None:
        self._repeat(self._send_checkpoints, self.plan.every_s, self._news)

    def _send_checkpoints(self) -> None:
        lease = self._lease
        if lease is None:
            if self._end.is_set():
                raise StorageError(f"{self.plan.url} could not be reached yet")
            return
        if self._there is None:
            self._there = {c.name for c in self._run.checkpoints() if c.problem is None}
            with contextlib.suppress(Exception):  # not every storage has them, nor allows it
                self._remote.drop_unfinished()
        entries = CheckpointStore(self.plan.folder / "checkpoints").lineage.entries()
        if entries != self._lineage:
            # Before the checkpoints of a new attempt: what it abandoned must not look newest.
            lease.check()
            self._run.record_lineage(entries, lease)
            self._lineage = entries
        passed_over: set[Path] = set()
        while pending := [path for path in self._pending() if path not in passed_over]:
            path, begun = pending[0], time.monotonic()
            name, size = uploaded_name(path), self._run.upload(pending[0], lease)
            if size is None or name is None:
                passed_over.add(path)  # dropped or replaced meanwhile
                continue
            self._there.add(name)
            took = time.monotonic() - begun
            self._log.record(
                "upload", path=f"{self.plan.url}/checkpoints/{name}", bytes=size, upload_s=took
            )
            self._mark_best()
            lease.check()
            dropped = {*self._run.prune(entries, self.plan.keep_last, self.plan.keep_best)}
            self._there -= dropped
            self._dropped |= dropped

    def _pending(self) -> list[Path]:
        """Checkpoints to upload: the newest, then the best, then older ones."""
        store = CheckpointStore(self.plan.folder / "checkpoints")
        there = (self._there or set()) | self._dropped
        found = [path for path in store.folders() if store.on_timeline(path)]
        best = (store.folder / "best").resolve().name
        found = found[:1] + sorted(found[1:], key=lambda path: path.name != best)
        names = {path: uploaded_name(path) for path in found}
        return [path for path, name in names.items() if name is not None and name not in there]

    def _mark_best(self) -> None:
        link = self.plan.folder / "checkpoints" / "best"
        name = uploaded_name(link.parent / link.resolve().name) if link.exists() else None
        if name is not None and name in (self._there or ()) and name != self._run.best():
            self._run.mark_best(name)

    # Events and small files

    def _watch(self) -> None:
        every = min(BEAT_S, self.plan.every_s) if self.plan.whole else self.plan.every_s
        self._next_files = 0.0
        self._repeat(self._look_after, every, self._end)

    def _look_after(self) -> None:
        if self.plan.whole:
            if self._lease is None:
                self._lease = take_lease(self._remote, self.plan.identity)
                self._news.set()
            self._lease.renew()
        if time.monotonic() < self._next_files and not self._end.is_set():
            return
        self._mirror.upload()
        if self.plan.whole:
            self._send_files()
        self._next_files = time.monotonic() + self.plan.every_s

    def _send_files(self) -> None:
        """What lies in the run's folder itself: config, environment, report, metrics."""
        for path in sorted(self.plan.folder.iterdir()):
            try:
                found = path.lstat()
                state = found.st_mtime_ns, found.st_size
                if path.name.startswith(".") or self._sent.get(path.name) == state:
                    continue
                data = read_bytes(path, LARGEST_FILE)
            except (OSError, ValueError):  # a folder, a link, too large
                continue
            self._remote.write(path.name, data)
            self._sent[path.name] = state

    # Both

    def _repeat(self, work: Callable[[], None], every_s: float, news: threading.Event) -> None:
        """Do the work again and again, and once more after the end, whatever it raises."""
        failures = 0
        while not self._lost:
            ending = self._end.is_set()
            if news is not self._end:
                news.clear()
            try:
                work()
                if failures:
                    failures = 0
                    self._outage.over()
                pause = every_s
                if ending:
                    return
            except (LeaseLost, ConfigError) as error:
                self._give_up(str(error).removeprefix("This run cannot start:\n  - "))
                return
            except Exception as error:
                failures += 1
                self._outage.failed(error)
                if not getattr(error, "away", False):
                    with contextlib.suppress(Exception):  # the credentials may have changed
                        self._remote.reopen()
                # Half of it at random: a thousand ranks must not come back at the same moment.
                pause = min(LONGEST_PAUSE_S, 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)
                if self._end.is_set():
                    pause = min(pause, 2.0)
                    if time.monotonic() + pause > self._deadline:
                        return
            if self._end.is_set() and not failures:
                continue  # it ended meanwhile: once more, for what came last
            (news if not failures else self._end).wait(pause)

    def _give_up(self, why: str) -> None:
        self._lost = True
        self._log.warning(
            f"{why}: nothing more is uploaded from here, so that the two do not mix. This training "
            f"continues in {self.plan.folder} only; stop it unless you want both"
        )


class Outage:
    """Says once that uploads fail, and once that they work again."""

    def __init__(self, plan: UploadPlan, log: RunLog) -> None:
        self.failures = 0
        self.going_on = False
        self._plan = plan
        self._log = log
        self._turn = threading.Lock()
        self._count = 0

    def failed(self, error: Exception) -> None:
        with self._turn:
            self.failures += 1
            self._count += 1
            text = f"{type(error).__name__}: {error}"
            self._log.record("upload_failed", problem=text, failures=self.failures)
            if self.going_on:
                return
            self.going_on = True
        self._log.warning(
            f"cannot upload to {self._plan.url} ({error}). Training continues and keeps everything "
            f"in {self._plan.folder}; uploads are tried again"
        )

    def over(self) -> None:
        with self._turn:
            if not self.going_on:
                return
            self.going_on, count, self._count = False, self._count, 0
        self._log.info(f"uploads to {self._plan.url} work again, after {count} failed attempts")


def upload_now(plan: UploadPlan, say: Callable[[str], None], wait_s: float) -> list[str]:
    """Upload what a run folder holds and its storage lacks; return what could not be uploaded."""
    lease = take_lease(RemoteFolder(plan.url), plan.identity, say)
    uploader = Uploader(plan, lease, _Said(say))
    uploader.start()
    uploader.close(wait_s, say)
    return uploader.missing()


class _Said:
    """A log that shows its lines and records nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def info(self, message: str, **fields: Any) -> None:
        self._say(message)

    def warning(self, message: str, **fields: Any) -> None:
        self._say(f"warning: {message}")

    def error(self, message: str, **fields: Any) -> None:
        self._say(f"error: {message}")

    def record(self, event: str, **fields: Any) -> None:
        """Nothing."""
