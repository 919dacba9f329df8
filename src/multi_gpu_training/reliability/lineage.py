"""Which attempts of a run went on from which step: `lineage.json` beside the checkpoints."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from multi_gpu_training.reliability.durable import own_name, sync, write_text

STAGED_LINEAGE = ".lineage-"


class Lineage:
    """An attempt is what trains between a start or resume and the next resume."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = 0
        self._unwritten: list[dict[str, int]] | None = None

    def branch(self, from_step: int) -> None:
        """A new attempt goes on from `from_step`; on the disk after `write`."""
        entries = self._entries()
        self.attempt = 1 + max((entry["attempt"] for entry in entries), default=0)
        self._unwritten = [*entries, {"attempt": self.attempt, "from_step": from_step}]

    def entries(self) -> list[dict[str, int]]:
        """Every attempt so far."""
        return list(self._entries())

    def adopt(self, entries: list[dict[str, int]]) -> None:
        """Take up the history of another disk; written with the next attempt."""
        if entries != self._entries():
            self._unwritten = list(entries)

    def includes(self, attempt: int, step: int) -> bool:
        """False for a step of `attempt` that a later one has gone back before."""
        return all(
            step <= entry["from_step"] for entry in self._entries() if entry["attempt"] > attempt
        )

    def write(self) -> None:
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
        sync(self.folder)
        self._unwritten = None

    def _entries(self) -> list[dict[str, int]]:
        if self._unwritten is not None:
            return self._unwritten
        try:
            found: list[dict[str, int]] = json.loads((self.folder / "lineage.json").read_text())
            return found
        except (OSError, ValueError):
            return []
