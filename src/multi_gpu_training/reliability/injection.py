"""Faults on purpose, at an exact rank, step and phase, to see that a run survives them.

    fault = fail_at(rank=1, step=12, phase="backward", kind="sigkill")
    manager.fit(model, dataset, callbacks=[fault])

| phase | when it strikes |
|---|---|
| input | a batch arrives |
| forward | the loss function is called |
| backward | the last gradient is computed, when those before are on their way to the other ranks |
| optimizer | the optimizer is about to move the weights |
| step_end | the weights have moved |
| validation | the model sees its first validation batch, at or after the step |
| saving | the files of a checkpoint are half written, at or after the step (rank 0 writes) |

| kind | what happens |
|---|---|
| exception | InjectedFault is raised |
| exit | the process exits with code 17, at once |
| sigkill, sigstop | the process sends itself that signal |
| sleep | it sleeps for ever, or for `seconds` |
| slow | it sleeps for `seconds` (0.5), from that step on each time |
| nan | what the phase works on becomes NaN: batch, loss, gradient, gradients, weights |
| oom | torch.OutOfMemoryError is raised |
| disk_full | OSError "No space left on device" is raised |

A fault strikes once in a run, restarts and resumes included: a file in the run folder remembers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from multi_gpu_training.data.batch import attach, map_tensors, share_of
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.reliability.snapshot import Capture
from multi_gpu_training.reliability.strikes import EXIT_CODE, InjectedFault, Kind, Memory, strike
from multi_gpu_training.training.callbacks import Callback
from multi_gpu_training.training.loss import read_loss
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.trainer import opened

Phase = Literal["input", "forward", "backward", "optimizer", "step_end", "validation", "saving"]
__all__ = ["EXIT_CODE", "InjectedFault", "Injection", "Kind", "Phase", "fail_at", "injected"]
_WITHOUT_NAN = ("validation", "saving")  # nothing that training goes on with
_RARE = ("validation", "saving")  # not part of every step


def fail_at(
    rank: int,
    step: int,
    phase: Phase,
    kind: Kind,
    *,
    seconds: float | None = None,
    times: int | None = None,
) -> Injection:
    """A hook that makes `rank` fail in `phase` of `step`. Steps count from 1.

    times: how often it strikes in a run, restarts and resumes included; default 1, for `slow`
    without end. Each strike is at that very step, or for `slow`, `validation` and `saving` at or
    after it.
    """
    problems = []
    if phase not in get_args(Phase):
        problems.append(f"phase={phase!r} is unknown; use {', '.join(get_args(Phase))}")
    if kind not in get_args(Kind):
        problems.append(f"kind={kind!r} is unknown; use {', '.join(get_args(Kind))}")
    if kind == "nan" and phase in _WITHOUT_NAN:
        problems.append(f"kind=nan means nothing in phase={phase}; use an earlier phase")
    if step < 1 or rank < 0:
        problems.append(f"rank={rank}, step={step}: ranks count from 0, steps from 1")
    if seconds is not None and kind not in ("sleep", "slow"):
        problems.append(f"seconds={seconds} is for sleep and slow; drop it for {kind}")
    if problems:
        raise ConfigError(problems)
    return Injection(rank, step, phase, kind, seconds, times)


@contextmanager
def injected(manager: MultiGPUTrainingManager, *faults: Injection) -> Iterator[None]:
    """For a loop of your own: the faults are armed inside the block alone. Every rank must enter
    it, after `setup_training`."""
    manager.callbacks.extend(faults)
    for fault in faults:
        fault.on_setup(manager)
    try:
        yield
    finally:
        for fault in reversed(faults):
            fault.on_end(manager)
            manager.callbacks.remove(fault)


class Injection(Callback):
    """See `fail_at`."""

    def __init__(
        self,
        rank: int,
        step: int,
        phase: Phase,
        kind: Kind,
        seconds: float | None,
        times: int | None,
    ) -> None:
        self.rank, self.step, self.phase, self.kind = rank, step, phase, kind
        self.seconds = seconds
        self.times = times if times is not None else (None if kind == "slow" else 1)
        self._memory = Memory(None)
        self._armed = False
        self._undo: list[Callable[[], Any]] = []

    @property
    def name(self) -> str:
        return f"{self.kind} in {self.phase} of step {self.step} on rank {self.rank}"

    @property
    def strikes(self) -> int:
        """How often it struck in this process."""
        return self._memory.here

    # Being armed

    def on_setup(self, manager: Any) -> None:
        # On every rank: a recorded step runs no Python that could fail, and ranks must agree.
        if self.phase in ("forward", "backward", "optimizer"):
            manager.trainer.execution.active = False
        self._memory = Memory(manager.run.path / "injected" / self.name.replace(" ", "-"))
        self._manager, self._armed = manager, True
        if manager.placement.identity.rank == self.rank:
            getattr(self, f"_arm_{self.phase}")(manager)

    def on_end(self, manager: Any) -> None:
        self._armed = False
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, by: Callable[[Any], Any]) -> None:
        """Put `by(original)` in the place of a method, on this one object."""
        original, ours = getattr(owner, name), by(getattr(owner, name))

        def put_back() -> None:
            if vars(owner).get(name) is ours:  # else another fault is around it: it lets pass
                setattr(owner, name, original)

        setattr(owner, name, ours)
        self._undo.append(put_back)

    def _arm_input(self, manager: MultiGPUTrainingManager) -> None:
        def around(train_step: Any) -> Any:
            def with_fault(batch: Any) -> Any:
                if self._strikes_now(manager.trainer.step + 1):
                    share = share_of(batch)
                    batch = map_tensors(opened(batch), _poison)
                    batch = batch if share is None else attach(batch, share)
                return train_step(batch)

            return with_fault

        self._replace(manager.trainer, "train_step", around)

    def _arm_forward(self, manager: MultiGPUTrainingManager) -> None:
        module = manager.trainer.step_module

        def around(loss_fn: Any) -> Any:
            def with_fault(model: Any, batch: Any) -> Any:
                strikes = self._strikes_now(manager.trainer.step + 1)
                result = loss_fn(model, batch)
                if not strikes:
                    return result
                loss = read_loss(result, module.tally.device)
                return dataclasses.replace(loss, mean=loss.mean * math.nan)

            return with_fault

        self._replace(module, "compiled", around)

    def _arm_backward(self, manager: MultiGPUTrainingManager) -> None:
        # The first parameter of a model is the last to get its gradient.
        first = next(p for p in manager.trainer.model.parameters() if p.requires_grad)

        def with_fault(gradient: Tensor) -> Tensor | None:
            if not self._last_micro_batch or not self._strikes_now(manager.trainer.step + 1):
                return None
            return gradient * math.nan

        def around(compute: Any) -> Any:
            def noting(batch: Any, samples: Any, share: Any) -> Any:
                self._last_micro_batch = share.last  # earlier ones are not exchanged
                try:
                    return compute(batch, samples, share)
                finally:
                    self._last_micro_batch = False

            return noting

        self._last_micro_batch = False
        self._replace(manager.trainer, "compute", around)
        self._undo.append(first.register_hook(with_fault).remove)

    def _arm_optimizer(self, manager: MultiGPUTrainingManager) -> None:
        def with_fault(optimizer: Any, *_: Any) -> None:
            if self._strikes_now(manager.trainer.step + 1):
                gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(math.nan)

        self._undo.append(manager.trainer.optimizer.register_step_pre_hook(with_fault).remove)

    def _arm_step_end(self, manager: MultiGPUTrainingManager) -> None:
        pass

    def on_step_end(self, manager: Any, result: StepResult) -> None:
        armed = self.phase == "step_end" and manager.placement.identity.rank == self.rank
        if armed and self._strikes_now(result.step):
            with torch.no_grad():
                for parameter in manager.model.parameters():
                    parameter.mul_(math.nan)

    def _arm_validation(self, manager: MultiGPUTrainingManager) -> None:
        def with_fault(*_: Any) -> None:
            self._strikes_now(manager.trainer.step)

        def around(evaluate: Any) -> Any:
            def watched(loader: Any) -> Any:
                handle = manager.model.register_forward_pre_hook(with_fault)
                try:
                    return evaluate(loader)
                finally:
                    handle.remove()

            return watched

        self._replace(manager, "evaluate", around)

    def _arm_saving(self, manager: MultiGPUTrainingManager) -> None:
        def around(write_files: Any) -> Any:
            def with_fault(staged: Path, captured: Capture) -> None:
                files = dict(captured.copy.files)
                last = list(files)[-1]
                strike = lambda: self._strikes_now(captured.step)  # noqa: E731
                files[last] = _Interrupted(files[last], strike)
                copy = dataclasses.replace(captured.copy, files=files)
                write_files(staged, dataclasses.replace(captured, copy=copy))

            return with_fault

        self._replace(manager.fault_tolerance.store, "_write_files", around)

    # Striking

    def _strikes_now(self, step: int) -> bool:
        """Fail, if this is the time. True: the caller is to make its numbers NaN."""
        later = self.kind == "slow" or self.phase in _RARE
        if not self._armed or step < self.step or (step > self.step and not later):
            return False
        if self.times is not None and self._memory.count >= self.times:
            return False
        self._memory.add(lasting=self.times is not None)
        self._manager.logger.record("injected", fault=self.name, at_step=step)
        strike(self.kind, self.name, self.seconds)
        return self.kind == "nan"


class _Interrupted(list[Any]):
    """Pieces of a file; something happens when the first has been taken."""

    def __init__(self, pieces: list[Any], strike: Callable[[], Any]) -> None:
        super().__init__(pieces)
        self._strike = strike

    def __iter__(self) -> Iterator[Any]:
        for number, piece in enumerate(super().__iter__()):
            yield piece
            if number == 0:
                self._strike()


def _poison(tensor: Tensor) -> Tensor:
    return tensor * math.nan if tensor.is_floating_point() else tensor
