"""The launcher's part when a run is asked to end: pass it on, wait as long as was promised.

A signal is noted while ranks run and acted on between two looks at them; raised at once where the
launcher only waits. Ranks that save on a signal have declared how long they need for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException

from multi_gpu_training.distributed import whereabouts

# How ranks end that were asked to: by themselves, or before they could listen.
STOPPED = {
    143: signal.SIGTERM,
    130: signal.SIGINT,
    -signal.SIGTERM: signal.SIGTERM,
    -signal.SIGUSR1: signal.SIGTERM,
}
_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_TOUCHED = (*_CAUGHT, signal.SIGHUP, signal.SIGQUIT)  # by PyTorch's agent


class LauncherSignals:
    """What came for the launcher. `busy()`: ranks run, and somebody looks at `check` soon."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._came: list[signal.Signals] = []

    def install(self) -> None:
        """In place of the handlers that PyTorch's agent installs with each start of ranks: an
        exception out of nowhere could leave it half done."""
        if threading.current_thread() is threading.main_thread():
            for number in _CAUGHT:
                signal.signal(number, self._on_signal)

    def check(self, error_files: Mapping[int, str]) -> None:
        """Raise for a signal that came, here or to one of the ranks."""
        asked = (whereabouts.of_rank(file).asked for file in error_files.values())
        for number in [*self._came[:1], *filter(None, asked)]:
            raise_for(number)

    @property
    def came(self) -> bool:
        """Whether one came to this launcher itself."""
        return bool(self._came)

    def interrupts(self) -> int:
        return self._came.count(signal.SIGINT)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        first = not self._came
        self._came.append(signal.Signals(number))
        if first and not self._busy():
            raise_for(number)


def raise_for(number: int) -> None:
    # Slurm's SIGUSR1 asks for the same as SIGTERM.
    caught = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    raise SignalException(f"{caught.name} for the run", sigval=caught)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """The caller's signal handlers are back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _TOUCHED}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def ask_ranks(
    pids: Iterable[int],
    number: signal.Signals,
    error_files: Mapping[int, str],
    spare_s: float,
    interrupts: Callable[[], int],
) -> signal.Signals:
    """Let the ranks save and end, in the time they have declared; what to end the rest with.

    A second Ctrl-C ends the waiting, and so does a rank that fails over it.
    """
    pids = list(pids)
    deadline = time.monotonic() + spare_s + longest_grace(error_files)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)  # not to its children: it needs them to save
    while time.monotonic() < deadline and interrupts() < 2:
        if wait_for_stopped(pids, time.monotonic() + 0.5):
            return number
    return signal.SIGKILL


def wait_for_stopped(pids: Iterable[int], deadline: float) -> bool:
    """Whether all ended, or one of them otherwise than it was asked to, before the deadline."""
    pids = list(pids)
    while True:
        codes = [exit_code(pid) for pid in pids]
        ended = {code for code in codes if code is not None}
        if None not in codes or not ended <= STOPPED.keys() | {0}:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def let_stop(pids: Iterable[int], grace_s: float) -> None:
    """Where a rank ended because it was asked to, let the others do the same."""
    if any(exit_code(pid) in STOPPED for pid in pids):
        wait_for_stopped(pids, time.monotonic() + grace_s)


def check_stopped(failures: Iterable[ProcessFailure], bystanders: Collection[int]) -> None:
    """Raise as for a signal to the launcher where the ranks had one, past it."""
    codes = {f.exitcode for f in failures if f.local_rank not in bystanders}
    if codes and codes <= STOPPED.keys():
        raise_for(min(STOPPED[code] for code in codes))


def longest_grace(error_files: Mapping[int, str]) -> float:
    return max((whereabouts.of_rank(file).grace_s for file in error_files.values()), default=0.0)


def exit_code(pid: int) -> int | None:
    """Of a child, None while it runs; it is left to be waited for. Negative for a signal."""
    try:
        info: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # waited for already
    if info is None:
        return None
    return int(info.si_status if info.si_code == os.CLD_EXITED else -info.si_status)
