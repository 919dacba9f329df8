"""All ranks wait for the slowest: what that costs, from the measured spread of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
