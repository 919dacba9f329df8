"""Keeps a run's state safe while it trains, brings it back, and acts on errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from multi_gpu_training.checkpoint.saver import RunLog, Saver
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.checkpoint.sync import CheckpointHosts, one_disk
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError, NonFiniteLossError
from multi_gpu_training.faults.policies import (
    RESTART,
    ROLLBACK,
    STOP,
    Policy,
    SkippedBatches,
    judge,
)
from multi_gpu_training.state_dicts import keep_tensors
from multi_gpu_training.training.callbacks import TrainingFault


class FaultToleranceManager:
    """The checkpoints of one run, and what happens when something goes wrong.

    training: what is saved: step, epoch, model, optimizer, `state_dict`, `load_state_dict`.
    hosts: which ranks write; by default all ranks share one disk and rank 0 writes.
    rolling_back: entered around a rollback, to drop and rebuild what depends on the weights.

    Each function in `on_fault` is called with every `TrainingFault`, on the rank that reports it.
    """

    def __init__(
        self,
        config: MultiGPUConfig,
        placement: Placement,
        training: TrainingState,
        log: RunLog,
        folder: Path,
        hosts: CheckpointHosts | None = None,
        rolling_back: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.config = config
        self.placement = placement
        self.training = training
        self.log = log
        self.hosts = hosts or one_disk(placement)
        self.store = CheckpointStore(folder, config.keep_last, keep_best=config.keep_best)
        self.saver = Saver(config, placement, log, self.store, self.hosts)
        self.state = RunState(training, placement, self.hosts, config.plain)
        self.on_fault: list[Callable[[TrainingFault], None]] = []
        self.rollbacks = 0
        self.skipped_batches = SkippedBatches()
        self._rolling_back = rolling_back
        self.register("passed_over", self.skipped_batches)  # as checkpoints on disks call it

    # Checkpoints

    def register(self, name: str, item: Stateful, scope: Scope = "replicated") -> None:
        """Save and restore `item` with the run; see `RunState`."""
        self.state.register(name, item, scope)

    def kept(self) -> Callable[[], None]:
        """Copy what is registered, in memory; calling the result puts it back."""
        return self.state.kept()

    def due(self, step: int) -> bool:
        return self.config.enable_fault_tolerance and step % self.config.checkpoint_frequency == 0

    def save(
        self, facts: dict[str, Any] | None = None, best: bool = False, wait: bool = True
    ) -> Path:
        """Save the state as it is now; return the path it has, or will have. Collective.

        With `wait` it is safe on the disk when this returns; see `Saver.save`.
        """
        return self.saver.save(lambda: self.state.snapshot(facts or {}), best, wait)

    def find(self, where: str | None) -> Path | None:
        """Find the checkpoint to resume from, if any. Collective.

        `where` is a path, or "auto" for this run's newest intact one. Ranks that were restarted
        take the newest, whatever was asked for first.
        """
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
                "continue it, or choose another --run-name"
            )

    def resume(self, path: Path) -> None:
        """Load a checkpoint into everything that was saved. Collective."""
        snapshot = read_together(path, self.placement, self.store)
        note = self.state.restore(snapshot, str(path))
        if note is not None:
            self.log.info(note)
        if self.hosts.writes:
            self.store.branch(snapshot.step)
        self.placement.barrier()
        self.log.info(f"resumed from {path}", step=snapshot.step, epoch=snapshot.epoch)

    def _locate(self, where: str) -> Path | None:
        self.saver.wait()  # what is being written may be the newest
        return locate(where, self.placement, self.hosts, self.store, self.log)

    # Errors

    def handle_error(self, error: BaseException, aloud: bool = True) -> None:
        """Act on an error of a training step as the table in docs/faults.md says, and record it.

        Where the policy is to roll back, return after the last checkpoint's state is back. Raise
        everything else again, to end this rank: the launcher ends the others, and starts all of
        them again from the last checkpoint where that helps.
        """
        policy = judge(error, self.config)
        path = self._locate("auto") if policy.action == ROLLBACK else None
        here = isinstance(error, NonFiniteLossError) and error.step == self.training.step + 1
        if policy.action == ROLLBACK:
            problem = None if path or here else "there is no checkpoint yet to roll back to"
            if self.rollbacks >= self.config.max_restarts:
                problem = f"rolled back {self.rollbacks} times already, max_restarts allows no more"
            if problem is not None:
                policy = Policy(policy.kind, STOP)
                error.add_note(f"({problem})")
        text = f"{type(error).__name__}: {error}"
        self.record_fault(policy.kind, policy.action, text, aloud=aloud)
        if policy.action != ROLLBACK:
            if policy.action == STOP:
                error.restart_helps = False  # type: ignore[attr-defined]  # for the launcher
            raise error
        self.rollbacks += 1
        self.skipped_batches.add(error)
        if path is None:
            return  # the weights are still those of the step before: only its batch is left out
        reached = self.training.step
        self.roll_back(path)
        if aloud and reached > self.training.step:  # else train_epoch repeats the batches
            self.log.warning(
                f"back at step {self.training.step}; your own loop continues with its next batch: "
                f"what the {reached - self.training.step} steps since then learned is gone. "
                "`train_epoch` repeats their batches"
            )

    def record_fault(
        self,
        kind: str,
        action: str,
        text: str,
        facts: dict[str, Any] | None = None,
        aloud: bool = True,
    ) -> None:
        """Report what went wrong and what was done: to people, the run's events and `on_fault`.

        An error that is raised is printed where it ends; with `aloud` it is also printed here.
        """
        given = {"step": self.training.step + 1, **(facts or {})}
        fault = TrainingFault(kind, action, text, given.pop("step"), given)
        rank = self.placement.identity.rank
        self.log.record(
            "fault", kind=kind, action=action, message=text, step=fault.step, rank=rank, **given
        )
        if action not in (STOP, RESTART):
            self.log.warning(text)
        elif aloud:
            self.log.error(text, rank=rank, step=self.training.step)
        for listener in self.on_fault:
            listener(fault)

    def roll_back(self, path: Path) -> None:
        """Bring back the state of a checkpoint while the ranks continue. Collective."""
        optimizer = self.training.optimizer
        before = {p: dict(state) for p, state in optimizer.state.items()}
        skipped = self.skipped_batches.state_dict()
        with self._rolling_back():
            self.resume(path)
            self.skipped_batches.load_state_dict(skipped)  # also those found since
            keep_tensors(optimizer, before)
