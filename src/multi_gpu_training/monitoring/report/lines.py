"""Lines of an event file, found and chosen before they are parsed: files may be very long."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FREQUENT = ("step", "phases", "device")
MOST_STEPS = 50_000
MOST_SAMPLES = 2_000
MOST_READINGS = 2_000


@dataclass
class EventLines:
    """The lines of one rank: frequent kinds by step, still as text; the others parsed."""

    frequent: dict[str, list[tuple[int, int, bytes]]] = field(default_factory=dict)
    rare: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    damaged: int = 0
    torn: bool = False
    count: int = 0


def read_lines(path: Path, skip: Collection[str] = ()) -> EventLines:
    """Every whole line of the file; those of the kinds in `skip` are only counted."""
    found = EventLines(frequent={kind: [] for kind in FREQUENT})
    raw = path.read_bytes()
    texts = raw.split(b"\n")
    last = texts.pop()
    if last.strip():  # no newline at its end: it was being written when the run ended
        if parsed(last) is None:
            found.torn = True
        else:
            texts.append(last)
    for place, text in enumerate(texts):
        if not text or text.isspace():
            continue
        found.count += 1
        kind = _kind(text)
        if kind in skip:
            continue
        if kind in found.frequent:
            step = _step(text)
            if step is not None:
                found.frequent[kind].append((place, step, text))
                continue
        event = parsed(text)
        if event is None:
            found.damaged += 1
        elif event.get("event") in found.frequent:
            step = event.get("step", -1)
            kind = str(event["event"])
            found.frequent[kind].append((place, step if isinstance(step, int) else -1, text))
        else:
            found.rare.append((place, event))
    return found


def parsed(text: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def thinned(values: list[Any], most: int) -> list[Any]:
    """At most about `most` of them, evenly spread, the last one always among them."""
    stride = -(-len(values) // most) if values else 1
    kept = values[::stride]
    if values and kept[-1] is not values[-1]:
        kept.append(values[-1])
    return kept


def events(lines: list[tuple[int, int, bytes]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for place, _, text in lines:
        event = parsed(text)
        if event is not None:
            yield place, event


def _kind(text: bytes) -> str:
    begin = text.find(b'"event"')
    if begin < 0:
        return ""
    begin = text.find(b'"', begin + 7)
    end = text.find(b'"', begin + 1)
    return text[begin + 1 : end].decode(errors="replace") if 0 <= begin < end else ""


def _step(text: bytes) -> int | None:
    """The number after "step":, without parsing the line."""
    begin = text.find(b'"step":')
    if begin < 0 or not text.rstrip().endswith(b"}"):
        return None
    number = text[begin + 7 : begin + 24].lstrip()
    digits = number[: len(number) - len(number.lstrip(b"0123456789"))]
    return int(digits) if digits else None
