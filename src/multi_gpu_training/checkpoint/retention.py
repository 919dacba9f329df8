"""Which checkpoints a run still needs: the newest, the best, and those on its current timeline."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.durable import flush, own_name, write_text

STAGED_LINEAGE = ".lineage-"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on the disk. A larger `score` is better; None means it was not measured.

    It is not `current` if the run went back before it and so abandoned it.
    """

    path: Path
    current: bool = True
    score: float | None = None


def to_drop(
    found: Sequence[StoredCheckpoint],
    intact: Callable[[Path], bool],
    keep_last: int,
    keep_best: int,
    best: Path | None = None,
) -> list[Path]:
    """Choose what to drop from `found`, which is sorted newest first.

    The newest `keep_last` intact checkpoints, the best `keep_best` and `best` itself stay. A
    damaged one does not count: it goes once enough intact ones are newer. Nothing goes before
    there is one intact checkpoint.
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
    # The older of two equals: it was the best first.
    scored.sort(key=lambda k: (k.score, found.index(k)), reverse=True)
    places = keep_best
    for kept in scored:
        if places and intact(kept.path):
            spared.add(kept.path)
            places -= 1
    return [k.path for k in found if k.path not in spared and (k in older or not k.current)]


def score_of(facts: dict[str, Any]) -> float | None:
    """Return how good a manifest says its checkpoint is; larger is better, None is unmeasured."""
    try:
        value = float(facts["score"]["value"])
        smaller = bool(facts["score"]["smaller_is_better"])
    except (KeyError, TypeError, ValueError):
        return None
    if math.isnan(value):
        return None
    return -value if smaller else value


class Lineage:
    """Which attempt of a run started from which step: `lineage.json` beside the checkpoints.

    An attempt is what trains between a start or resume and the next resume.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = 0
        self._unwritten: list[dict[str, int]] | None = None

    def entries(self) -> list[dict[str, int]]:
        """Return every attempt so far."""
        if self._unwritten is not None:
            return list(self._unwritten)
        try:
            found: list[dict[str, int]] = json.loads((self.folder / "lineage.json").read_text())
            return found
        except (OSError, ValueError):
            return []

    def branch(self, from_step: int) -> None:
        """Start a new attempt from `from_step`; it is on the disk after `write`."""
        entries = self.entries()
        self.attempt = 1 + max((entry["attempt"] for entry in entries), default=0)
        self._unwritten = [*entries, {"attempt": self.attempt, "from_step": from_step}]

    def adopt(self, entries: list[dict[str, int]]) -> None:
        """Take over the history of another disk; it is written with the next attempt."""
        if entries != self.entries():
            self._unwritten = list(entries)

    def includes(self, attempt: int, step: int) -> bool:
        """Return False if an attempt after `attempt` went back before `step`."""
        return all(
            step <= entry["from_step"] for entry in self.entries() if entry["attempt"] > attempt
        )

    def write(self) -> None:
        """Put what is new on the disk."""
        if self._unwritten is None:
            return
        staged = self.folder / f"{STAGED_LINEAGE}{own_name()}"
        try:
            write_text(staged, json.dumps(self._unwritten))
            staged.replace(self.folder / "lineage.json")
        except OSError:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
            raise
        flush(self.folder)
        self._unwritten = None
