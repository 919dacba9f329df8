"""Where a rank is, in a file that its launcher can read after any death of it.

A few bytes of shared memory: writing them costs less than a microsecond and asks nothing of the
disk. Without a launcher of ours they are not kept.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# step, whether one was begun in this attempt, restarts that the run allows, within seconds
_LAYOUT = struct.Struct("<qqqd")
_STEP = struct.Struct("<q")
_STEP_BEGUN = struct.Struct("<qq")
_LIMITS = struct.Struct("<qd")
_UNKNOWN = -1
_memory: mmap.mmap | None = None


@dataclass(frozen=True)
class Whereabouts:
    """`step` is the one being computed, or the checkpoint's after a resume."""

    step: int | None = None
    begun: bool = False
    max_restarts: int | None = None
    restart_window_s: float = 0.0


def keep(error_file: str | None) -> None:
    """Begin to keep this process's whereabouts, beside the file for its error report."""
    global _memory
    if error_file is None:
        return
    with suppress(OSError):  # a full disk costs the diagnosis its step, not the run
        path = _beside(error_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_LAYOUT.pack(_UNKNOWN, 0, _UNKNOWN, 0.0))
        with path.open("r+b") as file:
            _memory = mmap.mmap(file.fileno(), _LAYOUT.size)


def note_step(step: int, begun: bool | None = None) -> None:
    """This rank is at `step`; begun=True: it computes it."""
    if _memory is None:
        return
    if begun is None:
        _STEP.pack_into(_memory, 0, step)
    else:
        _STEP_BEGUN.pack_into(_memory, 0, step, begun)


def note_limits(max_restarts: int, window_s: float) -> None:
    """What the config of this run allows, for a launcher that has not seen it."""
    if _memory is not None:
        _LIMITS.pack_into(_memory, _STEP_BEGUN.size, max_restarts, window_s)


def here() -> Whereabouts:
    """Those of this process."""
    return Whereabouts() if _memory is None else _decode(bytes(_memory))


def of_rank(error_file: str) -> Whereabouts:
    """Those of another rank, dead or alive."""
    try:
        return _decode(_beside(error_file).read_bytes())
    except (OSError, ValueError, struct.error):
        return Whereabouts()


def _decode(raw: bytes) -> Whereabouts:
    step, begun, restarts, window = _LAYOUT.unpack(raw)
    return Whereabouts(
        None if step == _UNKNOWN else step,
        bool(begun),
        None if restarts == _UNKNOWN else restarts,
        window,
    )


def _beside(error_file: str) -> Path:
    return Path(error_file).with_name("whereabouts")
