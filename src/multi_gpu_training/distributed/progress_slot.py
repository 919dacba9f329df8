"""A rank's progress, in a file that its launcher can read however the rank died.

It is a few bytes of shared memory: writing them takes less than a microsecond and does not touch
the disk. Without a launcher of ours only the process itself sees them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from multi_gpu_training.distributed import round_lease


class Phase(IntEnum):
    """What a rank is doing."""

    SET_UP = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    RECORDING = 4  # a step is compared, recorded or compiled
    BETWEEN_STEPS = 5
    CALLBACK = 6
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
BETWEEN_STEPS, CALLBACK, INPUT = map(int, (Phase.BETWEEN_STEPS, Phase.CALLBACK, Phase.INPUT))

_WORDS = {
    Phase.SET_UP: "set-up",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.RECORDING: "recording or compiling the step",
    Phase.BETWEEN_STEPS: "code between steps",
    Phase.CALLBACK: "callback",
    Phase.CHECKPOINT: "checkpoint",
    Phase.VALIDATION: "validation",
    Phase.INPUT: "input",
    Phase.EPOCH: "between epochs",
    Phase.ENDING: "end of the run",
}

_UNKNOWN = -1


class _Slot(ctypes.Structure):
    """The bytes themselves. A rank sets fields; its launcher may read them at any instant."""

    _fields_ = [
        ("step", ctypes.c_int64),
        ("begun", ctypes.c_int64),
        ("phase", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("max_restarts", ctypes.c_int64),
        ("restart_window_s", ctypes.c_double),
        ("grace_s", ctypes.c_double),
        ("hang_s", ctypes.c_double),  # NaN: no limit
        ("asked", ctypes.c_int64),
        ("line", ctypes.c_char * 256),
    ]


def _fresh() -> bytes:
    return bytes(_Slot(step=_UNKNOWN, max_restarts=_UNKNOWN, hang_s=math.nan))


_slot = _Slot.from_buffer_copy(_fresh())
_shared = False  # whether it is in a file


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
    global _slot, _shared
    if error_file is None:
        return
    with suppress(OSError):  # on a full disk the diagnosis lacks the step, but training runs
        path = _beside(error_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_fresh())
        with path.open("r+b") as file:
            _slot = _Slot.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(_Slot)))
        _shared = True
        round_lease.keep(path.parent.parent.parent)  # the launcher's own folder


def launcher_reads() -> bool:
    """Whether a launcher of ours sees what this process notes."""
    return _shared


def note_step(step: int, begun: bool | None = None) -> None:
    """Note the step; begun=True: this rank is computing it, as soon as its machine may train."""
    slot = _slot
    slot.step = step
    if begun is not None:
        if not round_lease.holds():
            round_lease.wait()
        slot.begun, slot.phase, slot.count = begun, FORWARD, 0


def note_phase(phase: int) -> None:
    """Note what this rank does within its step."""
    _slot.phase = phase


def note_count(count: int) -> None:
    """Note how many micro-batches of the step, or batches of a validation, have begun."""
    _slot.count = count


def note_limits(max_restarts: int, window_s: float) -> None:
    """Note how many restarts the config allows, for a launcher that has not seen the config."""
    _slot.max_restarts, _slot.restart_window_s = max_restarts, window_s


def note_grace(grace_s: float) -> None:
    """Note how long this rank needs to save after a signal; 0: it does not listen."""
    _slot.grace_s = grace_s


def note_hang_limit(hang_s: float) -> None:
    """Note after how many seconds a step is a hang; 0: as the step time says, NaN: never."""
    _slot.hang_s = hang_s


def note_asked(number: int) -> None:
    """Note that a signal has come; the launcher tells the other ranks."""
    _slot.asked = number


def note_line(line: str) -> None:
    """Note where the main thread was sampled."""
    _slot.line = line.encode(errors="replace")[-255:]


def here() -> RankProgress:
    """The progress of this process."""
    return _decode(_slot)


def of_rank(error_file: str) -> RankProgress:
    """The progress of another rank, dead or alive."""
    try:
        return _decode(_Slot.from_buffer_copy(_beside(error_file).read_bytes()))
    except (OSError, ValueError):
        return RankProgress()


def _decode(slot: _Slot) -> RankProgress:
    return RankProgress(
        None if slot.step == _UNKNOWN else slot.step,
        bool(slot.begun),
        None if slot.max_restarts == _UNKNOWN else slot.max_restarts,
        slot.restart_window_s,
        Phase(slot.phase),
        slot.count,
        slot.grace_s,
        None if math.isnan(slot.hang_s) else slot.hang_s,
        slot.asked,
        slot.line.decode(errors="replace"),
    )


def _beside(error_file: str) -> Path:
    return Path(error_file).with_name("progress")
