"""Arithmetic of times: when something ran, and when nothing else did."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Times of `intervals` that are not in `others`; both are merged."""
    found: list[Interval] = []
    place = 0
    for start, end in intervals:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at, here = start, place
        while here < len(others) and others[here][0] < end:
            if others[here][0] > at:
                found.append((at, others[here][0]))
            at = max(at, others[here][1])
            here += 1
        if at < end:
            found.append((at, end))
    return found


def within(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of the intervals that lie in the window."""
    start, end = window
    cut = ((max(a, start), min(b, end)) for a, b in intervals)
    return [(a, b) for a, b in cut if b > a]
