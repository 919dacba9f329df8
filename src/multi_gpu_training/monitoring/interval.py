"""The log of a training interval: losses, rate, speed; read while the device goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.monitoring.reading import MetricsReader, Reading
from multi_gpu_training.monitoring.spikes import LossSpikes
from multi_gpu_training.monitoring.waiting import InputWait

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager
    from multi_gpu_training.training.step import StepResult

SHORTEST_S = 0.05  # of an interval, where the user did not say how many steps it has


@dataclass
class _Pending:
    """An interval whose numbers are on their way."""

    reading: Reading
    step: int
    epoch: int
    position: int
    lr: float
    steps: int


class IntervalLog:
    """Logs every `log_every` steps. Ranks log at the same steps; where the user left log_every
    open, more steps are put together when they are so short that logging would cost."""

    def __init__(self, manager: MultiGPUTrainingManager) -> None:
        self.manager = manager
        resident = isinstance(manager.train_loader, ResidentLoader)
        self.wait = InputWait(manager.placement.device, resident)
        self._reader = MetricsReader(manager.placement)
        self._spikes = LossSpikes(manager.config.on_loss_spike)
        self._every = manager.config.log_every
        self._fixed = "log_every" in manager.config.model_fields_set
        self._total: int | None = None
        self._pending: _Pending | None = None
        self._started = time.perf_counter()
        self._first_step = manager.trainer.step
        self._step_s: float | None = None  # as the ranks agreed on it
        self.in_epoch = False
        self._next = self._following(manager.trainer.step)

    def start_epoch(self, total: int | None) -> None:
        self._total = total
        self.in_epoch = True
        if self.wait.sampler is not None:
            self.wait.sampler.in_epoch = True
        self._started = time.perf_counter()
        self._first_step = self.manager.trainer.step
        self.wait.reset()

    def step_in_epoch(self) -> int | None:
        """The step that training is at; None between epochs."""
        return self.manager.trainer.step if self.in_epoch else None

    def after_step(self, result: StepResult, now: bool) -> None:
        """Log if it is time, or show what has arrived; `now`: log and wait for the numbers."""
        step = self.manager.trainer.step
        sampler = self.wait.sampler
        if sampler is not None and step + 1 >= sampler.next_step:
            sampler.attentive = True
        if now or step >= self._next:
            self._begin(result)
        if self._pending is not None and (now or self._pending.reading.ready):
            self.finish()

    def went_back(self) -> None:
        """The run was taken back to an earlier step: begin a new interval there."""
        self._pending = None
        self._started = time.perf_counter()
        self._first_step = self.manager.trainer.step
        self._next = self._following(self._first_step)

    def end_epoch(self) -> None:
        self.finish()
        self.in_epoch = False
        manager = self.manager
        if self.wait.sampler is not None:
            self.wait.sampler.end_epoch()
            self.wait.sampler.in_epoch = False
        advice = self.wait.advice(manager.config.num_workers)
        if advice is not None:
            manager.logger.info(advice)

    def _begin(self, result: StepResult) -> None:
        """Send the numbers of the interval on their way."""
        self.finish()
        if self._step_s is not None and self.wait.sampler is not None:
            self.wait.sampler.settle(self._step_s)
        manager, trainer = self.manager, self.manager.trainer
        now = time.perf_counter()
        metrics = trainer.read_metrics()
        reading = self._reader.begin(metrics, now - self._started, result.grad_norm)
        manager._epoch_metrics.merge(metrics)
        metrics.reset()
        steps = trainer.step - self._first_step
        self._started, self._first_step = now, trainer.step
        lr = float(trainer.optimizer.param_groups[0]["lr"])
        self._pending = _Pending(reading, trainer.step, trainer.epoch, trainer.position, lr, steps)
        self._next = self._following(trainer.step)

    def finish(self) -> None:
        """Write and show the interval that is on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        manager = self.manager
        metrics, seconds, norm, strangers = pending.reading.result()
        if strangers:
            self._reader.agree_anew()
        rate = pending.steps * manager.sizes.global_batch / max(seconds, 1e-9)
        facts = {**metrics, "lr": pending.lr, "samples_per_s": rate}
        if norm is not None:
            facts["grad_norm"] = norm
        facts["input_wait"] = self.wait.share
        manager.logger.record("step", step=pending.step, epoch=pending.epoch, **facts)
        manager.curves.write("train", facts, pending.step)
        loss = metrics.get("loss", float("nan"))
        note = f"loss {loss:.4f}  {rate:,.0f} samples/s"
        manager.console.advance(pending.position, self._total, note)
        if pending.steps:
            self._step_s = seconds / pending.steps
        if not self._fixed and self._step_s is not None:
            self._adapt(self._step_s)
        manager.check_finite(metrics)
        self._spikes.look(
            manager, loss, pending.step, pending.epoch, pending.position, pending.steps
        )

    def _adapt(self, step_s: float) -> None:
        """Log at most every SHORTEST_S. `step_s` is the mean of all ranks, so they agree."""
        base = self.manager.config.log_every
        times = max(1, round(SHORTEST_S / max(step_s * base, 1e-9)))
        self._every = base * min(times, 100)

    def _following(self, step: int) -> int:
        """The next step at which to log: a multiple of the interval."""
        return (step // self._every + 1) * self._every
