"""The checkpoints of a run: written one at a time beside training, found again, and loaded."""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.resume import (
    RunState,
    Scope,
    Stateful,
    TrainingState,
    locate,
    read_together,
)
from multi_gpu_training.checkpoint.shards import ShardWriting
from multi_gpu_training.checkpoint.signature import read_signer
from multi_gpu_training.checkpoint.snapshot import Snapshot, capture
from multi_gpu_training.checkpoint.state_buffers import StateBuffers
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.checkpoint.sync import CheckpointHosts, one_disk
from multi_gpu_training.checkpoint.write_queue import Save, WriteQueue
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.training.callbacks import RunLog

_GOES_ON = "Training continues; the next save tries again"
_GPU_INTERVAL_S = 1.0  # an epoch on a GPU may take milliseconds, and the disk more than that


class Saver:
    """The checkpoints of one run: when one is due, what it holds, and how it gets to the disk.

    training: what is saved: step, epoch, model, optimizer, `state_dict`, `load_state_dict`.
    hosts: which ranks write; by default all ranks share one disk and rank 0 writes.
    on_saved: called on rank 0, in the main thread, once the files of a save are safe.

    Every rank has one; rank 0 copies and writes, and so does one rank on every further disk. A
    state that is split over the ranks is written by all of them, each its part.
    """

    def __init__(
        self,
        config: MultiGPUConfig,
        placement: Placement,
        training: TrainingState,
        log: RunLog,
        folder: Path,
        hosts: CheckpointHosts | None = None,
        on_saved: Callable[[Save], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.placement = placement.world
        self.training = training
        self.log = log
        self.hosts = hosts or one_disk(placement)
        self.store = CheckpointStore(
            folder,
            config.keep_last,
            keep_best=config.keep_best,
            signer=read_signer(config.signing_key_file),
        )
        self.run_state = RunState(training, placement, self.hosts, config.plain)
        interval_s = config.checkpoint_interval_s
        if interval_s is None:
            interval_s = _GPU_INTERVAL_S if placement.device.type == "cuda" else 0.0
        # One copy per disk, or part of a state per rank, is written while all ranks wait for it.
        self._queue = WriteQueue(0.0 if self.hosts.several else interval_s)
        self.buffers = StateBuffers(
            placement.device, self._queue.interval_s > 0, self._wait_for_writing
        )
        self.current: Save | None = None  # the last one, on ranks that write
        self._failed: str | None = None  # why a save failed, until all ranks know
        self._waited_s = 0.0  # in the `save` under way, for those before it
        self._on_saved = on_saved
        self._held: int | None = None  # the step of the newest checkpoint, written or on its way
        # Step, facts, best and problem of the newest one where its state could not be copied.
        self._missed: tuple[int, dict[str, Any], bool, str] | None = None
        self._stops = config.on_save_failure == "stop"
        self._unsettled = False  # equal on all ranks: they have not agreed yet on how it went
        self._interrupted = False
        self._repeats = False  # another rank writes the same rows
        self._split = False  # the newest state is split over the ranks; equal on all of them
        self._ahead: int | None = None  # the step that `copy_ahead` was called for
        # A script that ends without `finish`, or dies: finish writing what was begun.
        self._at_exit = functools.partial(_drain, weakref.ref(self))
        atexit.register(self._at_exit)

    def register(self, name: str, item: Stateful, scope: Scope = "replicated") -> None:
        """Save and restore `item` with the run; see `RunState`."""
        self.run_state.register(name, item, scope)

    # Saving

    def due(self, step: int) -> bool:
        return self.config.enable_fault_tolerance and step % self.config.checkpoint_frequency == 0

    def holds(self, step: int) -> bool:
        """Whether this step is the newest one that is saved or being written."""
        return self._held == step

    def save(
        self, facts: dict[str, Any] | None = None, best: bool = False, wait: bool = True
    ) -> Path:
        """Save the state as it is now; return the path it has, or will have. Collective.

        With `wait` it is safe on the disk when this returns. Without, training may continue as
        soon as the state is copied, and `poll`, the next `save` or `settle` tells how it went.
        With `checkpoint_interval_s` a newer save may take its place before it is written, but
        only the best that of the best. With 0, a save waits for the one before.
        """
        self._waited_s = 0.0
        if wait or not self._queue.interval_s:
            self._wait_for_writing()
        self.current = None
        self._collect()
        if self._ahead != self.training.step:
            self.buffers.forget_ahead()  # it is of another step
        self._ahead = None
        begun, waited_s = time.perf_counter(), self._waited_s
        facts = facts or {}
        snapshot = self.run_state.snapshot(facts)
        shard = self._staging(snapshot)
        if shard is not None:
            self._wait_for_writing()
        save, now, never = self._capture(snapshot, best, shard)
        host_s = time.perf_counter() - begun - (self._waited_s - waited_s)
        # One exchange for all three: ranks must raise, or go on, together.
        before, now, never = self._agreed([self._failed, now, never])
        self._unsettled, self._failed = False, None
        if before and self._stops:
            if save is not None:
                save.end()
            raise CheckpointError(before)
        if never or (now and (self._stops or wait)):
            raise CheckpointError(never or now)
        path = self.store.path_of(snapshot.step)
        self._missed = None
        if now:
            self._missed = snapshot.step, facts, best, now
            if self.hosts.writes and save is None:
                failed = {"step": snapshot.step, "path": str(path), "problem": now}
                self.log.record("checkpoint_failed", **failed)
            self.log.warning(f"{now}. {_GOES_ON}")
        else:
            self._held = snapshot.step
        self._unsettled, self.current = True, save
        if save is not None:
            save.waited_s, save.host_s = self._waited_s, host_s
            self._queue.put(save)
        if wait:
            self._settle()
        return path

    def copy_ahead(self) -> None:
        """Copy the state, because a `save` of this step is to follow: as soon as the device is done
        with the step, and not only when the host has heard of it. On this rank alone."""
        files = self.run_state.read_ahead()
        if files is not None and self.hosts.writes:
            self.buffers.copy_ahead(files)
            self._ahead = self.training.step

    def poll(self) -> None:
        """Between steps: report saves that have ended. Never waits."""
        if self._queue.has_ended:
            # Several ranks raise together, in the next `save`; here each looks at another time.
            stops = self._stops and self.placement.group is None
            self._collect(aloud=not stops)
            if stops and self._failed is not None:
                problem, self._failed = self._failed, None
                self.current, self._unsettled = None, False
                raise CheckpointError(problem)

    def settle(self) -> None:
        """Wait for a save that is being written. Collective; called at the end of a run.

        One that failed is tried once more and then is an error: a run whose last state is lost
        must not look like one that is well.
        """
        if self._unsettled:
            self._settle(retry=True)
        if self._missed is not None:
            step, facts, best, problem = self._missed
            if step != self.training.step:
                raise CheckpointError(problem)
            self.save(facts, best)

    def drain(self) -> None:
        """Finish a save that is being written, without the other ranks.

        After an error they may be anywhere.
        """
        if not self._interrupted:
            self._interrupted = True  # a second Ctrl-C ends the waiting
            if self.current is not None:
                self.current.hurry()
            self._queue.finish()
            self._interrupted = False
            self._collect()
            self.current = None

    def wait(self) -> None:
        """Return when nothing is being written or waits for it. On this rank alone."""
        self._queue.finish()

    def close(self) -> None:
        atexit.unregister(self._at_exit)

    # Keeping

    def protect(self, step: int | None) -> None:
        """Keep the newest checkpoint at or before `step`, whatever `keep_last` says; None: no
        longer. Counts from the next save on."""
        self.store.protected_step = step

    def discard_after(self, step: int) -> None:
        """Remove what was saved after `step`, on the disk or on its way: the run has found that it
        is wrong. `best` names the best one that is left. Every rank must call it."""
        self._queue.forget(lambda save: save.step > step)
        self._queue.finish()
        self._collect(up_to=step)
        if self.current is not None and self.current.step > step:
            self.current = None
        if self._held is not None and self._held > step:
            self._held = None
        if self._missed is not None and self._missed[0] > step:
            self._missed = None
        if self.hosts.writes:
            self.store.discard_after(step)

    def _settle(self, retry: bool = False) -> None:
        self._queue.finish()
        last, lost = self.current, self._failed if self._stops else None
        for save in self._queue.take_ended():
            if save is last:
                continue
            is_best = retry and save.best and not (last is not None and last.best)
            if is_best and save.problem is not None:
                save.retry()
            if is_best or self._stops:
                lost = lost or save.problem
            self._report(save)
        problem = None if last is None else last.problem
        if self._split and retry and self._agreed([problem])[0] and last is not None:
            # All of them once more: what the others wrote went with the folder.
            staged = self.placement.broadcast_json(str(self.store.staged_name(last.path)))
            last.retry(Path(staged))
        elif problem and retry and last is not None and not self._split:
            last.retry()
        if last is not None:
            problem = last.problem
            self._report(last, aloud=False)
        self.current, self._unsettled, self._failed = None, False, None
        problem = self._agreed([problem or lost])[0]
        if problem is not None:
            raise CheckpointError(problem)

    def _collect(self, aloud: bool = True, up_to: int | None = None) -> None:
        """Report the saves that have ended, without those after the step `up_to`."""
        for save in self._queue.take_ended():
            if up_to is None or save.step <= up_to:
                self._failed = save.problem or self._failed
                self._report(save, aloud)

    def _wait_for_writing(self) -> None:
        self._waited_s += self._queue.finish()

    def _agreed(self, problems: list[str | None]) -> list[str | None]:
        """Tell every rank what went wrong on any disk."""
        # Only rank 0 wrote, so only rank 0 can know.
        if not self.hosts.several and not self._split:
            return list(self.placement.broadcast_json(problems))
        told = self.placement.gather_json(problems)
        found = [next((p for p in column if p), None) for column in zip(*told, strict=True)]
        if found[0] and not told[0][0]:
            self.log.warning(f"one copy is missing: {found[0]}")
        return found

    def _staging(self, snapshot: Snapshot) -> ShardWriting | None:
        """Where all ranks write a state that is split over them. Collective."""
        self._split = snapshot.split
        if not self._split:
            return None
        final = self.store.path_of(snapshot.step)
        staged = self.placement.broadcast_json(str(self.store.staged_name(final)))
        rank, ranks, self._repeats = snapshot.place
        return ShardWriting(Path(staged), rank, ranks)

    def _capture(
        self, snapshot: Snapshot, best: bool, shard: ShardWriting | None
    ) -> tuple[Save | None, str | None, str | None]:
        """On ranks that write: copy the state to host memory, or say why that failed now, or why
        it will fail every time."""
        writes = self.hosts.writes
        if not writes and (shard is None or self._repeats):
            return None, None, None
        try:
            captured = capture(snapshot, self.buffers, shard, writes)
            return Save(self.store, captured, best, writes), None, None
        except CheckpointError as error:
            return None, None, str(error)
        except (MemoryError, OSError, RuntimeError) as error:
            where = f"could not copy step {snapshot.step} to the host to save it"
            return None, f"{where}: {type(error).__name__}: {error}", None

    def _report(self, save: Save, aloud: bool = True) -> None:
        """Say once how a save went, in the main thread."""
        if save.reported:
            return
        save.reported = True
        if save.problem is not None:
            self.log.record("checkpoint_failed", **save.facts, problem=save.problem)
            if aloud:
                then = "The run stops at its next checkpoint" if self._stops else _GOES_ON
                self.log.warning(f"{save.problem}. {then}")
            return
        memory = {
            "buffer_bytes": self.buffers.nbytes,
            "pinned": self.buffers.host.pinned,
            "allocate_s": self.buffers.host.allocated_s,
        }
        self.log.record("checkpoint", **save.facts, **memory)
        if save.warning is not None:
            self.log.warning(save.warning)
        if save.waited_s > 1.0:
            self.log.warning(
                f"saving step {save.step} waited {save.waited_s:.1f} s for the checkpoint before "
                "it: the disk is slower than checkpoint_frequency="
                f"{self.config.checkpoint_frequency} asks for"
            )
        if self.placement.is_main:
            self._on_saved(save)

    # Coming back

    def find(self, where: str | None) -> Path | None:
        """Find the checkpoint to resume from, if any. Collective.

        `where` is a path, or "auto" for this run's newest intact one. Ranks that were restarted
        take the newest, whatever was asked for first.
        """
        # Before what was asked for: `resume=PATH` would throw away what came since.
        path = self._locate("auto") if self.placement.identity.attempt else None
        if path is None and where is not None:
            path = self._locate(where)
            if path is None:
                self.log.info("resume: no checkpoint yet, starting from the beginning")
        return path

    def refuse_to_overwrite(self) -> None:
        """Raise an error if an earlier run of the same name has saved something. Collective."""
        taken = self.hosts.writes and self.hosts.known and any(self.store.folder.glob("step-*"))
        if any(self.placement.gather_json(taken)):
            raise ConfigError(
                f"the run {self.store.folder.parent} already has checkpoints; add --resume auto to "
                "continue it, or choose another --run-name",
                code="MGT106",
            )

    def resume(self, path: Path) -> None:
        """Load a checkpoint into everything that was saved. Collective."""
        self.wait()  # nothing of this timeline may be written once another one has begun
        self._ahead = None
        snapshot = read_together(path, self.placement, self.store)
        note = self.run_state.restore(snapshot, str(path))
        if note is not None:
            self.log.info(note)
        if self.hosts.writes:
            self.store.branch(snapshot.step)
        self.placement.barrier()
        self._held = snapshot.step
        said = {"level": "info", "message": f"resumed from {path}"}  # setup.py tells people
        self.log.record("log", **said, step=snapshot.step, epoch=snapshot.epoch)

    def _locate(self, where: str) -> Path | None:
        self.wait()  # what is being written may be the newest
        return locate(where, self.placement, self.hosts, self.store, self.log)


def _drain(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.drain()
