"""The scripts that disturb trainings judge them rightly."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multi_gpu_training.faults.injection import fail_at

FOLDER = str(Path(__file__).parent.parent.parent / "benchmarks")


class Recorded:
    """A training as far as its events tell."""

    def __init__(self, *events: tuple[float, Any]) -> None:
        self._events = events

    def events(self) -> list[dict[str, Any]]:
        found = []
        for when, what in self._events:
            if isinstance(what, int):
                found.append({"event": "step", "time": when, "step": what, "attempt": 0})
            else:
                step, attempt = what
                log = {"event": "log", "message": "resumed from x", "step": step}
                found.append({**log, "time": when, "attempt": attempt})
        return found


def test_what_a_kill_cost_is_read_from_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import kills

    steps = [(float(step), step) for step in range(1, 9)]
    # Killed at 8.5 and, before anything was resumed, at 9; then a rank at 13.5.
    again = [(10.0, (5, 0)), (11.0, 6), (12.0, 7), (13.0, 8), (14.0, (5, 1)), (15.0, 6)]
    found: list[dict[str, Any]] = [
        {"kind": "tree", "time": 8.5},
        {"kind": "launcher", "time": 9.0},
        {"kind": "rank", "time": 13.5},
    ]
    kills.repeats(Recorded(*steps, *again), found)
    assert [kill["resumed_from"] for kill in found] == [5, 5, 5]
    assert [kill["repeated"] for kill in found] == [3, 3, 3]
    assert [kill["by"] for kill in found] == ["resume", "resume", "supervision"]
    # The first was not recovered from before the second came.
    assert [kill["again_s"] for kill in found] == [None, 2.0, 1.5]


def test_a_run_that_begins_anew_has_resumed_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import kills

    kill: dict[str, Any] = {"kind": "tree", "time": 2.5}
    kills.repeats(Recorded((1.0, 1), (2.0, 2), (5.0, 1), (6.0, 2)), [kill])
    assert (kill["resumed_from"], kill["repeated"], kill["again_s"]) == (0, 2, 2.5)
    never: dict[str, Any] = {"kind": "tree", "time": 2.5}
    kills.repeats(Recorded((1.0, 1), (2.0, 2)), [never])
    assert never["resumed_from"] == -1 and never["again_s"] is None


def test_faults_that_are_drawn_can_be_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import soak

    chance = random.Random(0)
    drawn = [soak.inside_fault(kind, chance, 20) for kind in soak.INSIDE for _ in range(50)]
    assert all(20 < fail_at(**fault).step <= 35 for fault in drawn)
    assert {fault["phase"] for fault in drawn} == set(soak.PHASES)


FAILING = """
import sys, time
from pathlib import Path
for line in sys.stdin:
    try:
        (Path(line.strip()) / "file").write_text("x")
        print("written", round(time.time() / 1e9), flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is missing")
def test_calls_fail_and_clocks_jump_only_where_and_while_a_campaign_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    from failing_calls import ALL, NEW, FailingCalls

    (tmp_path / "it" / "runs").mkdir(parents=True)
    calls = FailingCalls.at(tmp_path / "it")
    with subprocess.Popen(
        [sys.executable, "-c", FAILING],
        env={**os.environ, **calls.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None and program.stdout is not None

        def write(folder: str) -> str:
            assert program.stdin is not None and program.stdout is not None
            print(tmp_path / folder, file=program.stdin, flush=True)
            return program.stdout.readline().strip()

        before = write("it/runs")
        assert before.startswith("written ")
        calls.fail(errno.EIO, 1, ALL)
        assert write("it/runs") == str(errno.EIO)
        assert write("it") == before
        calls.fail(errno.ENOSPC, 1, NEW)
        assert write("it/runs") == str(errno.ENOSPC)
        calls.work()
        calls.jump(5_000_000_000)
        assert write("it/runs") not in (before, str(errno.ENOSPC))
        program.stdin.close()
        assert program.wait(30) == 0
