"""A checkpoint on its way to the disk, in a thread beside training."""

from __future__ import annotations

import threading
import time

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.reliability.checkpoint import CheckpointStore
from multi_gpu_training.reliability.snapshot import Capture


class Save:
    """Writes one captured state. Everything but `done`, `wait` and `retry` is for afterwards.

    The thread is no daemon: Python does not exit before it has ended.
    """

    def __init__(self, store: CheckpointStore, captured: Capture, best: bool = False) -> None:
        self.store = store
        self.captured = captured
        self.best = best
        self.step = captured.step
        self.path = store.path_of(captured.step)
        self.problem: str | None = None
        self.warning: str | None = None
        self.write_s = 0.0
        self.waited_s = 0.0  # for the one before
        self.host_s = 0.0  # until training went on
        self.reported = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer")

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be had: the interpreter is shutting down
            self._run()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> float:
        """Return when it is written or has failed; the seconds that took."""
        begun = time.perf_counter()
        if self._thread.ident is not None:
            self._thread.join()
        return time.perf_counter() - begun

    def retry(self) -> None:
        """Write the same state once more, here and now. It is still in the buffer."""
        self.problem = None
        self.reported = False
        self._run()

    @property
    def facts(self) -> dict[str, object]:
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

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            self.store.write(self.captured)
        except CheckpointError as error:
            self.problem = str(error)
        except BaseException as error:
            self.problem = (
                f"could not save step {self.step} in {self.store.folder}: "
                f"{type(error).__name__}: {error}; earlier checkpoints are untouched"
            )
        self.write_s = time.perf_counter() - begun
        if self.problem is None:
            self._tidy()

    def _tidy(self) -> None:
        """Name the best and drop the old: the checkpoint is safe whatever happens here."""
        try:
            self.store.keep(self.path, self.best)
        except Exception as error:
            self.warning = (
                f"step {self.step} is saved, but `best` or old checkpoints in {self.store.folder} "
                f"could not be updated ({error}); the next save tries again"
            )
