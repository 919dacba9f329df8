"""Temporary folders of killed launchers do not pile up; those of living ones are left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from faults.kit import PATIENCE_S, Forked

from multi_gpu_training.distributed.cleanup import (
    PREFIX,
    Scratch,
    keep_sockets_in,
    share_scratch,
    sweep,
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold(parent: str) -> None:
    tempfile.tempdir = parent
    Scratch()
    time.sleep(PATIENCE_S)


def test_the_next_one_removes_what_a_killed_one_left(temporary: Path) -> None:
    owner = Forked(hold, str(temporary), cwd=temporary / "cwd")
    deadline = time.monotonic() + PATIENCE_S
    while not (found := list(temporary.glob(f"{PREFIX}*/.lock"))):
        assert time.monotonic() < deadline and not owner.ended, owner
        time.sleep(0.01)
    with Scratch() as mine:
        assert found[0].exists(), "its owner lives"
    os.kill(owner.pid, signal.SIGKILL)
    owner.end_of_run()
    with Scratch() as mine:
        assert list(temporary.glob(f"{PREFIX}*")) == [mine]
    assert list(temporary.glob(f"{PREFIX}*")) == []


def test_a_folder_that_is_just_being_made_is_left_alone(temporary: Path) -> None:
    young, old = temporary / f"{PREFIX}young", temporary / f"{PREFIX}old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    sweep(temporary)
    assert young.exists() and not old.exists()


def test_workers_keep_their_sockets_in_it_where_the_path_is_short_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: dict[str, str] = {}
    monkeypatch.setattr(multiprocessing.current_process(), "_config", config)
    keep_sockets_in(Path("/" + "x" * 90))
    assert config == {}
    share_scratch(None)
    share_scratch("/tmp/torch/1/error.json")
    assert config == {}
    share_scratch(f"/tmp/{PREFIX}abc/run_1/attempt_0/1/error.json")
    keep_sockets_in(Path("/tmp/another"))
    assert config == {"tempdir": f"/tmp/{PREFIX}abc"}
