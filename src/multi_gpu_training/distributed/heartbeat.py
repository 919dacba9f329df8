"""A rank's sign of life outside the collectives: where its main thread is, once a second.

The line goes into the whereabouts, which the launcher can read also after the rank was stopped.
Asked with a signal, the rank writes the stacks of all its threads to a file; that needs no Python,
so that a rank answers in the midst of a collective or a kernel.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path

import multi_gpu_training
from multi_gpu_training.distributed.whereabouts import note_line

EVERY_S = 1.0
# One that nobody uses: SIGUSR1 and SIGUSR2 are Slurm's and submitit's.
STACKS_SIGNAL = signal.SIGRTMIN + 7
PACKAGE = str(Path(multi_gpu_training.__file__).parent) + "/"
_RECIPES = PACKAGE + "recipes/"
LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib"))
_started: threading.Thread | None = None
_file = None


def begin(error_file: str | None) -> None:
    """Start to sample this process, once."""
    global _started, _file
    if error_file is None or _started is not None:
        return
    with suppress(OSError, RuntimeError, ValueError):
        _file = stacks_file(error_file).open("w")
        _file.write(f"main 0x{threading.main_thread().ident:016x}\n")
        _file.flush()
        faulthandler.register(STACKS_SIGNAL, file=_file, all_threads=True, chain=False)
    _started = threading.Thread(target=_sample, name="heartbeat", daemon=True)
    _started.start()


def stacks_file(error_file: str) -> Path:
    return Path(error_file).with_name("stacks.txt")


def _sample() -> None:
    while True:
        time.sleep(EVERY_S)
        lines = sample()
        note_line(describe(*lines[own_line([file for file, _, _ in lines])]) if lines else "")


def sample() -> list[tuple[str, int, str]]:
    """Where the main thread is, innermost first: (file, line, function)."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return lines


def own_line(files: list[str]) -> int:
    """Which of the files of a stack, innermost first, a user wants to hear of."""
    for index, file in enumerate(files):
        if file.startswith(_RECIPES) or not (file.startswith((PACKAGE, "<", *LIBRARIES))):
            return index
    ours = [index for index, file in enumerate(files) if file.startswith(PACKAGE)]
    return ours[0] if ours else 0


def describe(file: str, line: int, function: str) -> str:
    return f"{file}:{line} in {function}"
