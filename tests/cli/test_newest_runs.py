"""A command that lacks its run names the newest ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Said, mgt_here

Mgt = Callable[..., Said]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


def run_of(recipe: str, name: str, when: int) -> None:
    folder = Path("runs", recipe, name)
    (folder / "events").mkdir(parents=True)
    (folder / "config.yaml").write_text("epochs: 1\n")
    for path in (folder / "events", folder):
        os.utime(path, (when, when))


def told(said: Said) -> list[str]:
    assert said.code == 2 and "Missing argument" in said.err
    return [line.strip() for line in said.err.splitlines() if line.startswith("  mgt ")]


def test_the_newest_three_come_first_and_can_be_copied(mgt: Mgt) -> None:
    run_of("image", "old", 1000)
    run_of("image", "newest", 4000)
    run_of("image", "with space", 3000)
    run_of("custom", "mine", 2000)
    report = ["runs/image/newest", "'runs/image/with space'", "runs/custom/mine"]
    assert told(mgt("report")) == [f"mgt report {run}" for run in report]
    resume = ["runs/image/newest", "'runs/image/with space'", "runs/image/old"]
    assert told(mgt("resume")) == [f"mgt resume {run}" for run in resume]


def test_without_runs_nothing_is_suggested(mgt: Mgt) -> None:
    said = mgt("report")
    assert told(said) == [] and "newest" not in said.err
