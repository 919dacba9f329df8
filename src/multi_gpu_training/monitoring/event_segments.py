"""Event files of bounded size: closed segments, and older ones thinned.

    events/rank-0.jsonl                the current file
    events/rank-0.000007.jsonl         closed at 4 MiB
    events/rank-0.000001-000004.jsonl  four segments as one, thinned to about the size of one

Whenever three segments of one length lie there, the two oldest become one of twice the length. So
there are at most two of each length: a rank keeps about 8 MiB for each doubling of what it has
written, dense near the present and sparse in the distant past.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.monitoring.event_crc import is_damaged, with_crc
from multi_gpu_training.safe_files import open_regular, read_bytes, write_atomically

SEGMENT_BYTES = 4 * 2**20
MOST_OF_A_LENGTH = 2
MOST_NUMBER = 10**15
# A run is told by these: they go only where they alone would fill a segment.
LASTING = frozenset(
    (
        *(b"rank", b"run_end", b"work", b"fault", b"shares", b"stopped", b"events_lost"),
        b"request",
    )
)
_THINNED = b'"event": "thinned"'
HEAD = re.compile(rb'"event":\s*"(\w{1,40})"(?:,\s*"step":\s*(\d{1,16}))?')
_NAME = re.compile(r"rank-(\d{1,7})\.(\d{6,15})(?:-(\d{6,15}))?\.jsonl")


@dataclass(frozen=True, order=True)
class Segment:
    """A closed file of events; it stands for those from `first` to `last`."""

    first: int
    last: int
    path: Path

    @property
    def length(self) -> int:
        return self.last - self.first + 1


def segments(current: Path) -> list[Segment]:
    """The closed segments of a rank, oldest first. `current` is its open file."""
    found = []
    for path in current.parent.glob(f"{current.stem}.*.jsonl"):
        named = _NAME.fullmatch(path.name)
        if named is None or f"rank-{named[1]}" != current.stem:
            continue
        first, last = int(named[2]), int(named[3] or named[2])
        if first <= last < MOST_NUMBER:
            found.append(Segment(first, last, path))
    # A crash between a merge and the removal of what was merged leaves both: the merged one counts.
    found.sort(key=lambda segment: (segment.first, -segment.last))
    kept: list[Segment] = []
    for segment in found:
        if not kept or segment.first > kept[-1].last:
            kept.append(segment)
    return kept


def marked_events(current: Path, marks: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a rank, of its closed files and the current one, whose lines hold one of
    `marks`; damaged lines are left out."""
    for path in (*(segment.path for segment in segments(current)), current):
        try:
            file = os.fdopen(open_regular(path), "rb")
        except FileNotFoundError:
            continue
        with file:
            for raw in file:
                if any(mark in raw for mark in marks) and not is_damaged(raw.rstrip(b"\n")):
                    yield json.loads(raw)


def close_segment(current: Path) -> Path:
    """Give the current file its number; return its new name."""
    there = segments(current)
    number = there[-1].last + 1 if there else 1
    return current.rename(current.with_name(f"{current.stem}.{number:06d}.jsonl"))


def merge_segments(current: Path) -> None:
    """Merge and thin old segments until there are few enough."""
    while pair := _pair(segments(current)):
        _merge(current, *pair)


def _pair(there: list[Segment]) -> tuple[Segment, Segment] | None:
    """The two oldest neighbours of a length of which there are too many."""
    lengths = Counter(segment.length for segment in there)
    for older, newer in itertools.pairwise(there):
        if older.length == newer.length and lengths[older.length] > MOST_OF_A_LENGTH:
            return older, newer
    return None


def _merge(current: Path, older: Segment, newer: Segment) -> None:
    raw = b"".join(
        read_bytes(segment.path, 16 * SEGMENT_BYTES).rstrip(b"\n") + b"\n"
        for segment in (older, newer)
    )
    level = (older.length + newer.length).bit_length() - 1
    text = thin(raw, level)
    name = f"{current.stem}.{older.first:06d}-{newer.last:06d}.jsonl"
    write_atomically(current.with_name(name), text)
    for segment in (older, newer):
        with contextlib.suppress(FileNotFoundError):
            segment.path.unlink()


def thin(raw: bytes, level: int) -> bytes:
    """About half of the lines. Which steps stay depends on their number alone, so that ranks keep
    the same ones; `level` says how often these lines were halved, this time included."""
    lines = raw.splitlines(keepends=True)
    kept = list(_kept(lines, level, LASTING))
    if sum(map(len, kept)) > SEGMENT_BYTES * 3 // 2:  # hardly anything but what lasts
        kept = list(_kept(lines, level, frozenset()))
    before = [line for line in lines if _THINNED in line]
    dropped = len(lines) - len(before) - len(kept)
    for line in before:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            dropped += int(json.loads(line)["dropped"])
    note = with_crc(json.dumps({"v": 2, "event": "thinned", "dropped": dropped})) + b"\n"
    return b"".join([note, *kept])


def _kept(lines: list[bytes], level: int, lasting: frozenset[bytes]) -> Iterator[bytes]:
    ordinal: Counter[bytes] = Counter()
    for line in lines:
        head = HEAD.search(line)
        if head is None or head[1] == b"thinned":
            continue  # damaged: what it said is lost already; or counted anew
        kind, step = head.groups()
        ordinal[kind] += 1
        if kind in lasting or (stays(int(step), level) if step else ordinal[kind] % 2):
            yield line


def stays(step: int, level: int) -> bool:
    """Whether the lines of a step are among those that are left after so many halvings."""
    return zlib.crc32(b"%d" % step) & ((1 << min(level, 31)) - 1) == 0
