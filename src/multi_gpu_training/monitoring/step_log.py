"""The log of the steps: loss, rate and speed, every `log_every` steps, without stopping the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multi_gpu_training.accelerator import NO_FLOAT64, widened
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.monitoring.input_wait import InputWait
from multi_gpu_training.monitoring.spikes import LossSpikes
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.metrics import MetricsCollector, Number
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

SHORTEST_S = 0.2  # of an interval, where the user did not say how many steps it has


@dataclass
class _Pending:
    """An interval whose numbers are on their way from the device."""

    reading: Reading
    step: int
    epoch: int
    position: int
    lr: float
    steps: int


class IntervalLog(Callback):
    """Gathers the metrics of some steps over all ranks and gives them to `on_log`.

    active: off where a loop logs by itself. Ranks log at the same steps. Where the user left
    `log_every` open, more steps are put together when they are so short that logging would cost.
    """

    watches_only = True

    def __init__(
        self,
        config: MultiGPUConfig,
        state: StepState,
        collect_metrics: Callable[[], MetricsCollector],
        epoch_metrics: MetricsCollector,
        global_batch: int,
        wait: InputWait,
        spikes: LossSpikes,
        check_finite: Callable[[dict[str, float]], None],
    ) -> None:
        self.active = True
        self._state = state
        self._read_metrics = collect_metrics
        self._epoch_metrics = epoch_metrics
        self._global_batch = global_batch
        self._wait = wait
        self._spikes = spikes
        self._check_finite = check_finite
        self._reader = MetricsReader(state.placement)
        self._alone = state.placement.dp_size == 1
        self._base = self._every = config.log_every
        self._fixed = "log_every" in config.model_fields_set
        self.asked_every: int | None = None  # while the run went on, instead of the config's
        self._pending: _Pending | None = None
        self.step_s: float | None = None  # as the ranks agreed on it
        self._restart()

    # As the steps go by

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        self._restart()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if result.step >= self._next and self.active:
            self._begin(result)
        if self._pending is not None and self._is_due(self._pending, result.step):
            self._finish()

    def set_every(self, steps: int) -> None:
        """Log every so many steps from now on. Every rank must call it at the same step."""
        self._base = self._every = self.asked_every = steps
        self._fixed = True
        self._next = self._following(self._state.step)

    def flush(self) -> None:
        """Log the steps that were not logged yet, and wait for their numbers. Collective."""
        if self._state.step > self._first_step and self.active:
            self._begin(None)
        self._finish()

    def end_epoch(self) -> None:
        """Wait for what is on its way; the steps since then count for the epoch alone."""
        self._finish()
        self._restart()

    def went_back(self) -> None:
        """The run stands at an earlier step again: begin a new interval there."""
        self._pending = None
        self._restart()

    def _is_due(self, pending: _Pending, step: int) -> bool:
        """Whether to give an interval out now: at the same step on every rank, because what comes
        of it (a NaN, a spike) may need all of them."""
        if self._alone or pending.reading.is_on_host:
            return pending.reading.ready
        return step >= pending.step + max(1, self._every // 2)

    def _restart(self) -> None:
        self._started = time.perf_counter()
        self._first_step = self._state.step
        self._next = self._following(self._first_step)

    def _begin(self, result: StepResult | None) -> None:
        """Send the numbers of the interval on their way."""
        self._finish()
        state, now = self._state, time.perf_counter()
        metrics = self._read_metrics()
        norm = result.grad_norm if result is not None else None
        reading = self._reader.begin(metrics, now - self._started, norm)
        self._epoch_metrics.merge(metrics)
        metrics.reset()
        steps = state.step - self._first_step
        self._started, self._first_step = now, state.step
        lr = float(state.optimizer.param_groups[0]["lr"])
        self._pending = _Pending(reading, state.step, state.epoch, state.position, lr, steps)
        self._next = self._following(state.step)

    def _finish(self) -> None:
        """Give out the interval that is on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        metrics, seconds, norm, strangers = pending.reading.result()
        if strangers:
            self._reader.agree_anew()
        if pending.steps:
            self.step_s = seconds / pending.steps
        if not self._fixed and self.step_s is not None:
            self._adapt(self.step_s)
        facts = {
            **metrics,
            "epoch": pending.epoch,
            "lr": pending.lr,
            "input_wait": self._wait.share,
        }
        if self._global_batch:  # else only the user knows how large their batches are
            facts["samples_per_s"] = pending.steps * self._global_batch / max(seconds, 1e-9)
        if norm is not None:
            facts["grad_norm"] = norm
        for call in self._state.callbacks.on_log:
            call(facts, pending.step)
        self._check_finite(metrics)
        loss = metrics.get("loss", float("nan"))
        self._spikes.look(loss, pending.step, pending.epoch, pending.position, pending.steps)

    def _adapt(self, step_s: float) -> None:
        """Log at most every SHORTEST_S. `step_s` is the mean of all ranks, so they agree."""
        times = max(1, round(SHORTEST_S / max(step_s * self._base, 1e-9)))
        self._every = self._base * min(times, 100)

    def _following(self, step: int) -> int:
        """The next step at which to log: a multiple of the interval."""
        return (step // self._every + 1) * self._every


# Numbers on their way from the device, read without stopping it


class Reading:
    """A list of numbers that is being added up over ranks and copied to the host."""

    def __init__(self, names: list[str], values: Tensor, event: torch.cuda.Event | None) -> None:
        self._names = names
        self._values = values
        self._event = event

    @property
    def is_on_host(self) -> bool:
        """Whether there is nothing to wait for, on any rank."""
        return self._event is None

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> tuple[dict[str, float], float, float | None, bool]:
        """Metrics over all ranks, mean seconds of a rank, gradient norm, and whether a rank had a
        metric that the others do not know of yet. Waits for the device where it must."""
        if self._event is not None:
            self._event.synchronize()
        *pairs, seconds, norm, strangers, ranks = self._values.tolist()
        metrics = {}
        for i, name in enumerate(self._names):
            total, weight = pairs[2 * i], pairs[2 * i + 1]
            if weight:  # a step that was skipped has none
                metrics[name] = total / weight
        return metrics, seconds / ranks, None if math.isnan(norm) else norm / ranks, strangers > 0


class MetricsReader:
    """Starts readings. Ranks agree on the names of metrics once, then only add up numbers."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._names: list[str] | None = None

    def begin(self, metrics: MetricsCollector, seconds: float, norm: Tensor | None) -> Reading:
        """Collective, but waits for no one on a GPU once the names are agreed on."""
        placement = self._placement
        if placement.dp_size == 1:
            names = metrics.names
        else:
            if self._names is None:
                everyone = placement.gather_json(metrics.names)
                self._names = list(dict.fromkeys(name for mine in everyone for name in mine))
            names = self._names
        strangers = float(any(name not in names for name in metrics.names))
        numbers: list[Number] = [part for name in names for part in metrics.pair(name)]
        numbers += [seconds, math.nan if norm is None else norm, strangers, 1.0]
        vector = _vector(numbers, placement.wire)
        placement.sum(vector)
        if vector.device.type != "cuda":
            return Reading(names, vector, None)
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        host.copy_(vector, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Reading(names, host, event)

    def agree_anew(self) -> None:
        """A rank knows a metric that the others do not: list the names at the next reading."""
        self._names = None


def _vector(numbers: list[Number], device: torch.device) -> Tensor:
    """The numbers as one float64 vector on `device`, without waiting for it, or on the host where
    the device has no float64."""
    device = torch.device("cpu") if device.type in NO_FLOAT64 else device
    plain = torch.tensor(
        [0.0 if isinstance(number, Tensor) else float(number) for number in numbers],
        dtype=torch.float64,
    )
    if device.type == "cuda":
        plain = plain.pin_memory()
    parts = list(plain.to(device, non_blocking=True).unbind())
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            parts[place] = widened(number.detach()).reshape(()).to(device, torch.float64)
    return torch.stack(parts)
