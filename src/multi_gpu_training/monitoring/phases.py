"""Times the phases of one training step on this rank.

A mark says what the time from now on belongs to, so that the phases add up to the step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.monitoring.phase_names import PHASES
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step_state import StepState

ON_DEVICE = ("forward", "backward", "comm", "optimizer")


class PhaseClock(Callback):
    """Times one step: it is among the callbacks for as long as that takes.

    On a GPU the phases between forward and optimizer are timed by events of the device, which
    nobody waits for; the rest by the clock of the host.
    """

    watches_only = True

    def __init__(self, state: StepState, queue: RunQueue | None = None) -> None:
        self._state = state
        self._queue = queue
        self._queued: list[tuple[str, float]] = []
        self._cuda = state.placement.device.type == "cuda"
        self._host: list[tuple[str, float]] = []
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._interrupted: list[str] = []  # phases in which a collective began
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
        self._hook_s = self._state.strategy.hook_s
        self._device_mark(phase)
        self._interrupted = []
        self._state.placement.watch = self
        self._state.callbacks.add(self)
        self.running = True

    def stop(self, now: float | None = None) -> None:
        """The step has ended. `seconds` may be asked once `ready`."""
        self.detach()
        self._host.append(("", time.perf_counter() if now is None else now))
        self._queue_mark("")
        self._device_mark("")
        self.cpu_s = time.thread_time() - self._cpu_started
        self._hook_s = self._state.strategy.hook_s - self._hook_s
        self.running = False

    def detach(self) -> None:
        """Training continues without a clock."""
        self._state.placement.watch = None
        self._state.callbacks.remove(self)

    # Marks

    def mark(self, phase: str) -> None:
        self._host.append((phase, time.perf_counter()))

    def on_forward(self, run: Run, share: Share) -> None:
        self._micro_batches += 1
        self._both("forward")

    def on_backward(self, run: Run, loss: Tensor) -> None:
        self._both("backward")

    def on_exchange(self, run: Run) -> None:
        self._both("comm")

    def on_optimizer(self, run: Run) -> None:
        self._both("optimizer")

    def on_micro_batch_end(self, run: Run) -> None:
        self._both("other")

    # What ranks say to each other outside DDP: synchronised BatchNorm, the log, agreements.

    def collective_begins(self) -> None:
        self._interrupted.append(self._host[-1][0])
        self._both("comm")

    def collective_ends(self) -> None:
        self._both(self._interrupted.pop())

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


class RunQueue:
    """How long this thread was ready to run but had no core: other work on the machine, not its
    own. Linux keeps the count; where it does not, there is None."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._file: int | None = None
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self.waited_s()
        except (OSError, ValueError, IndexError):
            self.close()

    def waited_s(self) -> float | None:
        """Seconds so far that this thread stood in the queue."""
        if self._file is None or threading.get_ident() != self._thread:
            return None
        return int(os.pread(self._file, 80, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()
