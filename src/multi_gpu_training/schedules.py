"""Learning-rate schedules: what the rate is multiplied by after the warm-up.

Each function below is one, chosen by `schedule: NAME`. It gets a `ScheduleStep` and returns a
factor; it must depend on nothing else, so that a resumed run has the same rates. Adding one means
adding a function with `@schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class ScheduleStep:
    """Where a run stands. Steps are optimizer steps and count from 0.

    total: steps of the whole run; 0 where nobody knows. drop_every and gamma are the config's
    `schedule_step_epochs`, in steps, and `schedule_gamma`.
    """

    step: int
    warmup: int
    total: int
    drop_every: int
    gamma: float

    @property
    def progress(self) -> float:
        """The part of the steps after the warm-up that is done, from 0 to 1."""
        return min(1.0, (self.step - self.warmup) / max(1, self.total - self.warmup))


Factor = Callable[[ScheduleStep], float]


@dataclass(frozen=True)
class NamedSchedule:
    """words: what is printed behind its name; fields of ScheduleStep in braces. needs_end: the
    number of steps must be known. counts_epochs: an epoch must have a length."""

    factor: Factor
    words: str
    needs_end: bool
    counts_epochs: bool


SCHEDULES: dict[str, NamedSchedule] = {}


def schedule(
    words: str = "", needs_end: bool = False, counts_epochs: bool = False
) -> Callable[[Factor], Factor]:
    """Register a schedule under its function's name; see NamedSchedule."""

    def register(function: Factor) -> Factor:
        SCHEDULES[function.__name__] = NamedSchedule(function, words, needs_end, counts_epochs)
        return function

    return register


@schedule()
def constant(at: ScheduleStep) -> float:
    return 1.0


@schedule(" to 0 at step {total}", needs_end=True)
def cosine(at: ScheduleStep) -> float:
    """Half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * at.progress))


@schedule(" to 0 at step {total}", needs_end=True)
def linear(at: ScheduleStep) -> float:
    """A straight line."""
    return 1.0 - at.progress


@schedule(", x {gamma:g} every {drop_every} steps", counts_epochs=True)
def step(at: ScheduleStep) -> float:
    return float(at.gamma ** (at.step // at.drop_every))
