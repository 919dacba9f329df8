"""A run's starts and ends: it may be restarted, resumed, and go on with other ranks."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Any

import numpy as np

from multi_gpu_training.monitoring.report.lines import EventLines, Places

Event = dict[str, Any]
# What only a rank that trains writes; messages come while it is being set up, too.
TRAINING = ("rank", "work", "epoch", "checkpoint", "run_end")
TOLD_BY_ALL = ("restart", "resume", "log", "shares", "run_end", "validation", "request", "fault")


class Timeline:
    """The starts of one rank, and which of its lines still count.

    Each start says from which step the rank goes on; what was computed beyond it before is computed
    again.
    """

    def __init__(self, lines: EventLines) -> None:
        self.lines = lines
        self.starts = [
            (place, event.get("step") or 0, event)
            for place, event in lines.rare
            if event["event"] == "rank"
        ]
        if not self.starts:
            self.starts = _guessed_starts(lines)

    @property
    def last(self) -> Event:
        """The latest start; empty where starts are not recorded."""
        return self.starts[-1][2] if self.starts else {}

    def valid(self, lines: Places) -> Places:
        """Those of the (place, step) that were not computed again later."""
        if not self.starts or not len(lines):
            return lines
        # A line counts if no later start goes on from a step before it.
        least = np.minimum.accumulate([step for _, step, _ in reversed(self.starts)])[::-1]
        bound = np.append(least, np.iinfo(np.int64).max)
        later = np.searchsorted(self._places(), lines[:, 0], side="right")
        return np.asarray(lines[lines[:, 1] <= bound[later]])

    def among(self, world_size: int, lines: Places) -> Places:
        """Those of the lines that were written while there were so many ranks."""
        sizes = [event.get("world_size", world_size) for _, _, event in self.starts]
        if all(size == world_size for size in sizes):
            return lines
        fits = np.array([False, *(size == world_size for size in sizes)])
        now = np.searchsorted(self._places(), lines[:, 0], side="right")
        return np.asarray(lines[fits[now]])

    def _places(self) -> list[int]:
        return [place for place, _, _ in self.starts]

    def ends(self) -> list[Event]:
        """How the rank ended after its latest start."""
        begun = self.starts[-1][0] if self.last else -1
        return [e for place, e in self.lines.rare if place > begun and e["event"] == "run_end"]

    def trained_s(self) -> float:
        """Seconds from each start to the last sign of training, without the pauses between."""
        places = [place for place, _, event in self.starts if event] or [-1]
        times: list[list[float]] = [[] for _ in places]
        for place, event in self.lines.rare:
            at = bisect_right(places, place) - 1
            if event["event"] in TRAINING and at >= 0 and (time := time_of(event)):
                times[at].append(time)
        for lines in self.lines.frequent.values():
            # The first and the last line after each start.
            edges = np.searchsorted(lines[:, 0], [*places, self.lines.size])
            for at, (first, after) in enumerate(itertools.pairwise(edges)):
                if first < after:
                    both = lines[[first, after - 1]]
                    times[at] += filter(None, map(time_of, self.lines.events(both)))
        return sum(max(here) - min(here) for here in times if here)


def _guessed_starts(lines: EventLines) -> list[tuple[int, int, Event]]:
    """Where steps went back, in files that do not say when a rank was started."""
    found: list[tuple[int, int, Event]] = []
    for kind in ("step", "phases"):
        steps = lines.frequent[kind]
        for at in np.flatnonzero(np.diff(steps[:, 1]) <= 0) + 1:
            found.append((int(steps[at, 0]), int(steps[at, 1]) - 1, {}))
    return sorted(found, key=lambda start: start[0])


def newest_start(timelines: dict[int, Timeline]) -> Event:
    """The latest start of any rank: it knows how many ranks there are now."""
    return max((line.last for line in timelines.values()), key=time_of, default={})


def latest_ends(timelines: dict[int, Timeline]) -> list[Event]:
    """How the ranks of the latest start ended. What ended before it, well or not, is history."""
    newest = _launch(newest_start(timelines))
    latest = [line for line in timelines.values() if _launch(line.last) == newest]
    return [end for line in latest for end in line.ends()]


def _launch(start: Event) -> tuple[Any, ...]:
    """The same for all ranks that were started together."""
    return tuple(start.get(name) for name in ("world_size", "attempt", "step"))


def told_once(found: list[Event]) -> list[Event]:
    """Without what other ranks told as well: of restarts, validations, faults and ends every rank
    tells. What one rank tells twice happened twice, but for messages."""
    kept: list[Event] = []
    seen: set[Any] = set()
    told: dict[Any, int] = {}
    faults: dict[Any, list[Any]] = {}  # the ranks that tell of each
    for event in found:
        kind = event["event"]
        if kind in TOLD_BY_ALL:
            names = ("event", "attempt", "step", "message", "error", "action", "value", "kind")
            key = tuple(event.get(name) for name in names)
            if kind in ("restart", "resume", "run_end", "fault"):
                own = (event.get("rank"), key)
                told[own] = told.get(own, 0) + 1
                key = (*key, told[own])
            if kind == "fault":
                event = {**event, "ranks": faults.setdefault(key, [])}
                event["ranks"].append(event.get("rank"))
            if key in seen:
                continue
            seen.add(key)
        kept.append(event)
    return kept


def time_of(event: Event) -> float:
    """Seconds since 1970; 0 where it is not known."""
    time = event.get("time")
    known = isinstance(time, (int, float)) and not isinstance(time, bool) and time > 0
    return float(time) if known and time is not None else 0.0
