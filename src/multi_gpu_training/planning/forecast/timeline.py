"""One step on the clock: when gradients are ready, and when they have been sent.

With DDP, buckets become ready during the last backward of the step, are sent one after the other
on one channel in that order, and the optimizer waits for the last of them. What of the sending
lies behind the backward is exposed; the rest costs nothing. Then all ranks wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .profile import GradientBucket, StepProfile


class Sent(NamedTuple):
    """One bucket; times count from the start of the backward that exchanges."""

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
    buckets: Sequence[GradientBucket], backward_s: float, send_s: Callable[[int], float]
) -> StepTimeline:
    """The buckets of one backward, sent one after the other; `send_s` is the time of so many
    bytes."""
    free = 0.0
    sent = []
    for bucket in sorted(buckets, key=lambda each: each.ready_s):
        start = max(free, bucket.ready_s)
        free = start + send_s(bucket.size_bytes)
        sent.append(Sent(start, free))
    return StepTimeline(tuple(sent), backward_s)


def sharded_exposed_s(
    forward_s: float,
    backward_s: float,
    parameter_bytes: int,
    gradient_bytes: int,
    blocks: int,
    send_s: Callable[[int], float],
    accumulation: int = 1,
) -> tuple[float, float]:
    """Of a fully sharded step: all the time that ranks talk, and what of it is exposed.

    Each block is gathered while the one before it computes, in forward and again in backward; its
    gradients are added up and split while the next one computes. Gathering, or adding up and
    splitting, moves half the bytes of an all-reduce. `send_s` is the time of one.
    """
    gather = send_s(parameter_bytes // blocks) / 2
    reduce = send_s(gradient_bytes // blocks) / 2
    forward, backward = forward_s / blocks, backward_s / blocks
    ahead = gather + (blocks - 1) * max(forward, gather) + forward - forward_s

    def behind(reduce: float) -> float:
        between = (blocks - 1) * max(backward, gather + reduce)
        return gather + between + backward + reduce - backward_s

    # Micro-batches before the last one only gather.
    exposed = accumulation * ahead + (accumulation - 1) * behind(0.0) + behind(reduce)
    return blocks * (2 * accumulation * gather + reduce), exposed


def step_s(
    forward_s: float, backward_s: float, optimizer_s: float, exposed_s: float, accumulation: int = 1
) -> float:
    """An optimizer step: micro-batches before the last one exchange nothing."""
    return accumulation * (forward_s + backward_s) + exposed_s + optimizer_s


@dataclass(frozen=True)
class Phases:
    """One rank's step without waiting for anybody: the measured mean, in its parts."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    # Between the steps: host work that the phases do not show.
    rest_s: float
    buckets: tuple[GradientBucket, ...]

    @staticmethod
    def of(profile: StepProfile, batch: int) -> Phases:
        """Forward and backward of a micro-batch take time as its samples do."""
        parts = profile.accumulation * (profile.forward_s + profile.backward_s)
        parts += profile.optimizer_s
        mean = float(np.mean(profile.step_times_s)) if profile.step_times_s else parts
        # Phases are measured with the device awaited between them: together they can be longer
        # than a step that runs through.
        shrink = min(1.0, mean / parts) if parts > 0 else 1.0
        scale = shrink * batch / profile.per_rank_batch
        return Phases(
            profile.forward_s * scale,
            profile.backward_s * scale,
            profile.optimizer_s * shrink,
            max(0.0, mean - parts),
            tuple(replace(b, ready_s=b.ready_s * scale) for b in profile.buckets),
        )

    def step_s(self, accumulation: int) -> float:
        """Without exchange."""
        alone = step_s(self.forward_s, self.backward_s, self.optimizer_s, 0.0, accumulation)
        return alone + self.rest_s


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
