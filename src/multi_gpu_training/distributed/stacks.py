"""Python stacks of ranks: sampled once per second, or dumped on request of the launcher.

Each rank samples where its main thread is and keeps that line in its progress slot, which the
launcher can read even after the rank was stopped. Sent a signal, a rank writes the stacks of all
its threads to a file. That needs no Python, so a rank answers in the middle of a collective or a
kernel.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sysconfig
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.distributed.progress_slot import note_line
from multi_gpu_training.portability import QUIET_SIGNAL
from multi_gpu_training.python_internals import frames_by_thread

SAMPLE_EVERY_S = 1.0
STACKS_SIGNAL = QUIET_SIGNAL
PACKAGE = f"{Path(__file__).parents[1]}/"
STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
INSTALLED = ("/site-packages/", "/dist-packages/")  # in this or any other environment
_RECIPES = PACKAGE + "recipes/"
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
# A rank whose innermost frame is in here waits for other ranks.
_WAITS_IN = ("/torch/distributed/", "/multi_gpu_training/distributed/placement.py")
_BACKWARD = "_engine_run_backward"

Frame = tuple[str, int, str]  # file, line, function

_sampler: threading.Thread | None = None
_file = None


@dataclass(frozen=True)
class Stack:
    """The frames of a rank's main thread, innermost first."""

    frames: tuple[Frame, ...]

    @property
    def line(self) -> str:
        """The innermost line of the user's own code."""
        if not self.frames:
            return ""
        file, line, function = self.frames[_own_frame([file for file, _, _ in self.frames])]
        return f"{file}:{line} in {function}"

    @property
    def waits(self) -> bool:
        """Whether it is in an exchange with other ranks, or in a backward, which contains some."""
        file, _, function = self.frames[0] if self.frames else ("", 0, "")
        return function == _BACKWARD or any(part in file for part in _WAITS_IN)


def _own_frame(files: list[str]) -> int:
    """Which of the files of a stack, innermost first, a user wants to hear about."""
    for index, file in enumerate(files):
        library = file.startswith((PACKAGE, "<", *STANDARD)) or any(p in file for p in INSTALLED)
        if file.startswith(_RECIPES) or not library:
            return index
    ours = [index for index, file in enumerate(files) if file.startswith(PACKAGE)]
    return ours[0] if ours else 0


def is_package_or_torch(file: str) -> bool:
    """Whether a frame's file is this package's, but for recipes, or torch's."""
    if file.startswith(PACKAGE):
        return not file.startswith(_RECIPES)
    return any(f"{place}torch/" in file for place in INSTALLED)


# In the rank


def start_sampling(error_file: str | None) -> None:
    """Sample this process once per second, and dump its stacks beside `error_file` on request."""
    global _sampler, _file
    if error_file is None or _sampler is not None:
        return
    with suppress(OSError, RuntimeError, ValueError):
        _file = _stacks_file(error_file).open("w")
        _file.write(f"main 0x{threading.main_thread().ident:016x}\n")
        _file.flush()
        faulthandler.register(STACKS_SIGNAL, file=_file, all_threads=True, chain=False)
    _sampler = threading.Thread(target=_sample_forever, name="heartbeat", daemon=True)
    _sampler.start()


def _sample_forever() -> None:
    while True:
        time.sleep(SAMPLE_EVERY_S)
        note_line(Stack(tuple(sample())).line)


def sample() -> list[Frame]:
    """Where the main thread of this process is, innermost frame first."""
    frame = frames_by_thread().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


# In the launcher


def collect(
    pids: Mapping[int, int], error_files: Mapping[int, str], patience_s: float = 2.0
) -> dict[int, Stack]:
    """The stacks of those ranks that answer within `patience_s`."""
    sizes = {rank: _size(error_files[rank]) for rank in pids}
    for rank, pid in pids.items():
        if sizes[rank]:  # without a handler the signal would kill the rank
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STACKS_SIGNAL)
    found: dict[int, Stack] = {}
    deadline = time.monotonic() + patience_s
    while len(found) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank in pids.keys() - found.keys():
            file = _stacks_file(error_files[rank])
            before, now = sizes[rank], _size(error_files[rank])
            if before and now == _settled(file) > before:
                stack = read_stack(file.read_text(errors="replace"))
                if stack is not None:
                    found[rank] = stack
    return found


def read_stack(text: str) -> Stack | None:
    """The main thread's newest stack in what a rank wrote; None where it did not answer."""
    main = text.partition("\n")[0].removeprefix("main ")
    frames: list[Frame] = []
    newest: tuple[Frame, ...] = ()
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


def _stacks_file(error_file: str) -> Path:
    return Path(error_file).with_name("stacks.txt")


def _settled(file: Path) -> int:
    """Its size a moment later: a file that is still growing is not read yet."""
    time.sleep(0.02)
    return file.stat().st_size


def _size(error_file: str) -> int:
    with suppress(OSError):
        return _stacks_file(error_file).stat().st_size
    return 0
