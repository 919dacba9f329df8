"""Whole programs for tests: started as a user starts them, watched, and always ended.

    with Program("-m", "multi_gpu_training", "run", "train.py", cwd=tmp_path) as program:
        program.when(lambda: "Epoch 1" in program.out)
        assert program.end_of_run() == 0

Each carries a mark in its environment, which every process it starts inherits: that is how
those it leaves behind are found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

MARK = "MGT_TEST_MARK"
# Rank variables of whoever runs the tests are no business of the programs.
_NOT_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MGT_DEBUG")
_QUICK_START = str(Path(__file__).parent / "quick_start")


def variables() -> dict[str, str]:
    """The environment, name by name: pytest changes it while threads start programs."""
    found = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in found.items() if value is not None}


def quickly(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which a training starts a third sooner (quick_start/sitecustomize.py)."""
    found = {"OMP_NUM_THREADS": "1", **(variables() if env is None else env)}
    if "PYTEST_VERSION" in os.environ:  # benchmarks measure the start that users have
        path = [_QUICK_START, *filter(None, [found.get("PYTHONPATH")])]
        found["PYTHONPATH"] = os.pathsep.join(path)
    return found


class Program:
    """`python ARGUMENTS` in `cwd`; it leads a session, so that Ctrl-C can be imitated."""

    def __init__(
        self, *arguments: object, cwd: Path, env: dict[str, str] | None = None, **popen: Any
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.command = [sys.executable, *map(str, arguments)]
        cwd.mkdir(parents=True, exist_ok=True)
        self._out, self._err = (cwd / f"{name}-{self.mark}.txt" for name in ("out", "err"))
        inherited = {k: v for k, v in variables().items() if k not in _NOT_INHERITED}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                self.command,
                cwd=cwd,
                env=quickly({**inherited, MARK: self.mark, **(env or {})}),
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **popen},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def alive(self) -> list[psutil.Process]:
        """Every living process of this program: the one started here and all that came of it."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def children(self) -> list[psutil.Process]:
        return [process for process in self.alive() if process.pid != self.pid]

    def when(self, happened: Callable[[], Any], within_s: float = 120) -> Program:
        """Wait until `happened()`; at the deadline or its own end the program is closed."""
        deadline = time.monotonic() + within_s
        while not happened():
            ended = self.process.poll()
            if ended is not None and not happened():
                shown = repr(self)
                self.close()
                raise AssertionError(f"ended with code {ended} too early\n{shown}")
            if time.monotonic() > deadline:
                shown = repr(self)
                self.close()
                raise AssertionError(f"did not happen within {within_s} s\n{shown}")
            time.sleep(0.05)
        return self

    def end_of_run(self, within_s: float = 120) -> int:
        """Its exit code, as a shell shows it."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {within_s} s\n{self}") from None
        return code if code >= 0 else 128 - code

    def nothing_left(self, within_s: float = 0) -> bool:
        deadline = time.monotonic() + within_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def send(self, number: signal.Signals) -> float:
        """Send a signal to the program alone; when that was."""
        self.process.send_signal(number)
        return time.monotonic()

    def send_to_group(self, number: signal.Signals) -> float:
        """Send a signal as a terminal does, to all in the foreground; when that was."""
        os.killpg(self.pid, number)
        return time.monotonic()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all that is left of it."""
        for _attempt in range(100):
            left = self.alive()
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            if not left:
                break
            time.sleep(0.05)
        self.process.wait(5)

    def __repr__(self) -> str:
        def tail(text: str) -> str:
            return text[-3000:]

        return f"$ {' '.join(self.command)}\n{tail(self.out)}\n--- stderr\n{tail(self.err)}"

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.environ().get(MARK) == self.mark
        except (psutil.Error, OSError):
            return False


@dataclass(frozen=True)
class Said:
    """What a command line answered."""

    code: int
    out: str
    err: str


def mgt_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> Said:
    """`mgt WORDS` in this very process: no second to start it. Use it where no rank is started."""
    import multi_gpu_training
    from multi_gpu_training.cli import main

    command = ["mgt", *map(str, words)]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        if not hasattr(sys.modules["__main__"], "__file__"):
            # A test worker is no file; without one, commands take it for an interactive session.
            file = multi_gpu_training.__file__
            patch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "orig_argv", [sys.executable, *command])
        patch.setattr(sys, "excepthook", sys.excepthook)
        try:
            main()
            code: object = 0
        except SystemExit as stop:
            code = stop.code
    said = capsys.readouterr()
    return Said(code if isinstance(code, int) else int(code is not None), said.out, said.err)
