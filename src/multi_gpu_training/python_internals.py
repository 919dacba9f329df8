"""Private names of CPython's standard library, in one place.

Each has a test in tests/test_python_internals.py that fails loudly when Python renames it. This
module must not import torch: launchers use it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import subprocess
import sys
import threading
from types import FrameType
from typing import Any, cast


def frames_by_thread() -> dict[int, FrameType]:
    """The innermost frame of every thread, by its id: where a rank stands that hangs."""
    return sys._current_frames()


def wait_for_threads() -> None:
    """Wait for threads that are not daemons, as the interpreter does before it exits."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Run what was registered with `atexit`, for a process that leaves by `os._exit`."""
    atexit._run_exitfuncs()


def interpreter_flags() -> list[str]:
    """This interpreter's own flags (-W, -X, -O ...), for a child that is to run the same way."""
    return cast(list[str], subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]


def process_settings() -> dict[str, Any]:
    """What multiprocessing knows of this process; `tempdir` is where its sockets are made."""
    return cast(dict[str, Any], multiprocessing.current_process()._config)  # type: ignore[attr-defined]
