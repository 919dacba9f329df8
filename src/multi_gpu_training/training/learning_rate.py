"""The learning rate: scaled for the batch, warmed up, and scheduled by optimizer steps.

A rate that the user sets (`optimizer.param_groups[i]["lr"] = x`, in a callback or between steps)
is the rate of the next step. From then on the schedule multiplies it by the same factors as
before, as torch's chainable schedulers do: under `constant` it stays, under `cosine` it falls to
zero with the others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.schedules import SCHEDULES, ScheduleStep
from multi_gpu_training.torch_internals import inner_schedulers

_SCALED = "lr_scale_factor"


class Schedule(Protocol):
    """What the trainer asks of a schedule. `step` counts optimizer steps, never micro-batches."""

    def after_step(self, step: int) -> None: ...

    def after_epoch(self, metrics: dict[str, float]) -> None: ...

    def set_rate(self, optimizer: Optimizer, rate: float) -> None:
        """Make this the rate of the next step. The schedule goes on from it; further groups keep
        their ratio to the first."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Scaling:
    rule: str
    base_batch: int
    global_batch: int
    base_rate: float
    factor: float

    @property
    def rate(self) -> float:
        return self.base_rate * self.factor

    def describe(self, first: float | None = None) -> str:
        """first: the rate that a scheduler of the user's begins with."""
        if self.rule == "none":
            rate = f"{self.base_rate:g}" if first is None else f"starts at {first:g}"
            return f"learning rate: {rate} (lr_scaling=none)"
        ratio = f"{self.global_batch} / {self.base_batch}"
        formula = f"sqrt({ratio})" if self.rule == "sqrt" else ratio
        return (
            f"learning rate: {self.base_rate:g} x {self.factor:g} = {self.rate:g} "
            f"({self.rule}: {formula} samples per step)"
            + ("" if first is None else f"; the scheduler starts at {first:g}")
        )


def scale_factor(rule: str, global_batch: int, base_batch: int) -> float:
    ratio = global_batch / base_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def base_batch_size(config: MultiGPUConfig, data: Any) -> int:
    """The batch size that the user's rate is meant for: `base_batch_size`, or the batch of one GPU,
    taken from the DataLoader if the config does not give it."""
    if config.base_batch_size is not None:
        return config.base_batch_size
    if "batch_size" not in config.model_fields_set and isinstance(data, DataLoader):
        own = data.batch_size or getattr(data.batch_sampler, "batch_size", None)
        return own or config.batch_size
    return config.batch_size


def scale_rate(
    optimizer: Optimizer, config: MultiGPUConfig, global_batch: int, base_batch: int | None = None
) -> Scaling:
    """Multiply every group's rate once; an optimizer that was already scaled is left alone."""
    base_batch = base_batch or base_batch_size(config, None)
    factor = scale_factor(config.lr_scaling, global_batch, base_batch)
    base_rate = 0.0
    for group in optimizer.param_groups:
        # The optimizer may come from an earlier training, or be handed over twice.
        already = group.setdefault(_SCALED, 1.0)
        base_rate = base_rate or float(group["lr"]) / already
        for key in ("lr", "initial_lr"):  # torch's schedulers start from initial_lr
            if key in group:
                group[key] = group[key] * (factor / already)
        group[_SCALED] = factor
    return Scaling(config.lr_scaling, base_batch, global_batch, base_rate, factor)


class RateCurve:
    """Warm-up, then one of `schedules.py`: a pure function of the step.

    peaks: the rates that function multiplies, by group. written: the rates last set here; a rate
    that differs was set by the user.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: MultiGPUConfig,
        epoch_steps: int | None,
        total: int | None,
    ) -> None:
        self.name, self.schedule = config.schedule, SCHEDULES[config.schedule]
        if epoch_steps is None and (self.schedule.counts_epochs or config.warmup_epochs):
            raise ConfigError(
                f"schedule={config.schedule} and warmup_epochs={config.warmup_epochs:g} count "
                "epochs, but the dataset has no length; set steps_per_epoch, or use warmup_steps"
            )
        if self.schedule.needs_end and total is None:
            raise ConfigError(
                f"schedule={self.name} must know where it ends, but the dataset has no length; set "
                "max_steps or steps_per_epoch"
            )
        self.optimizer = optimizer
        asked = config.warmup_steps or round(config.warmup_epochs * (epoch_steps or 0))
        # A warm-up meant for long runs must not keep a short run below its rate throughout.
        share = config.warmup_max_share
        warmup = asked if total is None else min(asked, math.floor(total * share))
        self._shortened = f" instead of {asked} (at most {share:g} of the run)" * (warmup < asked)
        self.at = ScheduleStep(
            step=0,
            warmup=warmup,
            total=total or 0,
            drop_every=config.schedule_step_epochs * (epoch_steps or 1),
            gamma=config.schedule_gamma,
        )
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.written: list[float] | None = None
        self._factor: float | None = None
        self.after_step(0)

    def factor(self, step: int) -> float:
        """The factor for the rate of optimizer step `step` (from 0)."""
        if step < self.at.warmup:
            return (step + 1) / (self.at.warmup + 1)
        self.at.step = step  # one object for all steps: this runs in every step
        return self.schedule.factor(self.at)

    def after_step(self, step: int) -> None:
        factor, before = self.factor(step), self._factor
        groups = self.optimizer.param_groups
        written = [group["lr"] for group in groups] if self.written is None else self.written
        for place, group in enumerate(groups):
            rate = group["lr"]
            if place == len(self.peaks):  # a group that the user added
                self.peaks.append(float(rate) / (before or 1.0))
                written.append(rate)
            elif rate != written[place]:  # set by the user since
                self.peaks[place] = float(rate) / (before or 1.0)
            if factor != before:
                group["lr"] = rate = self.peaks[place] * factor
            written[place] = rate
        self.written, self._factor = written, factor

    def after_epoch(self, metrics: dict[str, float]) -> None:
        pass

    def set_rate(self, optimizer: Optimizer, rate: float) -> None:
        multiply_rates(optimizer, rate)  # `after_step` continues from there

    def state_dict(self) -> dict[str, Any]:
        written = [float(rate) for rate in self.written or ()]
        return {"peaks": self.peaks, "written": written, "factor": self._factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.peaks = [float(peak) for peak in state["peaks"]]
        # Checkpoints of 0.1 hold only the peaks: keep the optimizer's rates as they are.
        self.written = list(state["written"]) if "written" in state else None
        self._factor = state.get("factor")

    def describe(self) -> str:
        text = f"schedule: {self.name}" + self.schedule.words.format(**asdict(self.at))
        warmup, shortened = self.at.warmup, self._shortened
        return text + (f", warm-up over {warmup} steps{shortened}" if warmup or shortened else "")


class BroughtScheduler:
    """A torch scheduler given by the user, advanced per step or per epoch as they choose."""

    def __init__(
        self, scheduler: LRScheduler, config: MultiGPUConfig, total: int | None, scaling: Scaling
    ) -> None:
        if config.warmup_steps or config.warmup_epochs:
            raise ConfigError(
                f"warm-up and {type(scheduler).__name__} both set the learning rate; put the "
                "warm-up into your scheduler (torch's SequentialLR), or use `schedule`"
            )
        self.scheduler = scheduler
        self.total = total
        # These compute the rate from their own settings.
        self.ignores_scaling = scaling.factor != 1.0 and isinstance(
            scheduler, (OneCycleLR, CyclicLR)
        )
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.by_epoch = plateau or config.scheduler_unit == "epoch"
        for inner in inner_schedulers(scheduler) if scaling.factor != 1.0 else ():
            if hasattr(inner, "base_lrs"):
                groups = inner.optimizer.param_groups
                # It was built before the rates were scaled.
                inner.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]

    def after_step(self, step: int) -> None:
        if not self.by_epoch:
            self.scheduler.step()

    def after_epoch(self, metrics: dict[str, float]) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if "loss" not in metrics:
                raise ConfigError(
                    "ReduceLROnPlateau follows the metric `loss`, and the validation gave only "
                    f"{', '.join(sorted(metrics))}; let eval_fn add a `loss` (what you name so is "
                    "what the scheduler follows), or use another scheduler"
                )
            self.scheduler.step(metrics["loss"])
        elif self.by_epoch:
            self.scheduler.step()

    def set_rate(self, optimizer: Optimizer, rate: float) -> None:
        parts = inner_schedulers(self.scheduler)
        for part in parts:
            name, own = type(part).__name__, type(part).__module__ != LRScheduler.__module__
            if own or isinstance(part, (OneCycleLR, CyclicLR)):
                raise ConfigError(
                    f"{name} sets the rate from its own numbers and would overwrite another one; "
                    "stop the run and resume it with the scheduler changed"
                )
        factor = multiply_rates(optimizer, rate)
        for part in parts:
            # Some multiply the current rate, others compute it from these.
            if hasattr(part, "base_lrs"):
                part.base_lrs = [base * factor for base in part.base_lrs]
        for group in optimizer.param_groups:
            if "initial_lr" in group:
                group["initial_lr"] = group["initial_lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)

    def describe(self) -> str:
        name = type(self.scheduler).__name__
        text = f"schedule: {name}, advanced every {'epoch' if self.by_epoch else 'optimizer step'}"
        if self.ignores_scaling:
            text += "; it sets its own rates: lr_scaling does not reach it"
        end = getattr(self.scheduler, "T_max", None) or getattr(self.scheduler, "total_steps", None)
        if not self.by_epoch and end and self.total and end < self.total:
            text += (
                f"; it ends after {end} of {self.total} steps: if it counts epochs, set "
                "scheduler_unit=epoch"
            )
        return text


class Rates:
    """The learning rates of an optimizer's groups, as tensors on the GPU while it steps.

    A captured step reads its rate from memory. Everyone else (schedules, checkpoints, the user)
    keeps seeing plain numbers.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self._values: list[float] = []
        self._outside: list[Any] = []

    def use_tensors(self) -> None:
        for group in self.optimizer.param_groups[len(self.tensors) :]:
            # A float32 rate is off by up to 6e-8: too much for weights in float64.
            double = holds_doubles(group)
            self._values.append(float(group["lr"]))
            self.tensors.append(
                torch.tensor(
                    self._values[-1],
                    dtype=torch.float64 if double else torch.float32,
                    device=self.device,
                )
            )

    def send(self) -> None:
        """Copy changed rates to the device. Call this before a recorded step, never inside one."""
        groups = self.optimizer.param_groups
        if self.tensors and len(self.tensors) < len(groups):  # the user added some
            self.use_tensors()
        for i, group in enumerate(groups if self.tensors else ()):
            rate = group["lr"]
            if rate != self._values[i]:  # a copy to the device costs more than this look
                self._values[i] = float(rate)
                self.tensors[i].fill_(self._values[i])

    def __enter__(self) -> None:
        if self.tensors:
            groups = self.optimizer.param_groups
            self._outside = [group["lr"] for group in groups]
            for group, tensor in zip(groups, self.tensors, strict=True):
                # Only while the optimizer steps: schedulers and users do arithmetic with the rate.
                group["lr"] = tensor

    def __exit__(self, *_: object) -> None:
        if self.tensors:
            for group, rate in zip(self.optimizer.param_groups, self._outside, strict=True):
                group["lr"] = rate


def multiply_rates(optimizer: Optimizer, rate: float) -> float:
    """Give the first group this rate, and multiply the others by the same factor; returns it."""
    groups = optimizer.param_groups
    before = float(groups[0]["lr"])
    if not before > 0:
        raise ConfigError(
            f"the learning rate is {before:g} now, at this point of its schedule; ask again once "
            "it is above 0"
        )
    factor = rate / before
    for group in groups[1:]:
        group["lr"] = group["lr"] * factor
    groups[0]["lr"] = rate
    return factor


def holds_doubles(group: dict[str, Any]) -> bool:
    """Whether a parameter of this group is in double precision."""
    return any(p.dtype in (torch.float64, torch.complex128) for p in group["params"])


def choose_schedule(
    given: Any,
    optimizer: Optimizer,
    config: MultiGPUConfig,
    scaling: Scaling,
    epoch_steps: int | None,
) -> Schedule:
    """`given` may be a torch scheduler, a function of the optimizer, or None: the config's."""
    total = None if epoch_steps is None else epoch_steps * config.epochs
    if config.max_steps is not None:
        total = min(total or config.max_steps, config.max_steps)
    if given is None:
        return RateCurve(optimizer, config, epoch_steps, total)
    if not isinstance(given, LRScheduler) and not callable(given):
        raise ConfigError(
            f"scheduler={given!r:.100} is neither a torch scheduler nor a function that builds one "
            "for an optimizer; join several with torch.optim.lr_scheduler.ChainedScheduler or "
            "SequentialLR"
        )
    scheduler = given if isinstance(given, LRScheduler) else given(optimizer)
    for inner in inner_schedulers(scheduler):
        if getattr(inner, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                f"the scheduler {type(inner).__name__} belongs to another optimizer, so it would "
                "not change this run's learning rate; give a function that builds it: "
                "scheduler=lambda optimizer: ..."
            )
    return BroughtScheduler(scheduler, config, total, scaling)
