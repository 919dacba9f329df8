"""Which steps are timed, and what is recorded of them.

Ranks time the same steps: only side by side do their phases show who waits for whom.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from multi_gpu_training.monitoring.flops import WorkCounter, is_compiled
from multi_gpu_training.monitoring.input_wait import InputWait
from multi_gpu_training.monitoring.phases import PhaseClock, RunQueue
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.runner.selection import StepExecution
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

# Of a timed step, its line in the events included; on an H200 about 1.6 ms were measured.
COST_S = {"cpu": 150e-6, "cuda": 2e-3}
COST_SHARE = 0.004  # of the training that timing may take
FIRST_STRIDE, FIRST_STEPS = 5, 40
UNKNOWN_STRIDE = {"cpu": 20, "cuda": 200}  # until the ranks have agreed on how long a step is
DENSE_STEPS = 1024  # from there on one step in 2, 4, 8, ...: a long run has no endless log


class StepSampler(Callback):
    """Times some steps, and records each as `phases`.

    A step begins when its batch is asked for. In a loop of the user's own, which has no such event,
    it begins where the step before ended.
    """

    watches_only = True

    def __init__(
        self,
        state: StepState,
        execution: StepExecution,
        record: Callable[..., None],
        wait: InputWait,
        step_s: Callable[[], float | None],
    ) -> None:
        self._state = state
        self._execution = execution
        self._record = record
        self._wait = wait
        self._agreed_step_s = step_s  # as the ranks agreed on it, so that they time the same steps
        self._attentive = False  # whether asking for a batch and getting it matter now
        self._inputs = _InputEvents(self)
        self._in_epoch = False
        self._checkpoint_s = 0.0
        self._save_begun = 0.0
        self._kind = state.placement.device.type
        self._queue = RunQueue() if self._kind == "cpu" else None
        self._clock = PhaseClock(state, self._queue)
        self._pending: tuple[str, int, dict[str, Any]] | None = None
        self._stride: int | None = None
        # The second step: before steps are compiled or recorded, which counting would disturb.
        self._count_at: int | None = None if is_compiled(state) else state.step + 2
        self._step = state.step
        self._at = time.perf_counter()
        self._input_s = 0.0
        self._next_step = self._following(state.step + 1)
        self._check: PhaseClock | None = None
        self._listen(True)

    # When

    def on_log(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        """The ranks agreed on how long a step takes: time as many as may be timed."""
        step_s = self._agreed_step_s()
        if step_s is None:
            return
        self._stride = max(1, math.ceil(COST_S[self._kind] / (COST_SHARE * max(step_s, 1e-9))))
        if not self._clock.running:
            at, upcoming = self._state.step, self._following(self._state.step)
            # A step that is due is not put off again, each time that the pace changes a little.
            due = self._next_step > at
            self._next_step = min(self._next_step, upcoming) if due else upcoming
            self._listen(self._next_step <= at + 1)

    def _following(self, step: int) -> int:
        stride = self._stride
        if stride is None:
            stride = FIRST_STRIDE if step < FIRST_STEPS else UNKNOWN_STRIDE[self._kind]
        if step >= DENSE_STEPS:
            stride = max(stride, 2 ** int(math.log2(step / DENSE_STEPS) + 1))
        stride = out_of_step(stride)
        # Off the multiples at which logs and checkpoints fall.
        return (step // stride) * stride + stride + (1 if stride > 1 else 0)

    # Where the loop is

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        self._in_epoch = True

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if result.step + 1 < self._next_step and not self._attentive:
            return  # most steps end here
        self._listen(True)
        if not self._in_epoch:
            self._asked(time.perf_counter(), "other")

    def on_data_end(self, run: Run) -> None:
        self._end_epoch()

    def input_asked(self) -> None:
        self._asked(time.perf_counter(), "input")

    def input_arrived(self) -> None:
        if self._clock.running:
            self._clock.mark("other")

    def _listen(self, attentive: bool) -> None:
        """Hear of asking for a batch and getting it only where that matters: it comes in every
        step."""
        if attentive != self._attentive:
            self._attentive = attentive
            callbacks = self._state.callbacks
            (callbacks.add if attentive else callbacks.remove)(self._inputs)

    def on_save_begin(self, run: Run) -> None:
        self._save_begun = time.perf_counter()
        if self._clock.running:
            self._clock.mark("checkpoint")

    def on_save_end(self, run: Run) -> None:
        self._checkpoint_s += time.perf_counter() - self._save_begun
        if self._clock.running:
            self._clock.mark("other")

    def on_end(self, run: Run) -> None:
        with contextlib.suppress(Exception):  # a device that failed cannot tell the time
            self._end_epoch()

    def _asked(self, now: float, phase: str) -> None:
        """A step begins, or goes on with its next micro-batch. phase: what the time until then
        belongs to."""
        boundary = self._state.micro == 0
        if self._clock.running:
            if not boundary:
                self._clock.mark(phase)
                return
            self._finish(now)
        self._write_if_ready()
        step = self._state.step + 1
        if self._count_at is not None and step >= self._count_at:
            self._count()
        elif step >= self._next_step and boundary:
            self._begin(now, phase)
        self._listen(self._clock.running or self._pending is not None or self._count_at is not None)

    def _end_epoch(self) -> None:
        """No step follows at once: what was timed is recorded."""
        if self._clock.running:
            if self._clock.micro_batches and self._state.micro == 0:
                self._finish(time.perf_counter())
            else:
                self._clock.detach()
                self._clock.running = False
        self._write_if_ready(wait=True)
        self._in_epoch = False
        self._listen(False)

    def _begin(self, now: float, phase: str) -> None:
        execution, step = self._execution, self._state.step + 1
        if execution.active:  # warming up for a recording, or replaying one
            self._next_step = self._following(step) if execution.replays else step + 1
            return
        self._next_step = self._following(step)
        self._clock.start(now, phase)

    def _finish(self, now: float) -> None:
        self._clock.stop(now)
        self._put("step", self._clock, now)
        self._clock = PhaseClock(self._state, self._queue)

    # Comparisons of a graph with the eager step

    def on_compare_begin(self, run: Run) -> None:
        if self._clock.running or self._pending is not None or self._state.step == self._step:
            return
        self._check = PhaseClock(self._state)
        self._check.start()

    def on_compare_end(self, run: Run) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.stop()
            self._put("check", check, time.perf_counter())
            self._listen(True)

    # What is recorded

    def _put(self, source: str, clock: PhaseClock, now: float) -> None:
        """Note what belongs to the sample; its line is written once the device has got there."""
        step = self._state.step
        interval = {
            "interval_steps": step - self._step,
            "interval_s": now - self._at,
            "interval_input_s": self._wait.total_s - self._input_s,
            "interval_checkpoint_s": self._checkpoint_s,
        }
        self._step, self._at, self._input_s = step, now, self._wait.total_s
        self._checkpoint_s = 0.0
        self._write_if_ready(wait=True)
        self._pending = source, step, {"clock": clock, **interval}
        self._write_if_ready()

    def _write_if_ready(self, wait: bool = False) -> None:
        if self._pending is None or not (wait or self._pending[2]["clock"].ready):
            return
        source, step, facts = self._pending
        self._pending = None
        clock: PhaseClock = facts.pop("clock")
        if not clock.ready:  # an epoch ended before the device did: rather no sample than a stop
            return
        seconds = clock.seconds()
        fields = {f"{phase}_s": round(value, 7) for phase, value in seconds.items()}
        fields |= {k: round(v, 7) if isinstance(v, float) else v for k, v in facts.items()}
        if self._kind == "cpu":
            fields["cpu_s"] = round(clock.cpu_s, 7)
            queued = {f"queued_{k}_s": round(v, 7) for k, v in clock.queued.items() if v > 0}
            fields |= queued
        self._record("phases", step=step, source=source, **fields)

    def _count(self) -> None:
        """Count the operations of the next step: once per run, and not in a timed step."""
        self._count_at = None
        self._state.callbacks.add(WorkCounter(self._state.callbacks, self._record))


class _InputEvents(Callback):
    """Listens for a StepSampler while it is attentive."""

    watches_only = True

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler

    def on_input(self, run: Run) -> None:
        self._sampler.input_asked()

    def on_batch(self, run: Run) -> None:
        self._sampler.input_arrived()


def out_of_step(stride: int) -> int:
    """The next number that is no multiple of a small one: what a loop does every 8 steps must be
    in one of 8 timed steps, not in all of them."""
    while stride > 7 and not all(stride % small for small in (2, 3, 5, 7)):
        stride += 1
    return stride
