"""Saves on their way to the disk: written one at a time, in a thread beside training.

With an interval, saves that come too soon wait in memory, and a newer one takes the place of an
older one, so training never waits for the disk. At most two wait: the newest and the best.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.snapshot import Capture
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.errors import CheckpointError

_LOOK_S = 0.1


class Save:
    """One captured state on its way to the disk.

    Until it has ended, use only `done`, `wait` and `retry`.
    """

    def __init__(
        self, store: CheckpointStore, captured: Capture, best: bool = False, writes: bool = True
    ) -> None:
        self.store = store
        self.captured = captured
        self.best = best
        self.writes = writes  # else this rank adds its shard to what another one writes
        self.step = captured.step
        self.path = store.path_of(captured.step)
        self.problem: str | None = None
        self.warning: str | None = None
        self.write_s = 0.0
        self.waited_s = 0.0  # for the save before this one
        self.host_s = 0.0  # until training continued, and also in saves that this one replaced
        self.reported = False
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> float:
        """Return when it is written, has failed or was replaced; the seconds that took."""
        begun = time.perf_counter()
        self._ended.wait()
        return time.perf_counter() - begun

    def hurry(self) -> None:
        """Wait no longer than needed for the files of other ranks, which may be gone."""
        if self.captured.shard is not None:
            self.captured.shard.hurry = True

    def retry(self, staged: Path | None = None) -> None:
        """Write the same state once more, here and now. It is still in the buffer."""
        if self.captured.shard is not None and staged is not None:
            self.captured.shard.staged = staged
        self.problem = None
        self.reported = False
        self.write()

    def take_place_of(self, older: Save) -> None:
        """`older` is not written: what it cost counts as this one's."""
        self.host_s += older.host_s
        older.end()

    @property
    def facts(self) -> dict[str, Any]:
        """What the events record."""
        copy = self.captured.copy
        return {
            "step": self.step,
            "path": str(self.path),
            "bytes": copy.nbytes,
            "stall_s": self.host_s + copy.device_s,
            "waited_s": self.waited_s,
            "write_s": self.write_s,
        }

    def end(self) -> None:
        self.captured.copy.release()
        self._ended.set()

    def write(self) -> None:
        begun = time.perf_counter()
        try:
            if self.writes:
                self.store.write(self.captured)
            else:
                self.store.write_shard(self.captured)
        except CheckpointError as error:
            self.problem = str(error)
        except BaseException as error:
            self.problem = (
                f"could not save step {self.step} in {self.store.folder}: "
                f"{type(error).__name__}: {error}; earlier checkpoints are untouched"
            )
        self.write_s = time.perf_counter() - begun
        if self.problem is not None or not self.writes:
            return
        # The checkpoint is safe now, whatever happens while the old ones are tidied up.
        try:
            self.store.keep(self.path, self.best)
        except Exception as error:
            self.warning = (
                f"step {self.step} is saved, but `best` or old checkpoints in {self.store.folder} "
                f"could not be updated ({error}); the next save tries again"
            )


class WriteQueue:
    """Writes saves in the order in which they come, none sooner than `interval_s` after the one
    before began. The thread ends when nothing waits, and Python does not exit before that."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._best: Save | None = None  # waits; always older than the newest
        self._newest: Save | None = None
        self._ended: list[Save] = []
        self._due = -float("inf")  # when the next one may begin
        self._hurried = False

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to give."""
        return bool(self._ended)

    def take_ended(self) -> list[Save]:
        """The saves that were written or have failed since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def put(self, save: Save) -> None:
        """Write `save` when its turn comes. It takes the place of an older one that waits, unless
        that is the best and this is not."""
        with self._changed:
            if save.captured.shard is not None or not save.captured.copy.small:
                # Other ranks wait for it, or the next one for its memory.
                self._hurried = True
                self._changed.notify_all()
            if self._newest is not None:
                save.take_place_of(self._newest)
            if save.best and self._best is not None:
                save.take_place_of(self._best)
            self._best, self._newest = (save, None) if save.best else (self._best, save)
            if self._thread is not None:
                return
            thread = self._thread = threading.Thread(target=self._work, name="checkpoint-writer")
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._work()

    def finish(self) -> float:
        """Return when everything is written or has failed; the seconds that took."""
        if self._thread is None:
            return 0.0
        begun = time.perf_counter()
        with self._changed:
            while self._thread is not None and self._thread.is_alive():
                self._hurried = True
                self._changed.notify_all()
                self._changed.wait(_LOOK_S)
        return time.perf_counter() - begun

    def forget(self, which: Callable[[Save], bool]) -> None:
        """Drop those that wait and must not be written."""
        with self._changed:
            for save in (self._best, self._newest):
                if save is not None and which(save):
                    save.end()
                    self._best = None if save is self._best else self._best
                    self._newest = None if save is self._newest else self._newest

    def _work(self) -> None:
        while True:
            with self._changed:
                save = self._next()
                if save is None:
                    self._thread, self._hurried = None, False
                    self._changed.notify_all()
                    return
            save.write()
            with self._changed:
                self._ended.append(save)
                save.end()

    def _next(self) -> Save | None:
        """Take the one whose turn it is, when it is; None if there is none."""
        while True:
            save = self._best or self._newest
            left = self._due - time.monotonic()
            if save is None or left <= 0 or self._hurried or _is_exiting():
                break
            self._changed.wait(min(left, _LOOK_S))
        if save is None:
            return None
        self._best, self._newest = (None, self._newest if save is self._best else None)
        if self._newest is None:  # else it is written right after the best one
            self._due = time.monotonic() + self.interval_s
        return save


def _is_exiting() -> bool:
    return not threading.main_thread().is_alive()
