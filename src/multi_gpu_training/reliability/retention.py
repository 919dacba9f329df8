"""Which checkpoints may go: never one that the run could still need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kept:
    """A checkpoint on the disk. `score` is larger for a better one, None where nothing was
    measured; one that is not `current` was abandoned when the run went back before it."""

    path: Path
    current: bool = True
    score: float | None = None


def to_drop(
    found: Sequence[Kept],
    intact: Callable[[Path], bool],
    keep_last: int,
    keep_best: int,
    best: Path | None = None,
) -> list[Path]:
    """Of `found`, newest first, those that are neither among the newest `keep_last` intact ones
    nor among the best `keep_best`, nor `best` itself.

    A damaged one takes nobody's place: it goes when enough intact ones are newer. Nothing goes
    before one intact checkpoint is there.
    """
    older = [kept for kept in found if kept.current]
    spared: set[Path] = set() if best is None else {best}
    newest = 0
    while older and newest < keep_last:
        kept = older.pop(0)
        spared.add(kept.path)
        newest += intact(kept.path)
    if not newest:
        return []
    scored = [k for k in found if k.current and k.score is not None]
    # Of equals the older one: it was the best first.
    scored.sort(key=lambda k: (k.score, found.index(k)), reverse=True)
    places = keep_best
    for kept in scored:
        if places and intact(kept.path):
            spared.add(kept.path)
            places -= 1
    return [k.path for k in found if k.path not in spared and (k in older or not k.current)]


def score_of(facts: dict[str, Any]) -> float | None:
    """How good a checkpoint says it is, larger is better; None if it was saved unmeasured."""
    try:
        value = float(facts["score"]["value"])
        smaller = bool(facts["score"]["smaller_is_better"])
    except (KeyError, TypeError, ValueError):
        return None
    if math.isnan(value):
        return None
    return -value if smaller else value
