"""Processes for faults to happen in: forked from a warm one, so that a start costs no import.

The faults themselves come from `multi_gpu_training.faults.injection`, as a user has them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import CONTEXT

PATIENCE_S = 120


class Forked:
    """`function(*args)` in a process of its own, which leads a process group; its working folder
    is `cwd`, and what it says is in out.txt there."""

    def __init__(self, function: Callable[..., Any], *args: Any, cwd: Path) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.cwd = cwd
        self.process = CONTEXT.Process(target=_work, args=(function, args, str(cwd)))
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()

    def end_of_run(self) -> int:
        """Its exit code, as a shell shows it."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, f"still runs\n{self}"
        code = self.process.exitcode
        return code if code >= 0 else 128 - code

    def __repr__(self) -> str:
        said = self.cwd / "out.txt"
        return said.read_text(errors="replace")[-3000:] if said.exists() else "said nothing"


def _work(function: Callable[..., Any], args: tuple[Any, ...], cwd: str) -> None:
    os.setsid()
    os.chdir(cwd)
    multiprocessing.set_start_method("fork", force=True)  # as in a user's process
    with Path("out.txt").open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    function(*args)
