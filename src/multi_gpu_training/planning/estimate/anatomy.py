"""Where the time of a step goes: forward, backward, optimizer, and when each bucket is ready.

Steps are repeated operation by operation. On a GPU the clock is the device's, and a pause is put
before each step so that Python is ahead of it: the times are those of the work, as in a recorded
step, and not those of Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from multi_gpu_training.distributed.replicas import watch_buckets

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer

REPEATS = 12
IGNORED = 2  # the first ones, which fill caches
LONGEST_S = 20.0
CYCLES_PER_S = 2e9
LONGEST_PAUSE_S = 0.25


@dataclass
class Trace:
    """Readings of the clock in one step: events of a GPU, or seconds."""

    start: Any = None
    forward: Any = None
    backward: Any = None
    moved: Any = None
    buckets: list[tuple[int, Any]] = field(default_factory=list)


class Anatomy:
    """Takes steps of a trainer apart. Its DDP must not have a communication hook; from now on it
    exchanges nothing, so that this must be the last thing that the trainer is used for."""

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self.trainer = trainer
        self.device = trainer.placement.device
        self.trace = Trace()
        self.after_backward: Callable[[], None] = lambda: None
        trainer.execution.active = False
        trainer.forward = self._forward(trainer.forward)  # type: ignore[method-assign]
        trainer._move_weights = self._move(trainer._move_weights)  # type: ignore[method-assign]
        if isinstance(trainer.wrapped, DistributedDataParallel):
            watch_buckets(trainer.wrapped, self._bucket)

    def dissect(self, step: Callable[[], None]) -> dict[str, Any]:
        """Run `step` some times; median seconds of its phases, and its buckets in the order in
        which they become ready."""
        traces: list[Trace] = []
        begun = time.perf_counter()
        pause_s = 0.0
        while len(traces) < REPEATS:
            if len(traces) > IGNORED and time.perf_counter() - begun > LONGEST_S:
                break
            self._pause(pause_s)
            self.trace = Trace()
            called = time.perf_counter()
            step()
            pause_s = min(LONGEST_PAUSE_S, 1.5 * (time.perf_counter() - called))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            traces.append(self.trace)
        return self._summary(traces[IGNORED:])

    def begin(self) -> None:
        """The micro-batch that ends the step starts now."""
        self.trace = Trace(start=self._mark())

    def _summary(self, traces: list[Trace]) -> dict[str, Any]:
        apart = self._seconds
        usual = sorted(len(trace.buckets) for trace in traces)[len(traces) // 2]
        alike = [trace for trace in traces if len(trace.buckets) == usual]
        buckets = []
        for number in range(usual):
            ready = median(apart(t.forward, t.buckets[number][1]) for t in alike)
            buckets.append({"size_bytes": alike[0].buckets[number][0], "ready_s": max(0.0, ready)})
        return {
            "forward_s": median(apart(t.start, t.forward) for t in traces),
            "backward_s": median(apart(t.forward, t.backward) for t in traces),
            "optimizer_s": median(apart(t.backward, t.moved) for t in traces),
            "buckets": buckets,
        }

    def _pause(self, seconds: float) -> None:
        if self.device.type == "cuda" and seconds:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if isinstance(begin, float):
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1e3

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            result = forward(*args)
            self.trace.forward = self._mark()
            return result

        return timed

    def _move(self, move: Callable[..., Any]) -> Callable[..., Any]:
        def timed(share: Any) -> Any:
            self.trace.backward = self._mark()
            self.after_backward()
            norm = move(share)
            self.trace.moved = self._mark()
            return norm

        return timed

    def _bucket(self, size_bytes: int) -> None:
        self.trace.buckets.append((size_bytes, self._mark()))
