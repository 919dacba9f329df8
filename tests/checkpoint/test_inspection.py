"""`mgt checkpoints RUN`: what is there, what it holds, and whether it is intact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import line, manager_for, points, sgd, squares
from typer.testing import CliRunner

from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.cli.app import app
from multi_gpu_training.cli.checkpoints_command import show_checkpoints
from multi_gpu_training.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 4, 8 and 12, each the end of an epoch of 4."""
    settings = {"run_name": "run", "enable_fault_tolerance": True, "batch_size": 4, "epochs": 3}
    manager = manager_for(tmp_path, **settings, training_mode="single")
    return manager.fit(line(), points(), loss_fn=squares, optimizer=sgd).folder


def test_a_run_is_listed_with_what_each_checkpoint_holds(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / ".staged-step-00000016-0-1").mkdir()
    assert show_checkpoints(str(run), as_json=False) == 0
    shown = capsys.readouterr().out
    for word in ("step-00000012", "step-00000008", "step-00000004", "intact", "best", "loss"):
        assert word in shown
    assert "--resume auto continues from step-00000012" in shown
    assert "unfinished, cleared by the next start or save: .staged-step-00000016-0-1" in shown
    assert show_checkpoints(str(run), as_json=True) == 0
    listing = json.loads(capsys.readouterr().out)
    first = listing["checkpoints"][0]
    assert (first["step"], first["epoch"], first["world_size"]) == (12, 2, 1)
    assert first["intact"] and first["best"] and first["global_batch_size"] == 4
    assert first["metrics"]["loss"] == first["score"]["value"]
    files = list((run / "checkpoints" / "step-00000012").iterdir())
    assert first["bytes"] == sum(file.stat().st_size for file in files)
    assert listing["owner"] is None and listing["newest_intact"] == "step-00000012"


@pytest.mark.parametrize("width", [80, 100, 200])
def test_metrics_are_shown_whole_in_terminals_of_any_width(
    run: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_checkpoints(str(run), as_json=True)
    newest = json.loads(capsys.readouterr().out)["checkpoints"][0]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any output for a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    show_checkpoints(str(run), as_json=False)
    shown = capsys.readouterr().out
    assert f"loss {newest['metrics']['loss']:.4f}" in shown
    table = [row for row in shown.splitlines() if "│" in row]
    assert table and all(len(row) <= width for row in table)


def test_damage_is_named_and_the_exit_code_says_if_nothing_is_left(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    (folders[0] / "state.json").write_text("{}")
    assert show_checkpoints(str(run), as_json=False) == 0
    shown = capsys.readouterr().out
    assert "step-00000012 is damaged: state.json has 2 bytes instead of" in shown
    assert "--resume auto continues from step-00000008" in shown
    (folders[1] / "manifest.json").write_text("[1, 2]")
    (folders[2] / "model.safetensors").unlink()
    assert show_checkpoints(str(run / "checkpoints"), as_json=False) == 1
    shown = capsys.readouterr().out
    assert "step-00000004 is damaged: model.safetensors is missing" in shown
    assert "no intact checkpoint" in shown
    assert show_checkpoints(str(run), as_json=True) == 1
    listing = json.loads(capsys.readouterr().out)
    assert [item["intact"] for item in listing["checkpoints"]] == [False] * 3
    assert listing["checkpoints"][1]["epoch"] is None


def test_one_checkpoint_and_an_abandoned_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CheckpointStore(run / "checkpoints").branch(from_step=4)
    assert show_checkpoints(str(run), as_json=False) == 0
    shown = capsys.readouterr().out
    assert shown.count("abandoned") == 2 and "continues from step-00000004" in shown
    assert show_checkpoints(str(run / "checkpoints" / "step-00000004"), as_json=True) == 0
    assert len(json.loads(capsys.readouterr().out)["checkpoints"]) == 1


def test_what_is_no_run_is_said_so(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        show_checkpoints(str(tmp_path / "nowhere"), as_json=False)
    with pytest.raises(ConfigError, match=f"did you mean {run}"):
        show_checkpoints(str(tmp_path), as_json=False)


def test_the_command_ends_with_1_when_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    done = CliRunner().invoke(app, ["checkpoints", str(tmp_path)])
    assert done.exit_code == 1 and "no intact checkpoint" in done.stdout
