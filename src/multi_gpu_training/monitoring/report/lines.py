"""Lines of a rank's event files, found and chosen before they are parsed: they may be very many.

Files are read in blocks. Of a line only its place and step are kept, of a kind with very many
lines only some; the text of those that are shown is read again at the end.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from multi_gpu_training.monitoring.event_segments import segments, stays
from multi_gpu_training.monitoring.report.event_schema import parsed
from multi_gpu_training.safe_files import UnreadableFile, open_regular

MOST_BYTES = 64 * 2**30
MOST_LINE = 2**20
BLOCK = 4 * 2**20
FREQUENT = ("step", "phases", "device")
MOST_STEPS = 20_000
MOST_SAMPLES = 2_000
MOST_READINGS = 2_000
MOST_PLACES = 2**17  # of a frequent kind; beyond, every second one is forgotten, and so on
MOST_RARE = 2**13  # the same for each other kind
MOST_KINDS = 64
# Kind and, where it comes next, step of a line. Inside a JSON string quotes have backslashes.
_HEAD = rb'"event":\s*"%s(\w{1,40})"(?:,\s*"step":\s*(\d+))?'
EVERY = re.compile(_HEAD % b"")
WITHOUT_STEPS = re.compile(_HEAD % b'(?!step")')
Places = np.ndarray  # of shape (lines, 2): where the line is, and its step


class _Kind:
    """Places and steps of the lines of one kind, thinned as they become too many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.level = 0
        self.count = 0
        self._places = array("q")
        self._steps = array("q")
        self._last: tuple[int, int] | None = None

    def add(self, place: int, step: int) -> None:
        self.count += 1
        if self.level and not self._stays(step, self.count):
            self._last = place, step
            return
        self._last = None
        self._places.append(place)
        self._steps.append(step)
        if len(self._places) > self.most:
            self._halve()

    def _stays(self, step: int, ordinal: int) -> bool:
        # By its number, so that of every rank the same steps are left to be compared.
        return stays(step, self.level) if step >= 0 else not ordinal % (1 << self.level)

    def _halve(self) -> None:
        self._last = self._places[-1], self._steps[-1]
        while len(self._places) > self.most // 2 and self.level < 40:
            self.level += 1
            kept = [
                number
                for number, step in enumerate(self._steps)
                if (stays(step, self.level) if step >= 0 else not number % 2)
            ]
            self._places = array("q", [self._places[number] for number in kept])
            self._steps = array("q", [self._steps[number] for number in kept])

    def found(self) -> Places:
        """What is left, in the order of the file; the last line is always there."""
        lines = np.array([self._places, self._steps], dtype=np.int64).T
        if self._last is not None and (not self._places or self._places[-1] != self._last[0]):
            lines = np.append(lines, [self._last], axis=0)
        return lines


@dataclass
class EventLines:
    """The lines of one rank. `frequent` kinds: where in the files and of which step; the others
    are `rare` and parsed."""

    frequent: dict[str, Places] = field(default_factory=dict)
    rare: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    damaged: int = 0  # lines that are no events; `events` adds what it finds
    torn: bool = False
    count: int = 0
    dropped: int = 0  # lines that the run itself thinned out, or that are too many to be shown
    size: int = 0
    files: list[tuple[int, Path]] = field(default_factory=list)  # first place -> file
    _bad: set[int] = field(default_factory=set)

    def events(self, lines: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """The events at these (place, step), in their order."""
        for place, text in self.texts(int(line[0]) for line in lines):
            event = parsed(text)
            if event is not None:
                yield event
            elif place not in self._bad:
                self._bad.add(place)
                self.damaged += 1

    def texts(self, places: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        opened: tuple[int, int] | None = None  # number of the file, descriptor
        try:
            for place in places:
                number = bisect_right(self.files, place, key=lambda file: file[0]) - 1
                begin, path = self.files[number]
                if opened is None or opened[0] != number:
                    if opened is not None:
                        os.close(opened[1])
                        opened = None
                    try:
                        opened = number, open_regular(path)
                    except OSError:  # thinned or deleted meanwhile: the run goes on
                        yield place, b""
                        continue
                yield place, _line_at(opened[1], place - begin)
        finally:
            if opened is not None:
                os.close(opened[1])


def _line_at(descriptor: int, place: int) -> bytes:
    """The line that begins at this place."""
    text = os.pread(descriptor, 4096, place)
    if b"\n" not in text:
        text = os.pread(descriptor, MOST_LINE, place)
    return text[: end if (end := text.find(b"\n")) >= 0 else None]


class EventTail:
    """Reads the lines of a rank whose current file is `path`, and later only those that were added
    since. `with_steps`: also what was logged of each step, which is the same on every rank.

    A file that was replaced or cut, and segments that were closed or merged, are read again from
    the beginning: places of lines have changed.
    """

    def __init__(self, path: Path, with_steps: bool) -> None:
        self.path = path
        self.with_steps = with_steps
        self._shape: list[tuple[Path, int]] = []  # the files that were read, and which they were
        self._begin_again()

    def _begin_again(self) -> None:
        self._kinds = {kind.encode(): _Kind(MOST_PLACES) for kind in FREQUENT}
        self._known = self._passed_over = self._newlines = 0
        self._base = self._done = 0  # where the current file begins, and what is read of it
        self._parsed: dict[int, tuple[int, dict[str, Any] | None]] = {}

    def read(self) -> EventLines:
        """All lines that are there now."""
        closed = [segment.path for segment in segments(self.path)]
        # Killed between closing a segment and beginning the next file.
        missing = bool(closed) and not os.path.lexists(self.path)
        shape = [(file, file.lstat().st_ino) for file in closed]
        facts = None if missing else self.path.lstat()
        shape.append((self.path, facts.st_ino if facts else 0))
        if shape != self._shape or (facts is not None and facts.st_size < self._done):
            self._begin_again()
            for file in closed:
                self._take(file, 0)
                self._base += file.lstat().st_size
            self._shape = shape
        found = EventLines()
        place = 0
        for file, _ in shape:
            found.files.append((place, file))
            place += 0 if file == self.path else file.lstat().st_size
        if facts is not None:
            self._done, found.torn = self._take(self.path, self._done)
        found.size = self._base + self._done
        kinds = {name: kind for name, kind in self._kinds.items() if name.decode() not in FREQUENT}
        found.frequent = {name: self._kinds[name.encode()].found() for name in FREQUENT}
        found.damaged = max(0, self._newlines - self._known - self._passed_over)
        self._parsed = _parse_rare(found, kinds, self._parsed)
        found.count = len(found.rare) + sum(map(len, found.frequent.values()))
        return found

    def _take(self, file: Path, start: int) -> tuple[int, bool]:
        """Take in a file from `start` on; up to where, and whether a torn line is left there."""
        kinds, with_steps = self._kinds, self.with_steps
        head = EVERY if with_steps else WITHOUT_STEPS
        done, torn = start, False
        for begin, block in _blocks(file, start):
            text = block
            if not block.endswith(b"\n"):
                last = block[block.rfind(b"\n") + 1 :]
                # No newline at its end: it is being written, or was when the run ended.
                if parsed(last) is None:
                    torn = bool(last.strip())
                    text = block[: len(block) - len(last)]
            done = begin + len(text)
            self._newlines += text.count(b"\n")
            if not with_steps:
                self._passed_over += text.count(b'"event": "step"')
            for match in head.finditer(text):
                self._known += 1
                name, step = match.groups()
                kind = kinds.get(name)
                if kind is None:
                    if len(kinds) >= MOST_KINDS:
                        continue
                    kind = kinds[name] = _Kind(MOST_RARE if name != b"rank" else MOST_PLACES)
                at = text.rfind(b"\n", 0, match.start()) + 1
                number = int(step[:16]) if step is not None else -1
                if step is None and name in (b"step", b"phases"):  # it may stand further behind
                    number = _step(text[at : text.find(b"\n", at)])
                kind.add(self._base + begin + at, number)
        return done, torn


def _parse_rare(
    found: EventLines,
    kinds: dict[bytes, _Kind],
    before: dict[int, tuple[int, dict[str, Any] | None]],
) -> dict[int, tuple[int, dict[str, Any] | None]]:
    """Parse the lines of rare kinds. `before`: those that were parsed in an earlier look, by place,
    each with the hash of its text; returned with the new ones for the next look."""
    kept = [kind.found() for kind in kinds.values()]
    places: list[int] = sorted(int(place) for each in kept for place in each[:, 0])
    found.dropped = sum(kind.count for kind in kinds.values()) - len(places)
    known = {place: before[place] for place in places if place in before}
    for place, text in found.texts(place for place in places if place not in known):
        known[place] = hash(text), parsed(text)
    seen: set[int] = set()
    for place in places:
        text_hash, event = known[place]
        if event is None:
            found.damaged += 1
        elif event["event"] == "thinned":
            told = event.get("dropped")
            found.dropped += told if isinstance(told, int) and 0 <= told < 2**53 else 0
        # Every line has its own time: one that comes twice was copied, not written.
        elif text_hash not in seen:
            seen.add(text_hash)
            found.rare.append((place, event))
    return known


def _blocks(file: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(place, whole lines from there) of a file from `start` on, where a line begins; a line that
    is far too long is left out."""
    descriptor = open_regular(file)
    try:
        size = os.fstat(descriptor).st_size  # what is appended meanwhile is not waited for
        if size > MOST_BYTES:
            raise UnreadableFile(
                f"{file.name} has {size:,} bytes, {MOST_BYTES:,} at most are expected"
            )
        place, rest, skipping = start, b"", False
        while place < size:
            block = os.pread(descriptor, min(BLOCK, size - place), place)
            if not block:
                break
            begin, place = place - len(rest), place + len(block)
            if skipping:
                end = block.find(b"\n") + 1
                skipping = not end
                begin, block = begin + end, block[end:] if end else b""
                if end:
                    yield begin, b""  # where the next line begins
            text = rest + block
            whole = len(text) if place >= size else text.rfind(b"\n") + 1
            if whole:
                yield begin, text[:whole]
            rest = text[whole:]
            if len(rest) > MOST_LINE:
                yield begin + whole, b"\n"  # counts as a damaged one
                rest, skipping = b"", True
    finally:
        os.close(descriptor)


def thinned(values: Any, most: int) -> Any:
    """At most about `most` of them, evenly spread, the last one always among them."""
    stride = max(1, -(-len(values) // most))
    kept = values[::stride]
    if len(values) and (len(values) - 1) % stride:
        kept = [*kept, values[-1]]
    return kept


def _step(text: bytes) -> int:
    step = (parsed(text) or {}).get("step")
    return step if isinstance(step, int) else -1
