"""A wish to stop, agreed on by all ranks for one boundary, without a collective.

Every rank passes the same boundaries in the same order: the end of each step, the end of each
evaluation. A small thread beside training listens for a signal, here and in the store that the
ranks met at. Once there is one,

    each thread holds its rank at the next boundary and publishes that boundary's number
    when all are published, the largest is where everybody stops; ranks go on until there

A rank that is held waits for threads alone, never for another rank's training: no deadlock,
however far the ranks are apart. Without a signal a boundary costs an uncontended lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from multi_gpu_training.distributed.placement import Placement

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
NAMES = {signal.SIGINT: "Ctrl-C"}
POLL_S = 0.1
_NEVER = 2**62
_ASKED = "asked"


def exit_code(number: int) -> int:
    """130 for Ctrl-C, 143 for everything else that asks a run to end."""
    return 130 if number == signal.SIGINT else 143


class Control:
    """One rank's end of the channel. Made by all ranks together; `listen` starts it."""

    def __init__(self, placement: Placement, grace_s: float) -> None:
        self.grace_s = grace_s
        self.reached = False  # alike on all ranks: the agreed boundary is behind us
        self._main = placement.is_main
        # A manager before this one, in the same processes, may have left its wish in the store.
        token = placement.broadcast_json(uuid.uuid4().hex)
        self._store = c10d.PrefixStore(f"mgt/control/{token}", _store_of(placement))
        self._keys = [f"rank{rank}" for rank in range(placement.dp_size)]
        self._key = self._keys[placement.dp_rank]
        self._pid = os.getpid()
        self._signal: signal.Signals | None = None
        self._interrupts = 0
        self._passed = 0
        self._held_at: int | None = None
        self._stop_at: int | None = None
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._agreed = threading.Event()
        self._ended = threading.Event()
        self._store_is_gone = False
        self._before: dict[signal.Signals, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="control", daemon=True)

    # For the loop

    @property
    def asked(self) -> signal.Signals | None:
        """The signal that came, here or elsewhere."""
        return self._signal

    @property
    def stops_next(self) -> bool:
        """Whether the boundary ahead is the last one: what is under way may be left."""
        return self._stop_at is not None and self._passed + 1 == self._stop_at

    def cross(self) -> bool:
        """Pass a boundary; True if all ranks stop here. Every rank must call it alike."""
        with self._lock:
            if self._held_at is None:
                self._passed += 1
                return False
        self._agreed.wait()  # the thread ends the process when grace_s is over
        assert self._stop_at is not None
        self._passed += 1
        self.reached = self._passed >= self._stop_at
        return self._passed == self._stop_at

    # Its life

    def listen(self) -> None:
        """Catch signals from now on. A handler of the user's own stays."""
        self._thread.start()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            earlier = getattr(before, "__self__", None)
            if isinstance(earlier, Control):  # of a manager that was not finished
                before = earlier._before[number]
            if before in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = before
                signal.signal(number, self._on_signal)
        if self._before:
            declare_grace(self.grace_s)

    def leave(self) -> None:
        """Pass no boundary any more: whoever stops now need not wait for this rank."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if self._held_at is None and not self._store_is_gone:
                with contextlib.suppress(RuntimeError):
                    self._store.set(self._key, str(_NEVER))
        if self._stop_at is None:
            self._stop_at = _NEVER
            self._agreed.set()

    def close(self) -> None:
        """Leave, and give the signals back."""
        self.leave()
        with contextlib.suppress(ValueError):  # not in the main thread
            for number, before in self._before.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, before)
        if self._before:
            declare_grace(None)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # No lock and no print in here: it may interrupt either.
        if os.getpid() != self._pid:  # a fork of this process, which inherited the handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._signal is None:
            self._signal = signal.Signals(number)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 2:
                self._exit("Ctrl-C twice: stopped now", 130)
            elif self._main:
                os.write(2, b"Ctrl-C: saving after this step; once more stops now\n")

    # The thread

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            if not self._store_is_gone:
                try:
                    self._look()
                except RuntimeError:  # with the rank that held it
                    self._store_is_gone = True
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._give_up()

    def _look(self) -> None:
        if self._stop_at is not None:
            return
        if self._held_at is None:
            if self._signal is None:
                if not self._store.check([_ASKED]):
                    return
                self._signal = signal.Signals(int(self._store.get(_ASKED)))
            self._hold()
        if self._store.check(self._keys):
            self._stop_at = max(int(self._store.get(key)) for key in self._keys)
            self._signal = signal.Signals(int(self._store.get(_ASKED)))
            self._agreed.set()

    def _hold(self) -> None:
        assert self._signal is not None
        self._deadline = time.monotonic() + self.grace_s
        if not self._store.check([_ASKED]):
            self._store.set(_ASKED, str(int(self._signal)))
        with self._lock:
            self._held_at = self._passed + 1
        self._store.set(self._key, str(self._held_at))

    def _give_up(self) -> None:
        assert self._signal is not None
        name = NAMES.get(self._signal, self._signal.name)
        text = (
            f"{name}: not done within grace_s={self.grace_s:g} s; ended without a new checkpoint, "
            "earlier ones are untouched"
        )
        self._exit(text if self._main else "", exit_code(self._signal))

    def _exit(self, text: str, code: int) -> None:
        """End this process at once; loader workers die with it."""
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode() if text else b"")
        os._exit(code)


def _store_of(placement: Placement) -> Any:
    """A connection of its own: on a shared one, a rank that waits would make the thread wait."""
    if placement.dp_size == 1:
        return torch.distributed.HashStore()  # type: ignore[attr-defined]
    return c10d._get_default_store().clone()  # type: ignore[attr-defined]


def declare_grace(grace_s: float | None) -> None:
    """Tell the launcher of this rank how long to wait for it after a signal; None: not at all."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    with contextlib.suppress(OSError):
        file = _grace_file(error_file)
        if grace_s is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(repr(grace_s))


def declared_grace(error_file: str) -> float:
    """What the rank with this error file has declared; 0 where it has not."""
    with contextlib.suppress(OSError, ValueError):
        return float(_grace_file(error_file).read_text())
    return 0.0


def _grace_file(error_file: str) -> Path:
    return Path(f"{error_file}.grace")
