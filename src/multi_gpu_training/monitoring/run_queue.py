"""How long this thread was ready to run but had no core: other work on the machine, not its own."""

from __future__ import annotations

import os
import threading


class RunQueue:
    """Asks Linux. Each thread has its own; where the kernel keeps no count there is None."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._file: int | None = None
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self.waited_s()
        except (OSError, ValueError, IndexError):
            self.close()

    def waited_s(self) -> float | None:
        """Seconds so far that this thread stood in the queue."""
        if self._file is None or threading.get_ident() != self._thread:
            return None
        return int(os.pread(self._file, 80, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()
