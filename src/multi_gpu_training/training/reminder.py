"""A word for ranks that are started again: how small micro-batches must be to fit into memory."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multi_gpu_training.training.memory import MemoryRecovery

if TYPE_CHECKING:
    from multi_gpu_training.distributed.placement import Placement


def leave_word(folder: Path, memory: MemoryRecovery) -> None:
    """Write into the run's folder that half of what was tried is to be tried next."""
    with suppress(OSError):
        state = {**memory.state_dict(), "parts": 2 * memory.parts}
        (folder / "memory.json").write_text(json.dumps(state))


def recall(folder: Path, memory: MemoryRecovery, placement: Placement) -> None:
    """Take up what was written, on whichever machine, before the ranks were started again.
    Collective."""
    word: Any = None
    with suppress(OSError, ValueError):
        word = json.loads((folder / "memory.json").read_text())
    before = memory.state_dict()
    for state in [found for found in placement.gather_json(word) if found]:
        memory.load_state_dict(state)
        if memory.parts < before["parts"]:
            memory.load_state_dict(before)
        before = memory.state_dict()
