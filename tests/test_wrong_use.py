"""What people type and hand over by mistake: refused in words, before anything trains.
benchmarks/hostile_blind.py tries hundreds more."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Said, mgt_here
from tiny import line, manager_for, points, sgd, squares
from torch.optim.lr_scheduler import ChainedScheduler, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from multi_gpu_training import (
    MetricsCollector,
    MultiGPUConfig,
    MultiGPUTrainingManager,
    PerformanceMonitor,
    launch_distributed_training,
    notebook_launch,
)
from multi_gpu_training.delivery.model_folder import finish, read_index
from multi_gpu_training.errors import CheckpointError, ConfigError, MultiGPUError

ONE = ("--multi-gpu", "single", "--num-gpus", "1", "device=cpu", "max_steps=1", "progress=off")
LR = ("search", "image", "--param", "lr=1e-3..1e-1", "--trials", "2")
Mgt = Callable[..., Said]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


def refused(said: Said, *words: str) -> None:
    assert said.code == 2, said
    assert "Traceback" not in said.err
    assert all(word in said.err for word in words), said.err


# The command line


def test_mgt_says_its_version_and_torchs(mgt: Mgt) -> None:
    said = mgt("--version")
    assert said.code == 0
    assert said.out.startswith("multi-gpu-training ")
    assert f"torch {torch.__version__}" in said.out


def test_the_version_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['mgt', '--version']\nfrom multi_gpu_training.cli import main\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", ["epochs", "max_steps", "batch_size", "seed", "learning_rate"])
@pytest.mark.parametrize("word", ["yes", "off", "true"])
def test_yes_is_not_a_number(mgt: Mgt, setting: str, word: str) -> None:
    refused(mgt("train", "image", *ONE[:-2], f"{setting}={word}"), setting, "number")


def test_true_is_not_a_number_in_python_either() -> None:
    for name in ("epochs", "learning_rate", "timeout", "warmup_epochs", "fsdp_copy_size"):
        with pytest.raises(ConfigError, match=f"{name}=True: input should be a number"):
            MultiGPUConfig(**{name: True})
    assert MultiGPUConfig(deterministic=True, cudnn_benchmark=False, data_on_gpu=True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("settings.yaml", b"recipe: image\n", ("config file", "mgt train")),
        ("picture.png", b"\x89PNG\r\n\x1a\n\0\0", ("not a Python script",)),
        ("broken.py", b"x = 1\ndef f(:\n", ("line 2", "not a Python script")),
        ("latin.py", b"# caf\xe9\n", ("not a Python script",)),
    ],
)
def test_mgt_run_looks_at_the_script_before_it_starts_ranks(
    mgt: Mgt, tmp_path: Path, name: str, content: bytes, words: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(mgt("run", name), name, *words)


def test_a_folder_or_a_run_is_told_apart_from_a_missing_file(mgt: Mgt, tmp_path: Path) -> None:
    run = tmp_path / "runs/image/first"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("recipe: image\n")
    (tmp_path / "script.py").write_text("print(1)\n")
    refused(mgt("run", "runs"), "this is a folder")
    refused(mgt("run", run), "run folder", "mgt resume")
    refused(mgt("train", run), "run folder", "mgt resume")
    refused(mgt("train", "script.py"), "Python script", "mgt run script.py")


@pytest.mark.parametrize("command", ["dashboard", "top"])
def test_what_is_watched_must_be_there(mgt: Mgt, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "runs").mkdir()
    refused(mgt(command, "runs", "gone"), "gone", "no such folder")
    refused(mgt(command, "file"), "file", "not a folder")


def test_top_may_come_before_the_first_run(mgt: Mgt) -> None:
    said = mgt("top", "--once")
    assert (said.code, "is not there yet" in said.out) == (0, True)


@pytest.mark.parametrize(
    "words",
    [
        ("checkpoints", "run", "--like", "run"),
        ("verify", "image", "--num-gpus", "2"),
        ("bench", "image", "world_size=2"),
        ("checkpoints", "run", "--to", "s3://x/y"),
        ("checkpoints", "merge", "run", "out", "--json"),
        (*LR, "--population", "4"),
        (*LR, "--generation-epochs", "2"),
        (*LR, "--metric", "val/loss,val/accuracy"),
        (*LR, "--study", ""),
        (*LR, "--storage", ""),
        ("train", "image", "--partition", "gpu", *ONE),
        ("train", "image", "--multi-gpu", "single", "--num-gpus", "4", "device=cpu"),
        ("train", "image", "--witness", "h:1", *ONE),
        ("train", "image", "max_steps=5", "--max-steps", "6"),
        ("train", "image", "--engine", "ray", "--ray-options", ","),
        ("train", "image", "rank=1", "world_size=2", "device=cpu"),
        ("train", "image", "deterministic=true", "cudnn_benchmark=true"),
        ("train", "image", "on_nonfinite=rollback", "enable_fault_tolerance=false"),
        ("train", "image", "swa_start=10", "max_steps=5"),
        ("train", "image", "profile_steps=6-8", "max_steps=5"),
        ("train", "image", *ONE, "model=os:system"),
    ],
)
def test_no_option_is_ignored(mgt: Mgt, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "run").mkdir()
    refused(mgt(*words))


def test_names_of_other_tools_lead_to_ours(mgt: Mgt) -> None:
    for name, ours in (
        ("gpus", "world_size"),
        ("nproc_per_node", "world_size"),
        ("amp", "use_mix"),
    ):
        refused(mgt("train", "image", *ONE, f"{name}=2"), f"did you mean '{ours}")


# The environment


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "4"}, ("WORLD_SIZE=4 but no RANK",)),
        ({"RANK": "0"}, ("no WORLD_SIZE",)),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, ("empty MASTER_ADDR",)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, ("LOCAL_WORLD_SIZE=4",)),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            ("LOCAL_RANK=2",),
        ),
    ],
)
@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_half_a_launch_does_not_train_alone(
    mgt: Mgt,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: tuple[str, ...],
    mode: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = mgt("train", "image", "--multi-gpu", mode, "device=cpu", "max_steps=1", "progress=off")
    refused(said, *words)


def test_a_world_of_one_without_a_rank_is_what_would_happen_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    manager_for(tmp_path, training_mode="single").fit(line(), points(), loss_fn=squares)


def test_a_removed_working_directory_is_named(tmp_path: Path) -> None:
    before = Path.cwd()
    (tmp_path / "going").mkdir()
    os.chdir(tmp_path / "going")
    try:
        (tmp_path / "going").rmdir()
        with pytest.raises(ConfigError, match="working directory was removed"):
            MultiGPUConfig()
    finally:
        os.chdir(before)


def test_too_many_open_files_are_no_traceback(
    mgt: Mgt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine where every file that a command opens is one too many."""
    mgt("--version")  # what a command imports is open no more
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        said = mgt("train", "image", "--help")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said.code == 1, said
    assert "ulimit -n" in said.err
    assert "Traceback" not in said.err


# Python


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise StopIteration


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


OTHER = line()
UNRELATED = sgd(OTHER.parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None}, "None is not a model"),
        ({"model": "resnet18"}, "'resnet18' is not a model"),
        ({"model": torch.nn.Linear}, "the class Linear is not a model"),
        ({"dataset": "data/train"}, "str is not a dataset"),
        ({"dataset": {"train": points()}}, r"give one of them, such as data\['train'\]"),
        ({"dataset": Broken()}, "raised StopIteration"),
        ({"dataset": DataLoader(Nothing(), batch_size=4)}, "trained no step"),
        ({"val_dataset": "data/val"}, "str is not a dataset"),
        ({"loss_fn": torch.nn.MSELoss}, r"give an object of it: MSELoss\(\)"),
        ({"loss_fn": lambda batch: batch}, r"is called as loss_fn\(model, batch\)"),
        ({"augment": "flip"}, "augment='flip'"),
        ({"augment": lambda batch: batch}, r"give a function augment\(batch, random\)"),
        ({"states": [1]}, "give a dict"),
        ({"scheduler": StepLR(UNRELATED, 1)}, "belongs to another optimizer"),
        ({"scheduler": ChainedScheduler([StepLR(UNRELATED, 1)])}, "belongs to another optimizer"),
    ],
)
def test_fit_refuses_the_wrong_object(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    usual = {"model": line(), "dataset": points(), "loss_fn": squares, "optimizer": sgd}
    with pytest.raises(MultiGPUError, match=words):
        manager_for(tmp_path, training_mode="single").fit(**{**usual, **given})


def test_a_scheduler_of_the_runs_own_optimizer_is_fine(tmp_path: Path) -> None:
    model = line()
    optimizer = sgd(model.parameters())
    chain = ChainedScheduler([StepLR(optimizer, 1, 0.5)])
    manager = manager_for(tmp_path, training_mode="single")
    manager.fit(model, points(), loss_fn=squares, optimizer=optimizer, scheduler=chain)
    assert optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize(
    "call",
    [
        lambda: MultiGPUTrainingManager({"epochs": 1}),  # type: ignore[arg-type]
        lambda: MultiGPUTrainingManager("settings.yaml"),  # type: ignore[arg-type]
        lambda: notebook_launch("train"),  # type: ignore[arg-type]
        lambda: launch_distributed_training("train.py"),  # type: ignore[arg-type]
        lambda: MetricsCollector("median"),
        lambda: PerformanceMonitor(interval_s=0),
    ],
)
def test_other_calls_refuse_the_wrong_object(call: Callable[[], object]) -> None:
    with pytest.raises(MultiGPUError):
        call()


def test_a_manager_refuses_what_is_no_data_or_epoch(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single")
    manager.setup_training(line(), points(), loss_fn=squares)
    with pytest.raises(ConfigError, match="is not data"):
        manager.evaluate("val")
    with pytest.raises(ConfigError, match="count from 0"):
        manager.train_epoch(manager.train_loader, -1)
    with pytest.raises(MultiGPUError, match="None"):
        manager.predict(points(), lambda model, batch: None)
    manager.finish()


# Exports


def test_a_file_of_holes_is_not_hashed_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 5000)
    finish(folder, {"to": "safetensors"}, {})
    assert read_index(folder)["to"] == "safetensors"
    os.truncate(folder / "model.safetensors", 64 << 30)
    with pytest.raises(CheckpointError, match="next to none on the disk"):
        read_index(folder)
    os.truncate(folder / "model.safetensors", 4000)
    with pytest.raises(CheckpointError, match="was changed"):
        read_index(folder)
    assert json.loads((folder / "export.json").read_text())
