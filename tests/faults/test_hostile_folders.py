"""Run folders that somebody damaged, prepared or deleted: nothing outside is touched, nothing
hangs, no raw error, and no checkpoint is resumed from that the run did not save there."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import flat, line, manager_for, points, sgd, squares

from multi_gpu_training import Callback
from multi_gpu_training.checkpoint.inspection import inspect
from multi_gpu_training.checkpoint.integrity import damage
from multi_gpu_training.cli.checkpoints_command import show_checkpoints
from multi_gpu_training.cli.report_command import report
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.safe_files import signed


def train(folder: Path, steps: int = 12, callbacks: Any = (), **settings: Any) -> Any:
    """One rank, a checkpoint every other step of eight an epoch; all are kept."""
    given = {"training_mode": "single", "batch_size": 2, "epochs": 2, "run_name": "it"}
    given |= {"enable_fault_tolerance": True, "checkpoint_frequency": 2, "keep_last": 99}
    given |= {"log_every": 1, "max_steps": steps, "resume": "auto", **settings}
    manager, model = manager_for(folder, **given), line()
    manager.fit(model, points(), loss_fn=squares, optimizer=sgd, callbacks=callbacks)
    return flat(model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went back from step 8 to 4 and on to 12."""
    folder = tmp_path_factory.mktemp("made")
    train(folder, 8)
    checkpoints = folder / "custom" / "it" / "checkpoints"
    train(folder, 6, resume=str(checkpoints / "step-00000004"))
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs", symlinks=True)
    return tmp_path / "runs" / "custom" / "it"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("whole"))


def resumed(run: Path, **settings: Any) -> Any:
    return train(run.parent.parent, **settings)


# Lineage


def test_a_damaged_lineage_never_leads_to_an_abandoned_checkpoint_in_silence(
    made: Path, run: Path, whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 8 was abandoned. Whatever happens to lineage.json, the run goes on from step 6 and
    says so."""
    lineage, text = run / "checkpoints" / "lineage.json", b""
    text = lineage.read_bytes()
    damages = [text[:-1], text[: len(text) // 2], b"", b"{}", b"[" * 100_000, None]
    damages += [text[:i] + bytes([text[i] ^ 4]) + text[i + 1 :] for i in range(0, len(text), 9)]
    for content in damages:
        if content is None:
            lineage.unlink()
        else:
            lineage.write_bytes(content)
        listing = inspect(run)
        assert listing.newest_intact == "step-00000006"
        assert "lineage.json" in str(listing.lineage_problem)
    capsys.readouterr()
    assert torch.equal(resumed(run, progress="lines"), whole)
    said = capsys.readouterr().out
    assert (
        "lineage.json is damaged (was changed)" in said
        and "resumed " in said
        and "-00000006" in said
    )
    assert inspect(run).lineage_problem is None  # mended


def test_a_history_is_read_from_the_manifests_where_both_files_are_gone(run: Path) -> None:
    for file in run.glob("checkpoints/lineage*.json"):
        file.write_text("garbage")
    listing = inspect(run)
    assert listing.newest_intact == "step-00000006"
    assert "taken from the manifests" in str(listing.lineage_problem)


# Manifests


def rewritten(path: Path, **changes: Any) -> None:
    facts = json.loads((path / "manifest.json").read_text())
    del facts["sha256"]
    (path / "manifest.json").write_text(json.dumps(signed({**facts, **changes}), indent=1))


FILE = {"bytes": 0, "sha256": "0" * 64}
NONSENSE: dict[str, Any] = {
    "no files": {"files": {}},
    "outside": {"files": {"../../../../../etc/passwd": FILE}},
    "absolute": {"files": {"/dev/zero": FILE}},
    "tiny chunks": {
        "files": {
            "model.safetensors": {"bytes": 2**40, "sha256_of_chunks": "0" * 64, "chunk_bytes": 1}
        }
    },
    "world": {"world_size": 3_000_000_000},
    "text for a number": {"step": "6"},
    "metrics": {"metrics": {"loss": {}}},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_manifest_with_nonsense_and_a_fitting_hash_is_named(
    run: Path, name: str, whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-00000006"
    facts = json.loads((newest / "manifest.json").read_text())
    files = NONSENSE[name].get("files")
    changes = {"files": {**facts["files"], **files}} if files else NONSENSE[name]
    rewritten(newest, **changes)
    assert str(damage(newest)).startswith("manifest.json")
    assert show_checkpoints(str(run), as_json=False) == 0
    assert "step-00000006 is damaged: manifest.json" in capsys.readouterr().out
    assert torch.equal(resumed(run), whole)


def test_every_flip_of_a_manifest_is_put_down_to_the_manifest(run: Path) -> None:
    path = run / "checkpoints" / "step-00000006"
    text = (path / "manifest.json").read_bytes()
    for at in range(0, len(text), 5):
        for bit in (0, 3, 7):
            changed = text[:at] + bytes([text[at] ^ (1 << bit)]) + text[at + 1 :]
            (path / "manifest.json").write_bytes(changed)
            assert str(damage(path)).startswith("manifest.json"), (at, bit)
    for content in (b"", b"[" * 200_000, b"\xff\xfe", b"[1]", b"1" * 6000):
        (path / "manifest.json").write_bytes(content)
        assert str(damage(path)).startswith("manifest.json")


def test_a_state_of_nonsense_with_fitting_hashes_is_a_clear_error(run: Path) -> None:
    import hashlib

    path = run / "checkpoints" / "step-00000006"
    facts = json.loads((path / "manifest.json").read_text())
    for text in (
        "[" * 100_000,
        "[]",
        "{}",
        '{"optimizer": 1, "state": {"$": "set"}}',
        '{"optimizer": {"groups": []}, "state": {"trainer": {}, "config": {}}}',
    ):
        (path / "state.json").write_text(text)
        hashed = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        rewritten(path, files={**facts["files"], "state.json": hashed})
        assert damage(path) is None
        with pytest.raises(MultiGPUError, match="does not hold what"):
            resumed(run)


@pytest.mark.parametrize(
    ("name", "value"), [("step", -5), ("step", 5), ("epoch", -1), ("position", -1)]
)
def test_counts_that_no_training_reaches_are_a_clear_error(
    run: Path, name: str, value: int
) -> None:
    import hashlib

    path = run / "checkpoints" / "step-00000006"
    facts = json.loads((path / "manifest.json").read_text())
    state = json.loads((path / "state.json").read_text())
    state["state"]["trainer"][name] = value
    text = json.dumps(state)
    (path / "state.json").write_text(text)
    hashed = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    rewritten(path, files={**facts["files"], "state.json": hashed})
    with pytest.raises(MultiGPUError, match="in the checkpoint of step 6"):
        resumed(run)


def test_an_old_checkpoint_under_a_newer_name_does_not_win(
    run: Path, whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000002").rename(checkpoints / "step-00000099")
    assert torch.equal(resumed(run, progress="lines"), whole)
    assert "step-00000099 is damaged: it is the checkpoint of step 2" in capsys.readouterr().out


# Links, FIFOs and other people's files


@pytest.mark.parametrize("name", [".lock", "config.yaml", "environment.json", "memory.json"])
def test_a_link_in_a_run_folder_is_not_written_through(
    run: Path, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    if name == "memory.json":  # only read, and only in a resumed run
        resumed(run)
    else:
        with pytest.raises(ConfigError, match="symbolic link"):
            resumed(run)
    assert victim.read_text() == "precious"


def test_events_are_not_appended_to_what_a_link_points_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: Any
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    events = run / "events" / "rank-0.jsonl"
    for make in (lambda: events.symlink_to(victim), lambda: os.link(victim, events)):
        events.unlink()
        make()
        assert torch.equal(resumed(run), whole)
        assert victim.read_text() == "precious"
        assert "no events are recorded" in capsys.readouterr().err


def test_a_fifo_where_a_file_belongs_is_named_and_nothing_waits(run: Path, whole: Any) -> None:
    newest = run / "checkpoints" / "step-00000006"
    for name in ("manifest.json", "model.safetensors"):
        (newest / name).rename(newest / "kept")
        os.mkfifo(newest / name)
        assert f"{name} cannot be read: it is a FIFO" in str(damage(newest))
        (newest / name).unlink()
        (newest / "kept").rename(newest / name)
    events = run / "events" / "rank-0.jsonl"
    events.unlink()
    os.mkfifo(events)
    with pytest.raises(ConfigError, match="it is a FIFO"):
        report([str(run)], None, False, True)
    events.unlink()
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    with pytest.raises(ConfigError, match="it is a FIFO"):
        resumed(run)


@pytest.mark.parametrize("name", ["report.html", "metrics.png"])
def test_mgt_report_does_not_write_through_a_link(run: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / name).symlink_to(victim)
    with pytest.raises(MultiGPUError, match=r"symbolic link.*choose another --out"):
        report([str(run)], None, True, True)
    assert victim.read_text() == "precious"
    assert not list(run.glob(".*draft*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's file")
def test_mgt_report_leaves_another_users_file_alone(run: Path) -> None:
    (run / "report.html").write_text("theirs")
    os.chown(run / "report.html", 4242, 4242)
    with pytest.raises(MultiGPUError, match="belongs to another user"):
        report([str(run)], None, True, True)


# Deleted while it runs


class Delete(Callback):
    def on_step_end(self, manager: Any, result: Any) -> None:
        if result.step == 5:
            away = manager.folder.rename(manager.folder.with_name("away"))  # a save may be going on
            shutil.rmtree(away, ignore_errors=True)


def test_a_run_folder_that_is_deleted_is_made_again_and_that_is_said(
    tmp_path: Path, whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch.equal(train(tmp_path, callbacks=[Delete()]), whole)
    assert "was deleted or moved during the run" in capsys.readouterr().err
    run = tmp_path / "custom" / "it"
    lines = (run / "events" / "rank-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["step"] for e in events if e["event"] == "step"][-6:] == [7, 8, 9, 10, 11, 12]
    assert any("was deleted" in e.get("message", "") for e in events)
    assert (run / "config.yaml").exists() and (run / "environment.json").exists()
    assert inspect(run).newest_intact == "step-00000012"


def test_a_relative_save_dir_does_not_follow_chdir(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Move(Callback):
        def on_step_end(self, manager: Any, result: Any) -> None:
            os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    train(Path("runs"), 6, callbacks=[Move()])
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.chdir(tmp_path)
    assert torch.equal(train(Path("runs")), whole)
    assert inspect(tmp_path / "runs" / "custom" / "it").newest_intact == "step-00000012"


# What others may read


def test_a_run_folder_is_its_owners_alone(run: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert stat.S_IMODE((run / "environment.json").stat().st_mode) == 0o600


def test_best_model_is_named_only_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, resume=None, progress="lines")
    assert "best model: " in capsys.readouterr().out
    train(tmp_path, resume=None, run_name="none", enable_fault_tolerance=False, progress="lines")
    assert "best model: " not in capsys.readouterr().out
