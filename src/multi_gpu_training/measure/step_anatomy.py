"""Take a step apart: forward, backward, optimizer, when each bucket is ready, memory by batch.

Steps are repeated operation by operation. On a GPU the clock is the device's, and a pause before
each step lets Python get ahead of it: the times are those of the work, as in a recorded step, and
not those of Python.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.batch import attach, head, share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.data.sample_count import sample_count
from multi_gpu_training.measure.request import MeasuredRun
from multi_gpu_training.measure.trainer_access import leave_compiled
from multi_gpu_training.torch_internals import gpu_sleep
from multi_gpu_training.training.callbacks import Callback, Run

REPEATS = 12
IGNORED = 2  # the first ones, which fill caches
LONGEST_S = 20.0
CYCLES_PER_S = 2e9
LONGEST_PAUSE_S = 0.25

Step = Callable[[list[Any]], None]


@dataclass
class Trace:
    """Readings of the clock in one step: events of a GPU, or seconds."""

    start: Any = None
    forward: Any = None
    backward: Any = None
    moved: Any = None
    buckets: list[tuple[int, Any]] = field(default_factory=list)


class Anatomy(Callback):
    """Reads the clock within the steps of a trainer, on one rank.

    The trainer's DDP must not have a communication hook. From now on it exchanges nothing, so
    this must be the last thing that the trainer is used for.
    """

    def __init__(self, run: MeasuredRun) -> None:
        self.trainer = run.trainer
        self.device = run.placement.device
        self.trace = Trace()
        self.backward_peak = 0  # bytes, until the weights moved
        run.trainer.give_up_recording("its steps are taken apart")
        run.trainer.strategy.watch_buckets(self._bucket)
        run.callbacks.add(self)

    def on_forward(self, run: Run, share: Share) -> None:
        if share.last:  # of several micro-batches, the one that exchanges gradients
            self.trace = Trace(start=self._mark())

    def on_backward(self, run: Run, loss: Tensor) -> None:
        self.trace.forward = self._mark()

    def on_optimizer(self, run: Run) -> None:
        self.trace.backward = self._mark()
        if self.device.type == "cuda":
            self.backward_peak = torch.cuda.max_memory_allocated(self.device)

    def on_micro_batch_end(self, run: Run) -> None:
        self.trace.moved = self._mark()

    def dissect(self, step: Callable[[], None]) -> dict[str, Any]:
        """Run `step` some times; median seconds of its phases, and its buckets in the order in
        which they become ready."""
        traces: list[Trace] = []
        begun = time.perf_counter()
        pause_s = 0.0
        while len(traces) < REPEATS:
            if len(traces) > IGNORED and time.perf_counter() - begun > LONGEST_S:
                break
            if self.device.type == "cuda" and pause_s:
                gpu_sleep(int(pause_s * CYCLES_PER_S))
            called = time.perf_counter()
            step()
            pause_s = min(LONGEST_PAUSE_S, 1.5 * (time.perf_counter() - called))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            traces.append(self.trace)
        return self._summary(traces[IGNORED:])

    def memory_by_batch(
        self, step: Step, micros: list[Any], whole: int
    ) -> dict[int, tuple[int, int]]:
        """Peak bytes of `step` with micro-batches of `whole` samples, half and a quarter of it, and
        of its forward and backward alone; empty on CPUs, and where a batch cannot be cut."""
        found: dict[int, tuple[int, int]] = {}
        device = self.device
        if device.type != "cuda" or whole < 2:
            return found
        # Compiling each shape would take a minute; as the user wrote it, the loss keeps no less.
        leave_compiled(self.trainer)
        try:
            for size in (whole, whole // 2, max(1, whole // 4)):
                cut = [first_samples(batch, size) for batch in micros]
                step(cut)  # new shapes choose their algorithms first
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                step(cut)
                torch.cuda.synchronize(device)
                found[size] = (torch.cuda.max_memory_allocated(device), self.backward_peak)
        except Exception as error:  # no more is known, and the rest is worth having
            print(f"memory by batch size: {type(error).__name__}: {error}", file=sys.stderr)
        return found

    def _summary(self, traces: list[Trace]) -> dict[str, Any]:
        apart = _seconds
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

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _bucket(self, size_bytes: int) -> None:
        self.trace.buckets.append((size_bytes, self._mark()))


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


def first_samples(batch: Any, count: int) -> Any:
    """The first `count` samples, as a batch of our loader if it was one."""
    share = share_of(batch)
    if share is None:
        return head(batch, count, sample_count(batch))
    size = min(count, share.count)
    smaller = replace(share, indices=share.indices[:size], count=size)
    if isinstance(batch, ResidentBatch):
        return ResidentBatch(batch.index[:size], batch.tensors, smaller)
    return attach(head(batch, count, share.count), smaller)
