"""A run's starts and ends: it may be restarted, resumed, and go on with other ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from multi_gpu_training.monitoring.report.lines import EventLines

Event = dict[str, Any]
# What only a rank that trains writes; messages come while it is being set up, too.
TRAINING = ("rank", "work", "epoch", "checkpoint", "run_end")


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

    def valid(self, lines: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the (place, step) that were not computed again later."""
        if not any(start > place for start, _, _ in self.starts for place, _ in lines[:1]):
            return lines
        return [
            (place, step)
            for place, step in lines
            if all(step <= first for start, first, _ in self.starts if start > place)
        ]

    def among(self, world_size: int, lines: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the lines that were written while there were so many ranks."""
        sizes = [event.get("world_size", world_size) for _, _, event in self.starts]
        if all(size == world_size for size in sizes):
            return lines
        places = [place for place, _, _ in self.starts]
        return [
            line
            for line in lines
            if (number := bisect_right(places, line[0])) and sizes[number - 1] == world_size
        ]

    def ends(self) -> list[Event]:
        """How the rank ended after its latest start."""
        begun = self.starts[-1][0] if self.last else -1
        return [e for place, e in self.lines.rare if place > begun and e["event"] == "run_end"]

    def trained_s(self) -> float:
        """Seconds from each start to the last sign of training, without the pauses between."""
        places = [place for place, _, event in self.starts if event] or [-1]
        signs = [(place, e) for place, e in self.lines.rare if e["event"] in TRAINING]
        total = 0.0
        for begin, end in zip(places, [*places[1:], len(self.lines.raw)], strict=True):
            here = [event for place, event in signs if begin <= place < end]
            for lines in self.lines.frequent.values():
                first, after = bisect_left(lines, (begin, 0)), bisect_left(lines, (end, 0))
                here += self.lines.events(lines[first:after][:1] + lines[first:after][-1:])
            times = [time for event in here if (time := time_of(event))]
            total += max(times) - min(times) if times else 0.0
        return total


def _guessed_starts(lines: EventLines) -> list[tuple[int, int, Event]]:
    """Where steps went back, in files that do not say when a rank was started."""
    found: list[tuple[int, int, Event]] = []
    for kind in ("step", "phases"):
        before = -1
        for place, step in lines.frequent[kind]:
            if step <= before:
                found.append((place, step - 1, {}))
            before = step
    return found


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
    """Without what other ranks told as well: of a restart and of an end every rank tells. What one
    rank tells twice happened twice, but for messages."""
    kept: list[Event] = []
    seen: set[Any] = set()
    told: dict[Any, int] = {}
    for event in found:
        kind = event["event"]
        if kind in ("restart", "resume", "log", "shares", "run_end"):
            names = ("event", "attempt", "step", "message", "error")
            key = tuple(event.get(name) for name in names)
            if kind in ("restart", "resume", "run_end"):
                own = (event.get("rank"), key)
                told[own] = told.get(own, 0) + 1
                key = (*key, told[own])
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
