"""Faults on purpose, at an exact rank, step and phase, to see that a run survives them.

    fault = fail_at(rank=1, step=12, phase="backward", kind="sigkill")
    manager.fit(model, dataset, callbacks=[fault])

docs/reliability.md says when each phase strikes and what each kind does.
A fault strikes once in a run, counting restarts and resumes: a file in the run folder remembers.
"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.checkpoint import durable
from multi_gpu_training.data.batch import map_tensors
from multi_gpu_training.data.order import Share
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.training.callbacks import Callback
from multi_gpu_training.training.step import StepResult

Phase = Literal["input", "forward", "backward", "optimizer", "step_end", "validation", "saving"]
Kind = Literal[
    "exception", "exit", "sigkill", "sigstop", "sleep", "slow", "nan", "oom", "disk_full"
]
EXIT_CODE = 17
_WITHOUT_NAN = ("validation", "saving")  # nothing that training continues with
_RARE = ("validation", "saving")  # not part of every step


class InjectedFault(RuntimeError):
    """Raised on purpose, and not a second time."""

    restart_helps = True


def fail_at(
    rank: int,
    step: int,
    phase: Phase,
    kind: Kind,
    *,
    seconds: float | None = None,
    times: int | None = None,
) -> Injection:
    """Return a hook that makes `rank` fail in `phase` of `step`. Steps count from 1.

    times: how often it strikes in a run, counting restarts and resumes; by default once, `slow`
    without end. It strikes at that very step; `slow`, `validation` and `saving` at or after it.
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
def injected(manager: Any, *faults: Injection) -> Iterator[None]:
    """Arm faults inside the block alone, for your own loop.

    Every rank must enter it, after `setup_training`.
    """
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
    """A fault that waits for its step; see `fail_at`.

    Plain calls drive it, one for each phase, between `arm` and `disarm`. The events below make
    those calls for a manager's run.
    """

    watches_only = True

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
        self.strikes = 0  # in this process, since it was armed
        self._armed = False
        self._folder = Path()
        self._record: Callable[..., None] = lambda *_, **__: None
        self._detach: list[Callable[[], Any]] = []
        # About the micro-batch under way: whether it is to become NaN, whether no part of the
        # model has seen it yet, and whether its gradients will be exchanged.
        self._poisoned = self._fresh = self._last = False

    @property
    def name(self) -> str:
        return f"{self.kind} in {self.phase} of step {self.step} on rank {self.rank}"

    # The calls that drive it

    def arm(self, folder: Path, record: Callable[..., None]) -> None:
        """Get ready in the run folder `folder`; `record` takes an event and its fields."""
        self._folder, self._record, self._armed, self.strikes = folder, record, True, 0

    def disarm(self) -> None:
        self._armed = False

    def batch_arrives(self, step: int) -> bool:
        """Return True if the batch is to become NaN."""
        return self.phase == "input" and self._strikes_now(step)

    def forward_begins(self, step: int) -> bool:
        """Return True if the output is to become NaN."""
        return self.phase == "forward" and self._strikes_now(step)

    def gradient_arrives(self, step: int, gradient: Tensor) -> Tensor | None:
        """Return the gradient to use instead, if any; called for the last one of a step."""
        strikes = self.phase == "backward" and self._strikes_now(step)
        return gradient * math.nan if strikes else None

    def optimizer_begins(self, step: int, optimizer: Optimizer) -> None:
        if self.phase == "optimizer" and self._strikes_now(step):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(math.nan)

    def step_ends(self, step: int, parameters: Iterable[Tensor]) -> None:
        if self.phase == "step_end" and self._strikes_now(step):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(math.nan)

    def validation_begins(self, step: int) -> None:
        if self.phase == "validation":
            self._strikes_now(step)

    def disk_write(self, path: Path) -> None:
        """A checkpoint file of this process was opened and is still empty."""
        # The tensors of model and optimizer are written by then, the rest is not.
        half = path.name == "state.safetensors" and self._folder in path.parents
        step = re.search(r"step-(\d+)", path.parent.name)
        if self.phase == "saving" and half and step:
            self._strikes_now(int(step[1]))

    # The events of a run

    def on_setup(self, manager: Any) -> None:
        # On every rank: a recorded step runs no Python that could fail, and ranks must agree.
        if self.phase in ("input", "forward", "backward", "optimizer"):
            manager.trainer.execution.active = False
        self.arm(manager.folder, manager.logger.record)
        if manager.placement.identity.rank == self.rank:
            self._attach(manager)
        else:
            self.disarm()

    def on_forward(self, manager: Any, share: Share) -> None:
        self._fresh, self._last = True, share.last
        self._poisoned = self.batch_arrives(manager.step + 1)

    def on_optimizer(self, manager: Any) -> None:
        self.optimizer_begins(manager.step + 1, manager.optimizer)

    def on_step_end(self, manager: Any, result: StepResult) -> None:
        self.step_ends(result.step, manager.model.parameters())

    def on_end(self, manager: Any) -> None:
        self.disarm()
        while self._detach:
            self._detach.pop()()

    def _attach(self, manager: Any) -> None:
        """Reach what has no event: the batch, the model's output, one gradient, a file."""
        trainer, model = manager.trainer, manager.model
        spoilt: list[nn.Module] = []

        def before_forward(module: nn.Module, _: Any) -> None:
            if module is model and not model.training:
                self.validation_begins(trainer.step)
            elif self._fresh and torch.is_grad_enabled():
                self._fresh = False
                if self.forward_begins(trainer.step + 1):
                    spoilt.append(module)

        def after_forward(module: nn.Module, _: Any, output: Any) -> Any:
            if spoilt and spoilt[-1] is module:
                spoilt.clear()
                return map_tensors(output, _poison)
            return None

        def on_gradient(gradient: Tensor) -> Tensor | None:
            exchanged, self._last = self._last, False
            return self.gradient_arrives(trainer.step + 1, gradient) if exchanged else None

        if self.phase == "input" and self.kind == "nan":
            before = trainer.state.transform
            trainer.state.transform = lambda batch: self._spoil(before(batch) if before else batch)
            self._detach.append(lambda: setattr(trainer.state, "transform", before))
        if self.phase in ("forward", "validation"):
            for module in model.modules():  # a loss function may call a part of the model
                self._detach.append(module.register_forward_pre_hook(before_forward).remove)
                self._detach.append(module.register_forward_hook(after_forward).remove)
        if self.phase == "backward":
            # The first parameter of a model is the last to get its gradient.
            first = next(p for p in model.parameters() if p.requires_grad)
            self._detach.append(first.register_hook(on_gradient).remove)
        if self.phase == "saving":
            durable.observers.append(self.disk_write)
            self._detach.append(lambda: durable.observers.remove(self.disk_write))

    def _spoil(self, batch: Any) -> Any:
        poisoned, self._poisoned = self._poisoned, False
        return map_tensors(batch, _poison) if poisoned else batch

    # Striking

    def _strikes_now(self, step: int) -> bool:
        """Fail, if this is the time. True: the caller is to make its numbers NaN."""
        later = self.kind == "slow" or self.phase in _RARE
        if not self._armed or step < self.step or (step > self.step and not later):
            return False
        # A file that outlives the process has one byte for each strike. If the disk is full,
        # only this process remembers.
        memory = self._folder / "injected" / self.name.replace(" ", "-")
        before = self.strikes
        with suppress(OSError):
            before = max(before, memory.stat().st_size)
        if self.times is not None and before >= self.times:
            return False
        self.strikes += 1
        with suppress(OSError):
            if self.times is not None:
                memory.parent.mkdir(exist_ok=True)
                with memory.open("ab") as file:
                    file.write(b"x")
        self._record("injected", fault=self.name, at_step=step)
        strike(self.kind, self.name, self.seconds)
        return self.kind == "nan"


def strike(kind: Kind, name: str, seconds: float | None = None) -> None:
    """Fail in that way; `nan` is left to the caller, who has the numbers."""
    if kind == "exception":
        raise InjectedFault(f"injected: {name}")
    if kind == "oom":
        raise torch.OutOfMemoryError(f"CUDA out of memory (injected: {name})")
    if kind == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "exit":
        os._exit(EXIT_CODE)
    if kind in ("sigkill", "sigstop"):
        os.kill(os.getpid(), getattr(signal, kind.upper()))
    if kind == "slow":
        time.sleep(0.5 if seconds is None else seconds)
    if kind == "sleep":
        end = math.inf if seconds is None else time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))


def _poison(tensor: Tensor) -> Tensor:
    return tensor * math.nan if tensor.is_floating_point() else tensor
