"""A rank's progress, in a file that its launcher can read however the rank died.

It is a few bytes of shared memory: writing them takes less than a microsecond and does not touch
the disk. Without a launcher of ours only the process itself sees them.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Phase(IntEnum):
    """What a rank is doing, in the order in which it comes within a step."""

    SET_UP = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    RECORDING = 4  # a step is compared, recorded or compiled
    OWN_CODE = 5  # of a loop that calls train_step itself
    HOOK = 6
    INPUT = 7
    EPOCH = 8
    VALIDATION = 9
    CHECKPOINT = 10
    ENDING = 11

    @property
    def words(self) -> str:
        return _WORDS[self]


# Plain numbers for the loop: looking up an Enum member takes longer than writing it down.
FORWARD, BACKWARD, OPTIMIZER = map(int, (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
OWN_CODE, HOOK, INPUT = map(int, (Phase.OWN_CODE, Phase.HOOK, Phase.INPUT))

_WORDS = {
    Phase.SET_UP: "set-up",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.RECORDING: "recording or compiling the step",
    Phase.OWN_CODE: "code between steps",
    Phase.HOOK: "user hook",
    Phase.CHECKPOINT: "checkpoint",
    Phase.VALIDATION: "validation",
    Phase.INPUT: "input",
    Phase.EPOCH: "between epochs",
    Phase.ENDING: "end of the run",
}

# step, whether one was begun in this attempt, phase, micro-batches and batches of a validation
_PLACE = struct.Struct("<qqqq")
_STEP = struct.Struct("<q")
_COUNT = struct.Struct("<q")
_PHASE_AT, _COUNT_AT = 16, 24
# restarts that the run allows, within seconds; seconds to end after a signal; of a hang
_LIMITS = struct.Struct("<qd")
_TIMES = struct.Struct("<d")
_LIMITS_AT, _GRACE_AT, _HANG_AT, _ASKED_AT, _LINE_AT = 32, 48, 56, 64, 65
_LINE = struct.Struct("<B")
_SIZE = 320
_UNKNOWN = -1
_FRESH = (
    _PLACE.pack(_UNKNOWN, 0, 0, 0)
    + _LIMITS.pack(_UNKNOWN, 0.0)
    + _TIMES.pack(0.0)
    + _TIMES.pack(float("nan"))
).ljust(_SIZE, b"\0")
_memory: mmap.mmap | bytearray = bytearray(_FRESH)


@dataclass(frozen=True)
class RankProgress:
    """How far a rank has come, and what its run allows.

    `step` is the one being computed, or the checkpoint's after a resume. `line` is where the main
    thread was last seen. `grace_s` is how long it needs to save after a signal; 0: it does not
    save. `hang_s`: 0 means that the limit follows the step time, None that there is none. `asked`
    is the signal that asked it to end, or 0.
    """

    step: int | None = None
    begun: bool = False
    max_restarts: int | None = None
    restart_window_s: float = 0.0
    phase: Phase = Phase.SET_UP
    count: int = 0
    grace_s: float = 0.0
    hang_s: float | None = None
    asked: int = 0
    line: str = ""


def keep(error_file: str | None) -> None:
    """Keep this process's progress in a file beside that for its error report."""
    global _memory
    if error_file is None:
        return
    with suppress(OSError):  # on a full disk the diagnosis lacks the step, but training runs
        path = _beside(error_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_FRESH)
        with path.open("r+b") as file:
            _memory = mmap.mmap(file.fileno(), _SIZE)


def note_step(step: int, begun: bool | None = None) -> None:
    """Note the step; begun=True: this rank is computing it."""
    if begun is None:
        _STEP.pack_into(_memory, 0, step)
    else:
        _PLACE.pack_into(_memory, 0, step, begun, FORWARD, 0)


def note_phase(phase: int) -> None:
    """Note what this rank does within its step."""
    _memory[_PHASE_AT] = phase


def note_count(count: int) -> None:
    """Note how many micro-batches of the step, or batches of a validation, have begun."""
    _COUNT.pack_into(_memory, _COUNT_AT, count)


def note_limits(max_restarts: int, window_s: float) -> None:
    """Note how many restarts the config allows, for a launcher that has not seen the config."""
    _LIMITS.pack_into(_memory, _LIMITS_AT, max_restarts, window_s)


def note_grace(grace_s: float) -> None:
    """Note how long this rank needs to save after a signal; 0: it does not listen."""
    _TIMES.pack_into(_memory, _GRACE_AT, grace_s)


def note_hang_limit(hang_s: float) -> None:
    """Note after how many seconds a step is a hang; 0: the limit follows the step time."""
    _TIMES.pack_into(_memory, _HANG_AT, hang_s)


def note_asked(number: int) -> None:
    """Note that a signal has come; the launcher tells the other ranks."""
    _memory[_ASKED_AT] = number


def launcher_reads() -> bool:
    """Whether a launcher of ours sees what this process notes."""
    return isinstance(_memory, mmap.mmap)


def note_line(line: str) -> None:
    """Note where the main thread was sampled."""
    raw = line.encode(errors="replace")[-(_SIZE - _LINE_AT - 1) :]
    _memory[_LINE_AT : _LINE_AT + 1 + len(raw)] = bytes([len(raw)]) + raw


def here() -> RankProgress:
    """The progress of this process."""
    return _decode(bytes(_memory))


def of_rank(error_file: str) -> RankProgress:
    """The progress of another rank, dead or alive."""
    try:
        return _decode(_beside(error_file).read_bytes())
    except (OSError, ValueError, struct.error):
        return RankProgress()


def _decode(raw: bytes) -> RankProgress:
    step, begun, phase, count = _PLACE.unpack_from(raw)
    restarts, window = _LIMITS.unpack_from(raw, _LIMITS_AT)
    (grace,) = _TIMES.unpack_from(raw, _GRACE_AT)
    (hang,) = _TIMES.unpack_from(raw, _HANG_AT)
    (length,) = _LINE.unpack_from(raw, _LINE_AT)
    return RankProgress(
        None if step == _UNKNOWN else step,
        bool(begun),
        None if restarts == _UNKNOWN else restarts,
        window,
        Phase(phase),
        count,
        grace,
        None if hang != hang else hang,
        raw[_ASKED_AT],
        raw[_LINE_AT + 1 : _LINE_AT + 1 + length].decode(errors="replace"),
    )


def _beside(error_file: str) -> Path:
    return Path(error_file).with_name("progress")
