"""One DDP step on the clock: when the gradients are ready, when they have been sent.

Buckets become ready during the last backward of the step, are sent one after the other on one
channel in that order, and the optimizer waits for the last of them. What of the sending lies
behind the backward is exposed; the rest costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .profile import Bucket

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
class Timeline:
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


def exchange(buckets: Sequence[Bucket], backward_s: float, send_s: SendTime) -> Timeline:
    """The buckets of one backward, sent one after the other."""
    free = 0.0
    sent = []
    for bucket in sorted(buckets, key=lambda each: each.ready_s):
        start = max(free, bucket.ready_s)
        free = start + send_s(bucket.size_bytes)
        sent.append(Sent(bucket.size_bytes, bucket.ready_s, start, free))
    return Timeline(tuple(sent), backward_s)


def step_s(
    forward_s: float,
    backward_s: float,
    optimizer_s: float,
    exposed_s: float,
    accumulation: int = 1,
) -> float:
    """An optimizer step: micro-batches before the last one exchange nothing."""
    return accumulation * (forward_s + backward_s) + exposed_s + optimizer_s
