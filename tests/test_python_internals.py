"""Private names of CPython still do what the package uses them for."""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing.util import get_temp_dir
from pathlib import Path

from multi_gpu_training import python_internals


def test_frames_show_where_the_main_thread_is() -> None:
    frame = python_internals.frames_by_thread()[threading.main_thread().ident or 0]
    assert frame.f_code.co_name == "frames_by_thread"


def run(program: str, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_threads_and_exit_functions_end_before_a_hard_exit() -> None:
    program = """
import atexit, os, threading, time
from multi_gpu_training import python_internals
atexit.register(print, "at exit", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
python_internals.wait_for_threads()
python_internals.run_exit_functions()
os._exit(0)
"""
    assert run(program).split("\n")[:2] == ["thread", "at exit"]


def test_interpreter_flags_are_those_of_this_process() -> None:
    program = "from multi_gpu_training import python_internals as p; print(p.interpreter_flags())"
    assert "-O" in run(program, "-O") and "-O" not in run(program)


def test_a_temporary_folder_of_ours_is_used_for_sockets(tmp_path: Path) -> None:
    settings = python_internals.process_settings()
    before = settings.get("tempdir")
    settings["tempdir"] = str(tmp_path)
    try:
        assert get_temp_dir() == str(tmp_path)
    finally:
        settings["tempdir"] = before
