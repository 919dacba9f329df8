"""What an injected fault does, and how often it has done so."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

Kind = Literal[
    "exception", "exit", "sigkill", "sigstop", "sleep", "slow", "nan", "oom", "disk_full"
]
EXIT_CODE = 17


class InjectedFault(RuntimeError):
    """Raised on purpose."""


def strike(kind: Kind, name: str, seconds: float | None = None) -> None:
    """Fail in that way; `nan` is left to the caller, who has the numbers."""
    if kind == "exception":
        raise InjectedFault(f"injected: {name}")
    if kind == "oom":
        raise torch.OutOfMemoryError(f"CUDA out of memory (injected: {name})")
    if kind == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "exit":
        os._exit(EXIT_CODE)
    if kind in ("sigkill", "sigstop"):
        os.kill(os.getpid(), getattr(signal, kind.upper()))
    if kind == "slow":
        time.sleep(0.5 if seconds is None else seconds)
    if kind == "sleep":
        end = math.inf if seconds is None else time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))


class Memory:
    """Counts strikes, here and in a file that outlives the process: one byte each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.here = 0

    @property
    def count(self) -> int:
        if self.path is not None:
            with suppress(OSError):
                return max(self.here, self.path.stat().st_size)
        return self.here

    def add(self, lasting: bool) -> None:
        """On a full disk it is remembered by this process alone."""
        self.here += 1
        if not lasting or self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab") as file:
                file.write(b"x")
