"""One DDP step on the clock: when the gradients are ready, when they have been sent.

Buckets become ready during the last backward of the step, are sent one after the other on one
channel in that order, and the optimizer waits for the last of them. What of the sending lies
behind the backward is exposed; the rest costs nothing. Then all ranks wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .profile import GradientBucket

# Seconds that a message of so many bytes takes.
SendTime = Callable[[int], float]


@dataclass(frozen=True)
class Sent:
    """One bucket; times count from the start of the backward that exchanges."""

    size_bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    sent: tuple[Sent, ...]
    backward_s: float

    @property
    def communication_s(self) -> float:
        """All the time that the channel was busy."""
        return sum(bucket.end_s - bucket.start_s for bucket in self.sent)

    @property
    def exposed_s(self) -> float:
        """How much longer the backward takes until everything is sent."""
        end = max((bucket.end_s for bucket in self.sent), default=0.0)
        return max(0.0, end - self.backward_s)


def exchange(
    buckets: Sequence[GradientBucket], backward_s: float, send_s: SendTime
) -> StepTimeline:
    """The buckets of one backward, sent one after the other."""
    free = 0.0
    sent = []
    for bucket in sorted(buckets, key=lambda each: each.ready_s):
        start = max(free, bucket.ready_s)
        free = start + send_s(bucket.size_bytes)
        sent.append(Sent(bucket.size_bytes, bucket.ready_s, start, free))
    return StepTimeline(tuple(sent), backward_s)


def step_s(
    forward_s: float,
    backward_s: float,
    optimizer_s: float,
    exposed_s: float,
    accumulation: int = 1,
) -> float:
    """An optimizer step: micro-batches before the last one exchange nothing."""
    return accumulation * (forward_s + backward_s) + exposed_s + optimizer_s


def expected_slowest_s(times_s: Sequence[float], ranks: int) -> float:
    """Expected maximum of `ranks` draws from the measured times, each independent.

    Exact for the sample: the i-th smallest of n is the maximum with probability
    (i/n)**ranks - ((i-1)/n)**ranks. It never exceeds the slowest step seen, so few steps say
    little about many ranks.
    """
    ordered = np.sort(np.asarray(times_s, float))
    below = np.arange(len(ordered) + 1) / len(ordered)
    return float(ordered @ np.diff(below**ranks))


def straggler_s(times_s: Sequence[float], ranks: int) -> float:
    """How much longer than one rank's mean step the slowest of `ranks` takes."""
    if len(times_s) < 2 or ranks < 2:
        return 0.0
    return max(0.0, expected_slowest_s(times_s, ranks) - float(np.mean(times_s)))
