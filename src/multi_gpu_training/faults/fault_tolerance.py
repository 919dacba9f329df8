"""Keeps a run's state safe while it trains, brings it back, and acts on errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.resume import TrainingState
from multi_gpu_training.checkpoint.saver import Saver
from multi_gpu_training.checkpoint.sync import CheckpointHosts
from multi_gpu_training.checkpoint.write_queue import Save
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import share_of
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.faults.policies import (
    RESTART,
    ROLLBACK,
    STOP,
    Policy,
    SkippedBatches,
    judge,
)
from multi_gpu_training.state_dicts import keep_tensors
from multi_gpu_training.training.callbacks import RunLog, TrainingFault


class FaultToleranceManager(Saver):
    """The checkpoints of one run, and what happens when something goes wrong.

    rolling_back: entered around a rollback, to drop and rebuild what depends on the weights. Each
    function in `on_fault` is called with every `TrainingFault`, on the rank that reports it. The
    other arguments are those of `Saver`.
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
        on_saved: Callable[[Save], None] = lambda _: None,
    ) -> None:
        super().__init__(config, placement, training, log, folder, hosts, on_saved)
        self.on_fault: list[Callable[[TrainingFault], None]] = []
        self.rollbacks = 0
        self.skipped_batches = SkippedBatches()
        self._rolling_back = rolling_back
        self.register("passed_over", self.skipped_batches)  # as checkpoints on disks call it

    def skips(self, batch: Any) -> bool:
        """Whether to skip a batch because it caused a fault before."""
        return bool(self.skipped_batches.places) and self.skipped_batches.holds(share_of(batch))

    def recover(self, error: Exception) -> None:
        """`handle_error` for the loop, which shows the error and repeats lost steps."""
        self.handle_error(error, aloud=False)

    def handle_error(self, error: BaseException, aloud: bool = True) -> None:
        """Act on an error of a training step by the table in docs/faults.md, and record it.

        If the policy is to roll back, restore the last checkpoint's state and return. Otherwise
        raise the error again to end this rank: the launcher ends the others, and restarts all of
        them from the last checkpoint if that helps.
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
        """Restore the state of a checkpoint while the ranks continue. Every rank must call it."""
        optimizer = self.training.optimizer
        before = {p: dict(state) for p, state in optimizer.state.items()}
        skipped = self.skipped_batches.state_dict()
        with self._rolling_back():
            self.resume(path)
            self.skipped_batches.load_state_dict(skipped)  # also those found since
            keep_tensors(optimizer, before)
