"""Names are shown as they are, and secrets are not written down."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import line, manager_for, points, squares

from multi_gpu_training.cli.checkpoints_command import show_checkpoints
from multi_gpu_training.cli.report_command import report
from multi_gpu_training.cli.train_command import TrainFlags, resolve
from multi_gpu_training.monitoring.run_folder import RunFolder
from multi_gpu_training.redaction import redact, redact_command

ODD = ["acc[/top5]", "recall[cat]", "[bold]x", "a\\", "esc\x1b[2J", "$x_$"]


def measure(model: Any, batch: Any, collected: Any) -> None:
    for name in ("loss", *ODD):
        collected.add(name, squares(model, batch) * len(batch[0]), len(batch[0]))


def test_odd_names_of_metrics_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = manager_for(
        tmp_path, progress="lines", enable_fault_tolerance=True, run_name="[red]", log_every=1,
        training_mode="single",
    )  # fmt: skip
    manager.fit(line(), points(), points(), loss_fn=squares, eval_fn=measure)
    said = capsys.readouterr().out
    run = tmp_path / "custom" / "[red]"
    assert show_checkpoints(str(run), as_json=False) == 0
    listed = capsys.readouterr().out
    assert report([str(run), str(run)], str(tmp_path / "r.html"), False, True) == 0
    assert report([str(run)], None, False, True) == 0
    reported = capsys.readouterr().out
    for text in (said, listed, reported):
        for name in ODD[:3]:
            assert name in text
    assert "\x1b" not in listed + reported


def test_secrets_are_known_by_name_and_in_urls() -> None:
    words = ["python", "t.py", "--hf-token", "s1", "--api-key=s2", "WANDB_API_KEY=s3", "--db"]
    words += ["postgresql://me:s4@host/db", "--password", "s5", "--max-tokens", "7", "--lr=0.1"]
    shown = redact_command(words)
    assert not any(f"s{i}" in " ".join(shown) for i in range(1, 6))
    assert shown[-3:] == ["--max-tokens", "7", "--lr=0.1"] and shown[:2] == words[:2]
    assert redact("cannot reach https://u:p@h/x") == "cannot reach https://***@h/x"
    assert redact("loss: 0.3, key_size=4, step=7") == "loss: 0.3, key_size=4, step=7"


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from tiny import line, manager_for, points, squares
from pathlib import Path
manager = manager_for(Path("runs"), run_name="it", training_mode="single", tensorboard=False,
                      enable_fault_tolerance=True)
manager.recipe_options = {{"api_key": "hidden-3", "data": "s3://hidden-4@bucket/x"}}
manager.setup_training(line(), points(), loss_fn=squares)
manager.logger.warning("no answer from https://me:hidden-5@host/x")
manager.train_epoch(manager.train_loader, 0)
manager.finish()
from multi_gpu_training.monitoring.report import write_report
write_report([manager.folder])
"""


def test_no_secret_is_in_any_file_and_no_compiled_code_in_the_temporary_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "tmp").mkdir()
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]))
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    secret = ["--hf-token", "hidden-1", "db=postgres://u:hidden-2@h"]
    command = [sys.executable, "-c", script, *secret]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120)
    run = tmp_path / "runs" / "custom" / "it"
    files = [file for file in run.rglob("*") if file.is_file() and not file.is_symlink()]
    assert {".lock", "environment.json", "report.html"} <= {file.name for file in files}
    for file in files:
        assert b"hidden-" not in file.read_bytes(), file
    assert list((tmp_path / "tmp").iterdir()) == []
    kept = tmp_path / "cache" / "multi-gpu-training" / "compiled"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


def test_references_to_the_environment_are_kept_as_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "secret"
    (place / "data").mkdir(parents=True)
    monkeypatch.setenv("MY_DATA", str(place))
    monkeypatch.setenv("MY_LR", "0.25")
    config = tmp_path / "c.yaml"
    config.write_text(
        "recipe: image\ndevice: cpu\ndata_dir: ${oc.env:MY_DATA}\n"
        "training:\n  lr: ${oc.decode:${oc.env:MY_LR}}\n"
    )
    flags = TrainFlags(str(config), 1, {"save_dir": str(tmp_path)}, {}, ["run_name=it"])
    _, resolved, options = resolve(flags)
    assert resolved.learning_rate == 0.25 and options.data_dir == str(place)

    from multi_gpu_training.distributed.placement import Placement
    from multi_gpu_training.monitoring.run_folder import open_run

    folder: RunFolder = open_run(resolved, Placement(), options.model_dump())
    folder.close()
    written = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert written["data_dir"] == "${oc.env:MY_DATA}"
    assert written["learning_rate"] == "${oc.decode:${oc.env:MY_LR}}"
    assert str(place) not in json.dumps(written)
