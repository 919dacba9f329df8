"""How long the ranks of a machine may train: a deadline that their launcher keeps moving.

Several machines must never train the same run apart from each other. A launcher that leads extends
the deadline while a quorum confirms it (launch/elastic/quorum.py). A machine that was paused or cut
off wakes up with a deadline in the past: its ranks begin no step and publish no checkpoint, until
the launcher has moved the deadline or ended them.

The deadline is a few bytes of shared memory. Looking at it takes less than a microsecond.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from contextlib import suppress
from pathlib import Path

WAIT_S = 0.05
_NAME = "round-lease"
# Counts the time that a machine sleeps, too, where the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on a clock that never goes back and does not stop while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


class _Deadline(ctypes.Structure):
    # By two clocks: that of a virtual machine may stand still while the machine is paused.
    _fields_ = [("uptime", ctypes.c_double), ("wall", ctypes.c_double)]


_deadline: _Deadline | None = None  # None: this rank's launcher sets none


def _map(path: Path) -> _Deadline:
    with path.open("r+b") as file:
        return _Deadline.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(_Deadline)))


class RoundLease:
    """The launcher's end. Nothing is trained before the first `extend`."""

    def __init__(self, folder: Path) -> None:
        path = folder / _NAME
        path.write_bytes(bytes(_Deadline()))
        self._deadline = _map(path)

    def extend(self, until: float) -> None:
        """Let the ranks train until then, a time of `now()`."""
        self._deadline.wall = time.time() + until - now()
        self._deadline.uptime = until


def keep(folder: Path) -> None:
    """In a rank: heed the deadline in its launcher's folder, if there is one."""
    global _deadline
    with suppress(FileNotFoundError):
        _deadline = _map(folder / _NAME)


def bound() -> bool:
    """Whether a deadline binds this rank: other machines may continue its run, or have done so."""
    return _deadline is not None


def holds() -> bool:
    """Whether this rank may train and publish now."""
    found = _deadline
    return found is None or (now() < found.uptime and time.time() < found.wall)


def wait() -> None:
    """Return as soon as this rank may train. The launcher ends a rank that may not any more."""
    while not holds():
        time.sleep(WAIT_S)
