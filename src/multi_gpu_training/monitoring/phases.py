"""Times the phases of one training step on this rank.

A mark says what the time from now on belongs to, so that the phases add up to the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multi_gpu_training.monitoring.phase_names import PHASES
from multi_gpu_training.monitoring.run_queue import RunQueue

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer

ON_DEVICE = ("forward", "backward", "comm", "optimizer")
# What ranks say to each other outside DDP: synchronised BatchNorm, the log, agreements.
COLLECTIVES = ("sum", "gather", "agree", "broadcast_json", "barrier")


class PhaseClock:
    """Times one step. The trainer calls it while `trainer.clock` is this one; other steps do not
    know of it.

    On a GPU the phases between forward and optimizer are timed by events of the device, which
    nobody waits for; the rest by the clock of the host.
    """

    def __init__(self, trainer: MultiGPUTrainer, queue: RunQueue | None = None) -> None:
        self._trainer = trainer
        self._queue = queue
        self._queued: list[tuple[str, float]] = []
        self._device = trainer.placement.device
        self._cuda = self._device.type == "cuda"
        self._host: list[tuple[str, float]] = []
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._shadows: list[tuple[Any, str]] = []
        self._cpu_started = 0.0
        self._hook_s = 0.0
        self._micro_batches = 0
        self.cpu_s = 0.0
        self.running = False

    # The life of a measurement

    def start(self, now: float | None = None, phase: str = "input") -> None:
        """A step begins: this rank asks for its first batch, or computes one again."""
        self._host = [(phase, time.perf_counter() if now is None else now)]
        self._events = []
        self._queued = []
        self._queue_mark(phase)
        self._micro_batches = 0
        self._cpu_started = time.thread_time()
        hooks = getattr(self._trainer.wrapped, "hook_time", None)
        self._hook_s = hooks.seconds if hooks is not None else 0.0
        self._device_mark(phase)
        for name in COLLECTIVES:
            self._shadow(self._trainer.placement, name)
        # BatchNorm's running values of rank 0, sent before a forward: whoever is early waits there.
        self._shadow(self._trainer.wrapped, "_sync_buffers")
        self._trainer.clock = self
        self.running = True

    def stop(self, now: float | None = None) -> None:
        """The step has ended. `seconds` may be asked once `ready`."""
        self.detach()
        self._host.append(("", time.perf_counter() if now is None else now))
        self._queue_mark("")
        self._device_mark("")
        self.cpu_s = time.thread_time() - self._cpu_started
        hooks = getattr(self._trainer.wrapped, "hook_time", None)
        self._hook_s = (hooks.seconds if hooks is not None else 0.0) - self._hook_s
        self.running = False

    def detach(self) -> None:
        """The trainer goes on without a clock."""
        self._trainer.clock = None
        for holder, name in self._shadows:
            holder.__dict__.pop(name, None)
        self._shadows.clear()

    # Marks

    def mark(self, phase: str) -> None:
        self._host.append((phase, time.perf_counter()))

    def forward_begins(self) -> None:
        self._micro_batches += 1
        self._both("forward")

    def backward_begins(self, loss: Tensor) -> None:
        self._both("backward")
        if loss.requires_grad:
            loss.register_hook(self._ask_for_the_end)

    def backward_ends(self) -> None:
        self._both("optimizer")

    def micro_batch_ends(self) -> None:
        self._both("other")

    def _ask_for_the_end(self, grad: Tensor) -> None:
        """Called first in a backward: what is queued now runs before DDP waits for the others."""
        engine = getattr(torch.autograd.Variable, "_execution_engine", None)
        if engine is not None:
            engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._both("comm")

    def _both(self, phase: str) -> None:
        self._host.append((phase, time.perf_counter()))
        self._queue_mark(phase)
        self._device_mark(phase)

    def _queue_mark(self, phase: str) -> None:
        waited = self._queue.waited_s() if self._queue is not None else None
        if waited is not None:
            self._queued.append((phase, waited))

    def _device_mark(self, phase: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))

    def _shadow(self, holder: Any, name: str) -> None:
        """For this step, count what the method takes as communication."""
        original: Callable[..., Any] | None = getattr(holder, name, None)
        if original is None or name in holder.__dict__:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self._host[-1][0]
            self._both("comm")
            try:
                return original(*args, **kwargs)
            finally:
                self._both(before)

        # nn.Module's own __setattr__ looks for parameters first, which takes longer.
        holder.__dict__[name] = timed
        self._shadows.append((holder, name))

    # The result

    @property
    def ready(self) -> bool:
        return not self._events or self._events[-1][1].query()

    @property
    def micro_batches(self) -> int:
        return self._micro_batches

    @property
    def queued(self) -> dict[str, float]:
        """Seconds of each phase in which this rank had no core; empty where nobody knows."""
        return _sums(self._queued, lambda a, b: b - a) if self._queued else {}

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, and `step`, their sum."""
        found = _sums(self._host, lambda a, b: b - a)
        total = self._host[-1][1] - self._host[0][1]
        if self._events:
            device = _sums(self._events, lambda a, b: a.elapsed_time(b) / 1e3)
            found |= {phase: device[phase] for phase in ON_DEVICE}
            total = sum(device.values())
            # A wait of the host costs nothing while the device still computes what came before.
            found["input"] = min(found["input"], device["input"] + device["other"])
            busy = sum(found[phase] for phase in PHASES if phase != "other")
            found["other"] = max(0.0, total - busy)
        # A communication hook in Python runs inside the backward, but sends.
        moved = min(self._hook_s, found["backward"])
        found["backward"] -= moved
        found["comm"] += moved
        return {**found, "step": max(total, sum(found.values()))}


def _sums(marks: list[tuple[str, Any]], between: Callable[[Any, Any], float]) -> dict[str, float]:
    found = dict.fromkeys(PHASES, 0.0)
    for (phase, begun), (_, ended) in pairwise(marks):
        found[phase] += max(0.0, between(begun, ended))
    return found
