"""Signals that ask the launcher to end a run.

A handler only notes what came: an exception out of nowhere could leave an engine half done. The
launcher looks at the notes between two looks at the ranks, and wherever it waits.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# One Ctrl-C may come twice: `timeout -s INT` sends it to its child, then to the whole group.
ONE_PRESS_S = 0.1
_UNLESS_IGNORED = (signal.SIGHUP, signal.SIGQUIT)  # nohup ignores SIGHUP on purpose


class AskedToEnd(Exception):
    """The run was asked to end by signal `number`: SIGINT, or SIGTERM for all others."""

    def __init__(self, number: int) -> None:
        # Slurm's SIGUSR1 asks for the same as SIGTERM.
        self.number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        super().__init__(f"{self.number.name} for the run")


class LauncherSignals:
    """Notes signals once an engine listens; the caller's handlers are back after the block."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[signal.Signals, Any] = {}
        self._interrupted_at = -ONE_PRESS_S

    @property
    def interrupts(self) -> int:
        """How often Ctrl-C was pressed."""
        return self._came.count(signal.SIGINT)

    def check(self) -> None:
        """Raise AskedToEnd if a signal has come."""
        if self._came:
            raise AskedToEnd(self._came[0])

    def pause(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.1, left))

    def listen(self) -> None:
        """Note signals from now on. Only for an engine whose ranks are other processes."""
        # Python lets the main thread alone set handlers; elsewhere signals stay the caller's.
        if threading.current_thread() is threading.main_thread() and not self._before:
            for number in (*_ALWAYS, *_UNLESS_IGNORED):
                before = signal.getsignal(number)
                if number in _UNLESS_IGNORED and before is signal.SIG_IGN:
                    continue
                self._before[number] = before
                signal.signal(number, self._note)

    def __enter__(self) -> LauncherSignals:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._interrupted_at < ONE_PRESS_S:
                return
            self._interrupted_at = now
        self._came.append(number)
