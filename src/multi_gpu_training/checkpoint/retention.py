"""Which checkpoints a run still needs: the newest, the best, and those on its current timeline."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from multi_gpu_training.checkpoint.durable import flush, own_name, write_text
from multi_gpu_training.checkpoint.integrity import trusted_manifest
from multi_gpu_training.safe_files import (
    Count,
    Signed,
    UnreadableFile,
    digest,
    parse_json,
    read_text,
    signed,
)

LINEAGE = "lineage.json"
COPY = "lineage.copy.json"
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
    protected: Path | None = None,
) -> list[Path]:
    """Choose what to drop from `found`, which is sorted newest first.

    The newest `keep_last` intact checkpoints, the best `keep_best`, `best` itself and the
    `protected` one stay. A damaged one does not count: it goes once enough intact ones are newer.
    Nothing goes before there is one intact checkpoint.
    """
    older = [kept for kept in found if kept.current]
    spared = {path for path in (best, protected) if path is not None}
    newest = 0
    while older and newest < keep_last:
        kept = older.pop(0)
        spared.add(kept.path)
        newest += intact(kept.path)
    if not newest:
        return []
    places = keep_best
    for kept in best_first(found):
        if places and intact(kept.path):
            spared.add(kept.path)
            places -= 1
    return [k.path for k in found if k.path not in spared and (k in older or not k.current)]


def best_first(found: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Those of `found`, newest first, that were measured and not abandoned, the best first."""
    scored = [k for k in found if k.current and k.score is not None]
    # The older of two equals: it was the best first.
    return sorted(scored, key=lambda k: (k.score, found.index(k)), reverse=True)


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


class LineageEntry(BaseModel):
    attempt: Count
    from_step: Count


class LineageFile(Signed):
    """`lineage.json`: every attempt and the step that it started from."""

    entries: list[LineageEntry]


class Lineage:
    """Which attempt of a run started from which step: `lineage.json` beside the checkpoints.

    An attempt is what trains between a start or resume and the next resume. Without this file an
    abandoned checkpoint would look like the newest one, so there is a copy of it, and every
    manifest holds the history up to its checkpoint. `problem` says what was wrong with the file
    when it was last read, and what was done about it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = 0
        self.problem: str | None = None
        self._unwritten: list[dict[str, int]] | None = None

    def entries(self) -> list[dict[str, int]]:
        """Return every attempt so far."""
        if self._unwritten is not None:
            return list(self._unwritten)
        self.problem = None
        try:
            return _read(self.folder / LINEAGE)
        except FileNotFoundError:
            problem = "is missing"
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"is damaged ({str(reason).removeprefix(f'{LINEAGE} ')})"
        found, source = self._other_sources()
        if found or problem != "is missing":  # a run that was never resumed has none
            self.problem = f"{LINEAGE} {problem}; the history of the run was taken from {source}"
        return found

    def _other_sources(self) -> tuple[list[dict[str, int]], str]:
        try:
            return _read(self.folder / COPY), COPY
        except (OSError, ValueError):
            return derived([trusted_manifest(path) for path in self.folder.glob("step-*")]), (
                "the manifests, which do not know of a later start without a checkpoint"
            )

    def branch(self, from_step: int) -> None:
        """Start a new attempt from `from_step`; it is on the disk after `write`."""
        entries = self.entries()
        self.attempt = 1 + max((entry["attempt"] for entry in entries), default=0)
        self._unwritten = [*entries, {"attempt": self.attempt, "from_step": from_step}]

    def adopt(self, entries: list[dict[str, int]]) -> None:
        """Take over the history of another disk; it is written with the next attempt."""
        if entries != self.entries():
            self._unwritten = list(entries)

    def includes(
        self, attempt: int, step: int, entries: list[dict[str, int]] | None = None
    ) -> bool:
        """Return False if an attempt after `attempt` went back before `step`.

        entries: what `entries` returned, where it is asked about many checkpoints.
        """
        entries = self.entries() if entries is None else entries
        return all(step <= entry["from_step"] for entry in entries if entry["attempt"] > attempt)

    def write(self) -> None:
        """Put what is new on the disk."""
        if self._unwritten is None:
            return
        text = json.dumps(signed({"entries": self._unwritten}))
        # The copy first: whichever of the two survives, it knows of this attempt.
        for name in (COPY, LINEAGE):
            staged = self.folder / f"{STAGED_LINEAGE}{own_name()}"
            try:
                write_text(staged, text)
                if (self.folder / name).is_dir():  # nothing of ours: it must not stop every save
                    (self.folder / name).rename(self.folder / f"{name}-moved-{own_name()}")
                staged.replace(self.folder / name)
            except OSError:
                with contextlib.suppress(OSError):
                    staged.unlink(missing_ok=True)
                raise
        flush(self.folder)
        self._unwritten = None


def _read(path: Path) -> list[dict[str, int]]:
    text = read_text(path)
    if text.startswith("["):  # version 0.1 wrote a plain list
        found = parse_json(text, list[LineageEntry], path.name)
    else:
        facts = parse_json(text, dict[str, Any], path.name)
        if facts.get("sha256") != digest(facts):
            raise UnreadableFile(f"{path.name} was changed")
        found = parse_json(text, LineageFile, path.name).entries
    return [entry.model_dump() for entry in found]


def derived(manifests: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    """Work out a run's history from what its manifests say."""
    told = [facts["history"] for facts in manifests if "history" in facts]
    if told:
        return [{"attempt": a, "from_step": s} for a, s in max(told, key=len)]
    # Those of version 0.1 only number their attempt: it began before its first checkpoint.
    first: dict[int, int] = {}
    for facts in manifests:
        attempt, step = facts.get("attempt", 0), facts.get("step", 0)
        if attempt:
            first[attempt] = min(first.get(attempt, step), step)
    return [{"attempt": a, "from_step": max(0, first[a] - 1)} for a in sorted(first)]
