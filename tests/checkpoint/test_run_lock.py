"""One run at a time in a folder, and a dead one is in nobody's way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training.checkpoint import run_lock
from multi_gpu_training.checkpoint.run_lock import RunLock, owner
from multi_gpu_training.errors import ConfigError

# Takes the lock, starts a child by fork that outlives it, as a loader worker may, and waits.
HOLDER = """
import os, sys, time
from pathlib import Path
from multi_gpu_training.checkpoint.run_lock import RunLock
held = RunLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(20)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_second_run_is_told_who_is_there_and_a_killed_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "custom" / "taken"
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(ConfigError) as refused:
                RunLock(folder, grace_s=0.1)
            for word in (str(holder.pid), socket.gethostname(), "--run-name", str(folder)):
                assert word in str(refused.value)
            by = owner(folder)
            assert by is not None and by["pid"] == holder.pid
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait(30)
        try:
            begun = time.monotonic()
            RunLock(folder).release()  # although the child is still alive
            assert time.monotonic() - begun < 1.0
            assert owner(folder) is None
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_second_training_changes_nothing_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock.RunLock.__init__, "__defaults__", (0.1,))
    folder = tmp_path / "custom" / "run"
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        os.kill(child, signal.SIGKILL)
        try:
            with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
                manager_for(tmp_path, run_name="run", resume="auto").fit(line(), points())
            assert not (folder / "config.yaml").exists()
        finally:
            holder.kill()
    manager_for(tmp_path, run_name="run").fit(line(), points(), loss_fn=squares, optimizer=sgd)
    assert owner(folder) is None  # the end of a run gives it back


def test_a_process_does_not_lock_itself_out(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.release()
    first.release()
    assert owner(tmp_path) is not None
    second.release()
    assert owner(tmp_path) is None


def test_a_file_system_without_locks_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    RunLock(tmp_path).release()
    assert "without locks" in capsys.readouterr().err
