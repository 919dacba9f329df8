"""`mgt resume RUN` and `--resume auto`: a run goes on with the settings it was started with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import Program, Said, mgt_here

from multi_gpu_training.cli.train_command import TrainFlags, resolve
from multi_gpu_training.errors import ConfigError

Mgt = Callable[..., Said]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


def resolved(target: str, *words: str, run: str | None = None, **hosts: Any) -> dict[str, Any]:
    """All settings and options that `mgt train TARGET WORDS` would train with."""
    _, config, options = resolve(TrainFlags(target, None, {}, hosts, list(words), run))
    return {**config.plain(), **options.model_dump()}


QUICK = ("--multi-gpu", "single", "--max-steps", "2", "tensorboard=false", "report=false")


def test_a_resumed_run_keeps_its_settings_and_the_command_line_overrides_them(
    mgt: Mgt, tmp_path: Path
) -> None:
    told = ("--lr", "3e-3", "--batch-size", "24", "--warmup-epochs", "0.5", "--mode", "cnn")
    said = mgt("train", "image", *QUICK, *told, "--run-name", "first", "augment=false", "seed=7")
    assert said.code == 0, said.err
    before = yaml.safe_load(Path("runs/image/first/config.yaml").read_text())

    # Both ways to resume train with what the run was told, to the last setting.
    for now in (resolved("image", "--resume=auto"), resolved("", run="runs/image/first")):
        different = {name for name in before if now[name] != before[name]}
        assert different <= {"resume", "run_name", "save_dir"}, different
        assert now["mode"] == "cnn" and now["learning_rate"] == 3e-3 and now["augment"] is False

    # What the command line says wins, and the table of changes shows it.
    said = mgt("resume", "runs/image/first", "--max-steps", "4", "--lr", "2e-3")
    assert said.code == 0, said.err
    assert "resuming runs/image/first with its settings: " in said.out
    assert "mode='cnn'" in said.out and "learning_rate" not in said.out.partition("\n")[0]
    assert "learning_rate  0.003  0.002  applied" in said.out
    assert "max_steps      2      4      applied" in said.out
    after = yaml.safe_load(Path("runs/image/first/config.yaml").read_text())
    assert (after["learning_rate"], after["max_steps"], after["mode"]) == (2e-3, 4, "cnn")

    # With several ranks, the line comes once: from the launcher.
    words = ("resume", "runs/image/first", "--num-gpus", "2", "--max-steps", "5")
    said = mgt(*words)
    assert said.code == 2 and "add --multi-gpu ddp" in said.err
    words = (*words, "--multi-gpu", "ddp")
    with Program("-m", "multi_gpu_training", *words, cwd=tmp_path) as program:
        assert program.end_of_run() == 0, program
        assert program.out.count("resuming runs/image/first") == 1, program.out
    assert after["batch_size"] == 24 and after["seed"] == 7

    # A config file counts as the command line; a run of another recipe is not taken for this one.
    Path("my.yaml").write_text("recipe: image\nmode: flatten\n")
    assert resolved("my.yaml", "resume=auto")["mode"] == "flatten"
    assert resolved("my.yaml", "resume=auto")["batch_size"] == 24
    assert resolved("speech", "resume=auto")["batch_size"] != 24
    # On several machines one of them may not have the folder: they must not differ in silence.
    assert resolved("image", "resume=auto", nodes="2", master_addr="h")["mode"] == "auto"


def test_resume_says_what_it_needs(mgt: Mgt, tmp_path: Path) -> None:
    assert "is not a run folder; give runs/RECIPE/NAME" in mgt("resume", "nowhere").err
    run = tmp_path / "runs/custom/mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("recipe: custom\n")
    assert "a script made this run; start the script again" in mgt("resume", run).err
    (run / "config.yaml").write_text("recipe: image\n")
    assert "this is a run of 'image', but is in a folder custom/" in mgt("resume", run).err
    moved = tmp_path / "runs/image/mine"
    moved.mkdir(parents=True)
    (moved / "config.yaml").write_text("recipe: image\nlogger_options: {wandb: {key: '***'}}\n")
    with pytest.raises(ConfigError, match="does not keep secrets; give it again"):
        resolved("", run=str(moved))


WRONG_DATA = """
import sys
from multi_gpu_training.cli import main

for words in {commands!r}:
    sys.argv = ["mgt", *words]
    try:
        main()
    except SystemExit as end:
        print(end.code, "torch" in sys.modules)
"""


def test_data_that_are_not_there_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "my.yaml").write_text("recipe: video\ndata_dir: recordings\n")
    commands = [
        ["train", "image", "--data-dir", "fashon-mnist"],
        ["train", "image", "--data-dir", "fashion-mnist"],
        ["train", "my.yaml"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WRONG_DATA.format(commands=commands)],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["2 False"] * 3, done
    assert "data_dir='fashon-mnist' does not exist" in done.stderr
    assert "did you mean 'fashion-mnist'?" in done.stderr
    assert "data_dir='fashion-mnist' is an empty folder" in done.stderr
    assert "data_dir='recordings' does not exist" in done.stderr
