"""Steps and ranks as settings write them: `20-24,200`, and `0,3` or `all`."""

from __future__ import annotations

import itertools

MOST_STEPS = 50  # in all: a trace grows by one to several megabytes per step


def step_spans(text: str) -> tuple[tuple[int, int], ...]:
    """First and last step of each range."""
    spans = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
            raise ValueError("give steps like 20-24, or 20-24,200-202")
        spans.append((int(first), int(last or first)))
    if any(first < 1 or last < first for first, last in spans):
        raise ValueError("steps count from 1, and a range ends where it begins or later")
    if any(later[0] <= earlier[1] for earlier, later in itertools.pairwise(spans)):
        raise ValueError("the ranges overlap or are out of order")
    count = sum(last - first + 1 for first, last in spans)
    if count > MOST_STEPS:
        raise ValueError(f"these are {count} steps; use at most {MOST_STEPS}")
    return tuple(spans)


def chosen_ranks(text: str) -> frozenset[int] | None:
    """The ranks that are named; None for all."""
    if text == "all":
        return None
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) < 8 for part in parts):
        raise ValueError("give ranks like 0 or 0,3, or all")
    return frozenset(map(int, parts))
