"""Where a rank is, in a file that its launcher can read after any death of it.

A few bytes of shared memory: writing them costs less than a microsecond and asks nothing of the
disk. Without a launcher of ours only the process itself sees them.
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


# As plain numbers for the loop: to ask an Enum for a member takes longer than to note it.
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
class Whereabouts:
    """`step` is the one being computed, or the checkpoint's after a resume. `line` is where the
    main thread was seen last. `grace_s`: what it needs to save after a signal; 0: it does not.
    `hang_s`: 0 is a limit that follows the step time, None is no limit. `asked`: the signal that
    asked it to end, or 0."""

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
    """Begin to keep this process's whereabouts, beside the file for its error report."""
    global _memory
    if error_file is None:
        return
    with suppress(OSError):  # a full disk costs the diagnosis its step, not the run
        path = _beside(error_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_FRESH)
        with path.open("r+b") as file:
            _memory = mmap.mmap(file.fileno(), _SIZE)


def note_step(step: int, begun: bool | None = None) -> None:
    """This rank is at `step`; begun=True: it computes it."""
    if begun is None:
        _STEP.pack_into(_memory, 0, step)
    else:
        _PLACE.pack_into(_memory, 0, step, begun, FORWARD, 0)


def note_phase(phase: int) -> None:
    """What it does there."""
    _memory[_PHASE_AT] = phase


def note_count(count: int) -> None:
    """How many micro-batches of the step, or batches of a validation, it has begun."""
    _COUNT.pack_into(_memory, _COUNT_AT, count)


def note_limits(max_restarts: int, window_s: float) -> None:
    """What the config of this run allows, for a launcher that has not seen it."""
    _LIMITS.pack_into(_memory, _LIMITS_AT, max_restarts, window_s)


def note_grace(grace_s: float) -> None:
    """How long this rank needs after a signal; 0: it does not listen."""
    _TIMES.pack_into(_memory, _GRACE_AT, grace_s)


def note_hang_limit(hang_s: float) -> None:
    """Seconds after which a step is a hang; 0: as the step time says."""
    _TIMES.pack_into(_memory, _HANG_AT, hang_s)


def note_asked(number: int) -> None:
    """A signal has come; the launcher tells the other ranks."""
    _memory[_ASKED_AT] = number


def launcher_reads() -> bool:
    """Whether a launcher of ours sees what this process notes."""
    return isinstance(_memory, mmap.mmap)


def note_line(line: str) -> None:
    """Where the main thread is; a sample."""
    raw = line.encode(errors="replace")[-(_SIZE - _LINE_AT - 1) :]
    _memory[_LINE_AT : _LINE_AT + 1 + len(raw)] = bytes([len(raw)]) + raw


def here() -> Whereabouts:
    """Those of this process."""
    return _decode(bytes(_memory))


def of_rank(error_file: str) -> Whereabouts:
    """Those of another rank, dead or alive."""
    try:
        return _decode(_beside(error_file).read_bytes())
    except (OSError, ValueError, struct.error):
        return Whereabouts()


def _decode(raw: bytes) -> Whereabouts:
    step, begun, phase, count = _PLACE.unpack_from(raw)
    restarts, window = _LIMITS.unpack_from(raw, _LIMITS_AT)
    (grace,) = _TIMES.unpack_from(raw, _GRACE_AT)
    (hang,) = _TIMES.unpack_from(raw, _HANG_AT)
    (length,) = _LINE.unpack_from(raw, _LINE_AT)
    return Whereabouts(
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
    return Path(error_file).with_name("whereabouts")
