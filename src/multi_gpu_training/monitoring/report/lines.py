"""Lines of an event file, found and chosen before they are parsed: files may be very long."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from multi_gpu_training.monitoring.event_crc import is_damaged
from multi_gpu_training.safe_files import Count, Ranks, read_bytes

MOST_BYTES = 64 * 2**30
FREQUENT = ("step", "phases", "device")
MOST_STEPS = 20_000
MOST_SAMPLES = 2_000
MOST_READINGS = 2_000
# Kind and, where it comes next, step of a line. Inside a JSON string quotes have backslashes.
_HEAD = rb'"event":\s*"%s(\w+)"(?:,\s*"step":\s*(\d+))?'
EVERY = re.compile(_HEAD % b"")
WITHOUT_STEPS = re.compile(_HEAD % b'(?!step")')


@dataclass
class EventLines:
    """The lines of one rank. `frequent` kinds: where in the file and of which step; the others are
    `rare` and parsed."""

    raw: bytes
    frequent: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    rare: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    damaged: int = 0  # lines that are no events; `events` adds what it finds
    torn: bool = False
    count: int = 0
    _bad: set[int] = field(default_factory=set)

    def text(self, place: int) -> bytes:
        """The line around a place in the file."""
        end = self.raw.find(b"\n", place)
        return self.raw[self.raw.rfind(b"\n", 0, place) + 1 : end if end >= 0 else None]

    def events(self, lines: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        for place, _ in lines:
            event = parsed(self.text(place))
            if event is not None:
                yield event
            elif place not in self._bad:
                self._bad.add(place)
                self.damaged += 1


def read_lines(path: Path, with_steps: bool) -> EventLines:
    """The lines of a file; `with_steps`: also what was logged of each step, which is the same on
    every rank."""
    raw = read_bytes(path, MOST_BYTES)
    found = EventLines(raw, {kind: [] for kind in FREQUENT})
    last = raw[raw.rfind(b"\n") + 1 :]
    # No newline at its end: it was being written when the run ended.
    found.torn = bool(last.strip()) and parsed(last) is None
    whole = len(raw) - len(last) if found.torn else len(raw)
    lists = {kind.encode(): places for kind, places in found.frequent.items()}
    seen: set[bytes] = set()
    for head in (EVERY if with_steps else WITHOUT_STEPS).finditer(raw, 0, whole):
        kind, step = head.groups()
        places = lists.get(kind)
        if places is None:
            text = found.text(head.start())
            event = parsed(text)
            # Every line has its own time: one that comes twice was copied, not written.
            if event is not None and text not in seen:
                seen.add(text)
                found.rare.append((head.start(), event))
        else:
            number = int(step[:16]) if step is not None else _step(found.text(head.start()))
            places.append((head.start(), number))
    found.count = len(found.rare) + sum(map(len, found.frequent.values()))
    passed_over = 0 if with_steps else raw.count(b'"event": "step"', 0, whole)
    found.damaged = max(0, raw.count(b"\n", 0, whole) - found.count - passed_over)
    return found


class _Event(BaseModel):
    """What the report believes of an event; further fields are shown, never computed with
    before they are looked at."""

    event: str
    step: Count | None = None
    epoch: Count | None = None
    rank: Count | None = None
    attempt: Count = 0
    world_size: Ranks | None = None
    time: Annotated[float, Field(ge=0, le=1e11)] | None = None


def parsed(text: bytes) -> dict[str, Any] | None:
    """The event of a line; None if somebody, or the disk, has changed it."""
    if is_damaged(text):
        return None
    try:
        _CHECK.validate_python(event := json.loads(text), strict=True)
    except (ValueError, RecursionError):
        return None
    return dict(event)


_CHECK = TypeAdapter(_Event)


def thinned(values: list[Any], most: int) -> list[Any]:
    """At most about `most` of them, evenly spread, the last one always among them."""
    stride = -(-len(values) // most) if values else 1
    kept = values[::stride]
    if values and kept[-1] is not values[-1]:
        kept.append(values[-1])
    return kept


def _step(text: bytes) -> int:
    event = parsed(text) or {}
    step = event.get("step")
    return step if isinstance(step, int) else -1
