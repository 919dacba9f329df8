"""A thread that hears signals even while the main thread is deep in C code.

Python runs a signal handler only when the main thread returns from a collective or the GPU. The
signal's number, however, is written to a pipe at once, and a thread that reads it can act.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

# All that ask a run to end. SIGHUP comes when a terminal is lost; nohup ignores it, and that stays.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
# Those that would end a process without the code 143 before it has anything to save.
SILENT_ENDS = (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
JOIN_S = 5.0
_END = 0  # written to the pipe where signals are
_active: SignalThread | None = None  # handlers belong to the process: one at a time has them


class SignalThread:
    """Catches signals and acts on them in a thread.

    The thread calls `heard(number)` for each signal, and `look()` after it and every `poll_s`.
    `in_main()` runs in the main thread as soon as that is back in Python.
    """

    def __init__(
        self,
        heard: Callable[[signal.Signals], None],
        look: Callable[[], None],
        in_main: Callable[[], None],
        poll_s: float,
    ) -> None:
        self._heard, self._look, self._in_main = heard, look, in_main
        self._poll_s = poll_s
        self._before: dict[signal.Signals, Any] = {}
        self._closing = self._closed = False
        self._given_back = False
        self._wakes = False
        self._read, self._write = -1, -1
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @property
    def catches(self) -> bool:
        """Whether any signal comes here; handlers that the user installed stay in place."""
        return bool(self._before)

    def start(self) -> None:
        global _active
        self._pid = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        if threading.current_thread() is threading.main_thread():
            if _active is not None:  # left by a manager that was not finished
                _active.close()
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler, end_unsaved):
                    self._before[number] = before
                    signal.signal(number, self._on_signal)
            if self._before:
                _active = self
                self._wakes = self._take_wakeup()
        self._thread.start()

    def wake_main(self) -> None:
        """Have `in_main` called soon, even if the main thread waits in a system call."""
        main = threading.main_thread().ident
        usable = [number for number in self._before if number != signal.SIGINT]  # that one counts
        if main is not None and usable and not self._closed:
            signal.pthread_kill(main, usable[0])

    def close(self) -> None:
        """Give the signals back and let the thread end, once it has heard those that came."""
        global _active
        # A forked child has this object, but neither its thread nor the right to end it.
        if self._closing or self._pid != os.getpid():
            return
        self._closing = True
        if threading.current_thread() is threading.main_thread():
            self._give_back()
        if _active is self:
            _active = None
        if self._write >= 0:
            with contextlib.suppress(OSError):
                os.write(self._write, bytes([_END]))
        join(self._thread)
        self._closed = True

    def abandon(self) -> None:
        """In a forked child: give the signals back, without a thread to end."""
        self._closed = True
        self._give_back()

    def _take_wakeup(self) -> bool:
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before == -1:
            return True
        signal.set_wakeup_fd(before)  # an event loop's: then we hear when Python hears
        return False

    def _give_back(self) -> None:
        self._given_back = True
        if self._wakes:
            current = signal.set_wakeup_fd(-1)
            self._wakes = False  # from here on the handler writes what comes
            if current not in (-1, self._write):
                signal.set_wakeup_fd(current)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # No lock and no print in here: it may interrupt either.
        if not self._wakes and not self._closed:
            with contextlib.suppress(OSError):
                os.write(self._write, bytes([number]))
        self._in_main()

    def _run(self) -> None:
        try:
            while not self._closed:
                select.select([self._read], [], [], self._poll_s)
                with contextlib.suppress(BlockingIOError):
                    for number in os.read(self._read, 64):
                        if number == _END:
                            self._closed = True
                        elif number in SIGNALS:
                            self._heard(signal.Signals(number))
                if not self._closed:
                    self._look()
        finally:
            if self._given_back:  # else a signal would be written to a file that has its number now
                read, write = self._read, self._write
                self._read = self._write = -1
                os.close(read)
                os.close(write)


def join(thread: threading.Thread) -> None:
    """Wait for a thread that was told to end, and that may be waiting for the store's answer.

    A thread that returns from C++ while the interpreter shuts down aborts the whole process
    ("terminate called without an active exception"). A store that no longer answers is not waited
    for.
    """
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(JOIN_S)


def end_unsaved(number: int, _frame: FrameType | None) -> None:
    """Signal handler of a process that has nothing to save yet."""
    sys.exit(128 + signal.SIGTERM)


def end_on_signals(*numbers: signal.Signals) -> None:
    """Let these signals end this process with code 143, unless somebody handles them.

    By default SIGUSR1, which Slurm may send, would end it with 138.
    """
    _replace(numbers, signal.SIG_DFL, end_unsaved)


def end_no_more(*numbers: signal.Signals) -> None:
    """Undo `end_on_signals`."""
    _replace(numbers, end_unsaved, signal.SIG_DFL)


def _replace(numbers: Iterable[signal.Signals], before: Any, now: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) == before:
                signal.signal(number, now)


def _in_child() -> None:
    """Drop the handlers and the pipe that a fork inherits: its signals are not meant for us."""
    global _active
    active, _active = _active, None
    if active is not None:
        with contextlib.suppress(ValueError):
            active.abandon()


os.register_at_fork(after_in_child=_in_child)
