"""Saves one state at a time beside training, and tells all ranks what became of it."""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.monitoring.events import StructuredLogger
from multi_gpu_training.reliability.checkpoint import CheckpointStore
from multi_gpu_training.reliability.disks import Disks, one_disk
from multi_gpu_training.reliability.host_copy import HostBuffer
from multi_gpu_training.reliability.saving import Save
from multi_gpu_training.reliability.snapshot import Snapshot, capture


class Saver:
    """Every rank has one; the main rank's copies and writes, and so does one rank on every
    further disk.

    `on_saved` is called on the main rank, in the main thread, once the files are safe.
    """

    def __init__(
        self,
        config: MultiGPUConfig,
        placement: Placement,
        logger: StructuredLogger,
        store: CheckpointStore,
        disks: Disks | None = None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.logger = logger
        self.store = store
        self.disks = disks or one_disk(placement)
        self.on_saved: Callable[[Save], None] = lambda save: None
        self.buffer = HostBuffer(placement.device)
        self.current: Save | None = None  # the last one, on the main rank
        self._stops = config.on_save_failure == "stop"
        self._unsettled = False  # alike on all ranks: what became of it was not told yet
        self._interrupted = False
        # A script that ends without `finish`, or dies: what was begun is written to the end.
        self._at_exit = functools.partial(_drain, weakref.ref(self))
        atexit.register(self._at_exit)

    def save(self, take: Callable[[], Snapshot], best: bool = False, wait: bool = True) -> Path:
        """Save the state that `take` gives; the path it has, or will have. Collective.

        With `wait` it is safe on the disk when this returns. Without, training may go on as soon
        as the state is copied to the host, and what became of it is told by the next `save` or
        by `settle`. A save waits for the one before: one at a time.
        """
        before, waited_s = self._end_of_last()
        begun = time.perf_counter()
        snapshot = take()
        save, now = self._capture(snapshot, best)
        before, now = self._agreed([before, now])
        self._unsettled = False
        if before and self._stops:
            raise CheckpointError(before)
        if now:
            raise CheckpointError(now)
        self._unsettled, self.current = True, save
        if save is not None:
            save.waited_s, save.host_s = waited_s, time.perf_counter() - begun
            save.start()
        if wait:
            self._settle()
        return self.store.path_of(snapshot.step)

    def poll(self) -> None:
        """Between steps: tell what became of the last save, if it has ended. Never waits."""
        if self.current is not None and not self.current.reported and self.current.done:
            stop = self._stops and self.current.problem is not None
            if stop and self.placement.group is None:
                self._settle()
            self._report()

    def settle(self) -> None:
        """Wait for a save that is being written. Collective; the end of a run.

        One that failed is tried once more, and then is an error: a run whose last state is lost
        must not look like one that is well.
        """
        if self._unsettled:
            self._settle(retry=True)

    def drain(self) -> None:
        """Let a save that is being written end, without asking the other ranks: after an error
        they may be anywhere."""
        if self.current is not None and not self._interrupted:
            self._interrupted = True  # a second Ctrl-C ends the waiting
            self.current.wait()
            self._interrupted = False
            self._report()
            self.current = None

    def wait(self) -> None:
        """Return when nothing is being written. On this rank alone."""
        if self.current is not None:
            self.current.wait()

    def close(self) -> None:
        atexit.unregister(self._at_exit)

    def _settle(self, retry: bool = False) -> None:
        problem: str | None = None
        if self.current is not None:
            self.current.wait()
            if self.current.problem and retry:
                self.current.retry()
            problem = self.current.problem
            self._report(aloud=False)
        self.current, self._unsettled = None, False
        problem = self._agreed([problem])[0]
        if problem is not None:
            raise CheckpointError(problem)

    def _agreed(self, problems: list[str | None]) -> list[str | None]:
        """The same on every rank: what went wrong on any disk."""
        if not self.disks.several:
            return list(self.placement.broadcast_json(problems))
        told = self.placement.gather_json(problems)
        found = [next((p for p in column if p), None) for column in zip(*told, strict=True)]
        if found[0] and not told[0][0]:
            self.logger.warning(f"one copy is missing: {found[0]}")
        return found

    def _end_of_last(self) -> tuple[str | None, float]:
        """On the main rank: why the last save failed, if it did, and how long it was waited for."""
        last, self.current = self.current, None
        if last is None:
            return None, 0.0
        waited_s = last.wait()
        self._report(last)
        return last.problem, waited_s

    def _capture(self, snapshot: Snapshot, best: bool) -> tuple[Save | None, str | None]:
        """On the main rank: the state in host memory, or why it cannot be saved."""
        if not self.disks.keeps:
            return None, None
        try:
            return Save(self.store, capture(snapshot, self.buffer), best), None
        except CheckpointError as error:
            return None, str(error)
        except (MemoryError, OSError, RuntimeError) as error:
            where = f"could not copy step {snapshot.step} to the host to save it"
            return None, f"{where}: {type(error).__name__}: {error}"

    def _report(self, save: Save | None = None, aloud: bool = True) -> None:
        """Say once what became of a save: on the main rank, in the main thread."""
        save = save or self.current
        if save is None or save.reported:
            return
        save.reported = True
        if save.problem is not None:
            self.logger.record("checkpoint_failed", **save.facts, problem=save.problem)
            if aloud:
                then = "Training goes on; the next save tries again"
                then = "The run stops at its next checkpoint" if self._stops else then
                self.logger.warning(f"{save.problem}. {then}")
            return
        memory = {
            "buffer_bytes": self.buffer.nbytes,
            "pinned": self.buffer.pinned,
            "allocate_s": self.buffer.allocated_s,
        }
        self.logger.record("checkpoint", **save.facts, **memory)
        if save.warning is not None:
            self.logger.warning(save.warning)
        if save.waited_s > 1.0:
            self.logger.warning(
                f"saving step {save.step} waited {save.waited_s:.1f} s for the checkpoint before "
                "it: the disk is slower than checkpoint_frequency="
                f"{self.config.checkpoint_frequency} asks for"
            )
        if self.placement.is_main:
            self.on_saved(save)


def _drain(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.drain()
