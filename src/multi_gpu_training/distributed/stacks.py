"""Python stacks of other ranks: asked for with a signal, read from the file they write."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.distributed.heartbeat import (
    STACKS_SIGNAL,
    describe,
    own_line,
    stacks_file,
)

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
# Where a rank stands that waits for the others.
_WAITS_IN = ("/torch/distributed/", "/multi_gpu_training/distributed/placement.py")
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Stack:
    """Of a rank's main thread, innermost first: (file, line, function)."""

    frames: tuple[tuple[str, int, str], ...]

    @property
    def line(self) -> str:
        """The innermost line of the user's own code."""
        if not self.frames:
            return ""
        return describe(*self.frames[own_line([file for file, _, _ in self.frames])])

    @property
    def waits(self) -> bool:
        """Whether it stands in an exchange with other ranks, or in a backward, which has some."""
        file, _, function = self.frames[0] if self.frames else ("", 0, "")
        return function == _BACKWARD or any(part in file for part in _WAITS_IN)


def read_stack(text: str) -> Stack | None:
    """The main thread's newest stack in what a rank wrote; None where it did not answer."""
    main = text.partition("\n")[0].removeprefix("main ")
    frames: list[tuple[str, int, str]] = []
    newest: tuple[tuple[str, int, str], ...] = ()
    ours = False
    for line in [*text.splitlines(), "Thread 0x0"]:
        thread = _THREAD.match(line)
        if thread:
            newest = tuple(frames) if ours and frames else newest
            ours, frames = int(thread[1], 16) == int(main or "0", 16), []
        frame = _FRAME.match(line)
        if frame and frame[2].isdecimal():
            frames.append((frame[1], int(frame[2]), frame[3]))
    return Stack(newest) if newest else None


def collect(
    pids: Mapping[int, int], error_files: Mapping[int, str], patience_s: float = 2.0
) -> dict[int, Stack]:
    """Stacks of those ranks that answer within `patience_s`."""
    sizes = {rank: _size(error_files[rank]) for rank in pids}
    for rank, pid in pids.items():
        if sizes[rank]:  # it listens
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STACKS_SIGNAL)
    found: dict[int, Stack] = {}
    deadline = time.monotonic() + patience_s
    while len(found) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank in pids.keys() - found.keys():
            file = stacks_file(error_files[rank])
            before, now = sizes[rank], _size(error_files[rank])
            if before and now == _settled(file, now) > before:
                stack = read_stack(file.read_text(errors="replace"))
                if stack is not None:
                    found[rank] = stack
    return found


def _settled(file: Path, size: int) -> int:
    """Its size a moment later: what is being written is not read."""
    time.sleep(0.02)
    return file.stat().st_size


def _size(error_file: str) -> int:
    with suppress(OSError):
        return stacks_file(error_file).stat().st_size
    return 0
