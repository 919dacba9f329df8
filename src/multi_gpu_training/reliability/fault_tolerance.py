"""Keeps a run's state safe while it trains, and brings it back."""

from __future__ import annotations

import atexit
import copy
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.monitoring.log import StructuredLogger
from multi_gpu_training.reliability.checkpoint import CheckpointStore
from multi_gpu_training.reliability.codec import from_text, to_text
from multi_gpu_training.reliability.host_copy import HostBuffer
from multi_gpu_training.reliability.saving import Save
from multi_gpu_training.reliability.snapshot import Snapshot, capture, load
from multi_gpu_training.reliability.state import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    random_state,
    set_random_state,
)
from multi_gpu_training.training.trainer import MultiGPUTrainer

Scope = Literal["replicated", "per_rank"]


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class FaultToleranceManager:
    """Checkpoints of one run: when they are due, what is in them, where to go on.

    Objects registered with `register` are saved and restored with the model: `replicated` ones
    are alike on every rank and saved once, `per_rank` ones are saved for each rank and restored
    only on the same number of ranks.
    """

    def __init__(
        self,
        config: MultiGPUConfig,
        placement: Placement,
        trainer: MultiGPUTrainer,
        logger: StructuredLogger,
        folder: Path,
    ) -> None:
        self.config = config
        self.placement = placement
        self.trainer = trainer
        self.logger = logger
        self.store = CheckpointStore(folder, config.keep_last, keep_best=config.keep_best)
        self.on_saved: Callable[[Save], None] = lambda save: None
        self._buffer = HostBuffer(placement.device)
        self._save: Save | None = None  # the last one, on the main rank
        self._unsettled = False  # alike on all ranks: what became of it was not told yet
        self._interrupted = False
        self._registered: dict[str, tuple[Stateful, Scope]] = {}
        self._resumed: dict[str, Any] | None = None
        # A script that ends without `finish`, or dies: what was begun is written to the end.
        self._at_exit = functools.partial(_drain, weakref.ref(self))
        atexit.register(self._at_exit)

    def register(self, name: str, item: Stateful, scope: Scope = "replicated") -> None:
        if name in self._registered:
            raise CheckpointError(f"state {name!r} is registered already; choose another name")
        self._registered[name] = (item, scope)
        if self._resumed is not None:
            self._restore(name)

    def kept(self) -> Callable[[], None]:
        """What is registered, as it is now; the result puts it back. Nothing is written."""
        states = {
            name: copy.deepcopy(item.state_dict()) for name, (item, _) in self._registered.items()
        }

        def put_back() -> None:
            for name, state in states.items():
                self._registered[name][0].load_state_dict(copy.deepcopy(state))

        return put_back

    def due(self, step: int) -> bool:
        return self.config.enable_fault_tolerance and step % self.config.checkpoint_frequency == 0

    def save(
        self, facts: dict[str, Any] | None = None, best: bool = False, wait: bool = True
    ) -> Path:
        """Save the state as it is now; the path it has, or will have. Collective.

        With `wait` it is safe on the disk when this returns. Without, training may go on as soon
        as the state is copied to the host, and what became of it is told by the next `save` or
        by `settle`. A save waits for the one before: one at a time.
        """
        before, waited_s = self._end_of_last()
        begun = time.perf_counter()
        snapshot = self._snapshot(facts or {})
        save, now = self._capture(snapshot, best)
        before, now = self.placement.broadcast_json([before, now])
        self._unsettled = False
        if before and self.config.on_save_failure == "stop":
            raise CheckpointError(before)
        if now:
            raise CheckpointError(now)
        self._unsettled, self._save = True, save
        if save is not None:
            save.waited_s, save.host_s = waited_s, time.perf_counter() - begun
            save.start()
        if wait:
            self._settle()
        return self.store.path_of(snapshot.step)

    def poll(self) -> None:
        """Between steps: tell what became of the last save, if it has ended. Never waits."""
        if self._save is not None and not self._save.reported and self._save.done:
            stop = self.config.on_save_failure == "stop" and self._save.problem is not None
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
        if self._save is not None and not self._interrupted:
            self._interrupted = True  # a second Ctrl-C ends the waiting
            self._save.wait()
            self._interrupted = False
            self._report()
            self._save = None

    def close(self) -> None:
        atexit.unregister(self._at_exit)

    def _settle(self, retry: bool = False) -> None:
        problem: str | None = None
        if self._save is not None:
            self._save.wait()
            if self._save.problem and retry:
                self._save.retry()
            problem = self._save.problem
            self._report(aloud=False)
        self._save, self._unsettled = None, False
        problem = self.placement.broadcast_json(problem)
        if problem is not None:
            raise CheckpointError(problem)

    def _end_of_last(self) -> tuple[str | None, float]:
        """On the main rank: why the last save failed, if it did, and how long it was waited for."""
        last, self._save = self._save, None
        if last is None:
            return None, 0.0
        waited_s = last.wait()
        self._report(last)
        return last.problem, waited_s

    def _capture(self, snapshot: Snapshot, best: bool) -> tuple[Save | None, str | None]:
        """On the main rank: the state in host memory, or why it cannot be saved."""
        if not self.placement.is_main:
            return None, None
        try:
            return Save(self.store, capture(snapshot, self._buffer), best), None
        except (CheckpointError, MemoryError, OSError) as error:
            return None, str(error)

    def _report(self, save: Save | None = None, aloud: bool = True) -> None:
        """Say once what became of a save: on the main rank, in the main thread."""
        save = save or self._save
        if save is None or save.reported:
            return
        save.reported = True
        if save.problem is not None:
            self.logger.record("checkpoint_failed", **save.facts, problem=save.problem)
            if aloud:
                self.logger.warning(f"{save.problem}. Training goes on; the next save tries again")
            return
        memory = {
            "buffer_bytes": self._buffer.nbytes,
            "pinned": self._buffer.pinned,
            "allocate_s": self._buffer.allocated_s,
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
        self.on_saved(save)

    def find(self, where: str | None) -> Path | None:
        """The checkpoint to go on from: `where` is a path, or "auto" for this run's newest intact
        one. Ranks that were restarted take the newest, whatever was asked for first. Collective.
        """
        path = self._choose("auto") if self.placement.identity.attempt else None
        if path is None and where is not None:
            path = self._choose(where)
            if path is None:
                self.logger.info("resume: no checkpoint yet, starting from the beginning")
        return path

    def refuse_to_overwrite(self) -> None:
        """A new run must not mix with what an earlier one of the same name has saved."""
        taken = self.placement.is_main and any(self.store.folder.glob("step-*"))
        if self.placement.broadcast_json(taken):
            raise ConfigError(
                f"the run {self.store.folder.parent} has checkpoints already; add --resume auto to "
                "go on with it, or choose another --run-name"
            )

    def resume(self, path: Path) -> None:
        """Load a checkpoint into model, optimizer, trainer and everything registered."""
        snapshot = load(path)
        trainer = self.trainer
        extra = snapshot.state["extra"]
        load_model_state(trainer.model, snapshot.model, snapshot.aliases, extra, str(path))
        load_optimizer_state(trainer.model, trainer.optimizer, snapshot.optimizer, str(path))
        trainer.load_state_dict(snapshot.state["trainer"])
        self._resumed = snapshot.state
        self._restore_random()
        for name in self._registered:
            self._restore(name)
        if self.placement.is_main:
            self.store.branch(snapshot.step)
        self.placement.barrier()
        self.logger.info(f"resumed from {path}", step=snapshot.step, epoch=snapshot.epoch)

    def handle_error(self, error: BaseException) -> None:
        """Record an error of a training step with rank and step, then let it end this rank.

        The launcher ends the others; the run goes on from the last checkpoint.
        """
        self.logger.error(
            f"{type(error).__name__}: {error}",
            rank=self.placement.identity.rank,
            step=self.trainer.step,
        )
        raise error

    def _snapshot(self, facts: dict[str, Any]) -> Snapshot:
        trainer = self.trainer
        tensors, aliases, extra = model_state(trainer.model)
        per_rank = {
            name: to_text(item.state_dict())
            for name, (item, scope) in self._registered.items()
            if scope == "per_rank"
        }
        mine = {"random": random_state(self.placement.device), "registered": per_rank}
        ranks = self.placement.gather_json(mine)
        state = {
            "trainer": trainer.state_dict(),
            "extra": extra,
            "replicated": {
                name: item.state_dict()
                for name, (item, scope) in self._registered.items()
                if scope == "replicated"
            },
            "ranks": ranks,
            "config": self.config.plain(),
        }
        return Snapshot(
            step=trainer.step,
            epoch=trainer.epoch,
            model=tensors,
            aliases=aliases,
            optimizer=optimizer_state(trainer.model, trainer.optimizer),
            state=state,
            facts={"world_size": self.placement.dp_size, **facts},
        )

    def _restore_random(self) -> None:
        """Each rank's generators. Another number of ranks starts with fresh ones: what training
        draws is derived from the step, so that nothing is lost."""
        assert self._resumed is not None
        ranks = self._resumed["ranks"]
        if len(ranks) != self.placement.dp_size:
            self.logger.info(
                f"the checkpoint was written by {len(ranks)} ranks, now there are "
                f"{self.placement.dp_size}: same samples in the same order"
            )
            return
        set_random_state(ranks[self.placement.dp_rank]["random"], self.placement.device)

    def _restore(self, name: str) -> None:
        """Give a registered object its saved state, where there is one for it."""
        assert self._resumed is not None
        item, scope = self._registered[name]
        ranks = self._resumed["ranks"]
        if scope == "replicated" and name in self._resumed["replicated"]:
            item.load_state_dict(self._resumed["replicated"][name])
        elif scope == "per_rank" and len(ranks) == self.placement.dp_size:
            saved = ranks[self.placement.dp_rank]["registered"]
            if name in saved:
                item.load_state_dict(from_text(saved[name]))

    def _choose(self, where: str) -> Path | None:
        answer: dict[str, Any] = {}
        if self.placement.is_main:
            if self._save is not None:
                self._save.wait()  # it may be the newest
            if where == "auto":
                self.store.recover()
                found, damaged = self.store.newest_intact()
                answer = {"path": str(found) if found else None, "damaged": damaged}
            else:
                given = Path(where)
                answer = {"path": str(given), "damaged": []}
                if not (given / "manifest.json").exists():
                    answer = {"problem": f"--resume {where}: no checkpoint there"}
        answer = self.placement.broadcast_json(answer)
        if "problem" in answer:
            raise CheckpointError(
                answer["problem"] + "; give a folder checkpoints/step-N of a run, or auto"
            )
        for line in answer["damaged"]:
            self.logger.warning(line)
        if answer["path"] is None and answer["damaged"]:
            raise CheckpointError(
                f"no intact checkpoint in {self.store.folder}: {'; '.join(answer['damaged'])}"
            )
        return Path(answer["path"]) if answer["path"] else None


def _drain(manager: weakref.ref[FaultToleranceManager]) -> None:
    alive = manager()
    if alive is not None:
        alive.drain()
