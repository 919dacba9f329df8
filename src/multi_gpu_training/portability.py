"""What Linux offers and macOS does not, with what is used there instead.

macOS is untested: nobody has run the package there. The tests take away the names that it lacks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# A signal that nobody else uses: SIGUSR1 and SIGUSR2 belong to Slurm and submitit.
QUIET_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_PR_SET_PDEATHSIG = 1

_ended: dict[int, int] = {}  # exit codes of children, where looking at one means reaping it


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def kill_with_parent() -> None:
    """Have the kernel kill this process with its parent, or a thread where it cannot."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def drop_from_page_cache(descriptor: int, start: int, size: int) -> None:
    """Start writing to the disk, and leave the page cache to those who read."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def exit_code(pid: int) -> int | None:
    """The exit code of a child, None while it runs; negative for a signal. Where the system can,
    the child is left to be waited for, so that nobody else gets its number."""
    try:
        if hasattr(os, "waitid"):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        if pid not in _ended:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _ended[pid] = os.waitstatus_to_exitcode(status)
        return _ended.get(pid)
    except ChildProcessError:
        return 0  # somebody else has waited for it


def peak_memory_bytes() -> int:
    """The most memory that this process has held."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def process_state(pid: int) -> str:
    """The kernel's letter for a process: T is stopped, D stuck in the kernel, Z a zombie. Empty:
    there is no such process."""
    if sys.platform == "linux":
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b") ")[2][:1].decode()
        return ""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return ""
    return {psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_STOPPED: "T"}.get(status, "R")
