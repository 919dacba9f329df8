"""The lines that a run begins and ends with."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import FEATURES, line, manager_for, points, sgd, squares
from torch import nn

from multi_gpu_training import Callback

BATCHNORM = "BatchNorm normalises each rank's part of a batch"


def normed(how: str) -> nn.Module:
    torch.manual_seed(1)
    norm: nn.Module = nn.LayerNorm(FEATURES) if how == "no BatchNorm" else nn.BatchNorm1d(FEATURES)
    model = nn.Sequential(norm, nn.Linear(FEATURES, 1))
    if how == "frozen":
        norm.eval()
    if how == "all in eval":  # as from_pretrained leaves it; fit puts it into train mode
        model.eval()
    if how == "frozen without statistics":
        model[0] = nn.BatchNorm1d(FEATURES, track_running_stats=False).eval()
    return model


def told_on_rank_0(folder: Path, how: str, settings: dict[str, Any]) -> bool:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        manager = manager_for(folder, progress="lines", batch_size=4, **settings)
        manager.fit(normed(how), points(), loss_fn=squares, optimizer=sgd)
    return BATCHNORM in said.getvalue()


@pytest.mark.parametrize(
    ("how", "settings", "told"),
    [
        ("trained", {}, True),
        ("all in eval", {}, True),
        ("frozen without statistics", {}, True),
        ("frozen", {}, False),
        ("no BatchNorm", {}, False),
        ("trained", {"sync_bn": True}, False),
    ],
)
def test_a_batchnorm_that_depends_on_the_ranks_is_told(
    tmp_path: Path, how: str, settings: dict[str, Any], told: bool
) -> None:
    assert run_ranks(2, told_on_rank_0, tmp_path, how, settings)[0] is told


def test_one_rank_hears_nothing_of_batchnorm(tmp_path: Path) -> None:
    assert run_ranks(1, told_on_rank_0, tmp_path, "trained", {}) == [False]


class Fails(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        if result.step == 6:
            raise ValueError("a mistake")


def output(capsys: pytest.CaptureFixture[str], folder: Path, **arguments: Any) -> str:
    settings = {"progress": "lines", "batch_size": 4, **arguments.pop("settings", {})}
    manager = manager_for(folder, **settings)
    with contextlib.suppress(ValueError):
        manager.fit(line(), points(), loss_fn=squares, **{"optimizer": sgd, **arguments})
    return capsys.readouterr().out


def test_a_run_that_fails_has_no_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"epochs": 2}
    assert "Summary" in output(capsys, tmp_path / "well", settings=settings)
    said = output(capsys, tmp_path / "failed", settings=settings, callbacks=[Fails()])
    assert "Epoch 1/2" in said and "Summary" not in said


def test_without_a_validation_the_best_loss_is_that_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = output(capsys, tmp_path / "without")
    assert "best train loss" in said and "best loss" not in said
    said = output(capsys, tmp_path / "with", val_dataset=points())
    assert "best loss" in said and "best train loss" not in said


def test_the_rate_of_a_scheduler_is_called_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=4)

    said = output(capsys, tmp_path / "own", scheduler=cycle, optimizer=None)
    assert "learning rate: starts at 0.012 (" in said
    assert "optimizer: AdamW (the default), lr 0." in said
    assert "1 rank, device cpu" in said
    said = output(capsys, tmp_path / "scaled", scheduler=cycle, settings={"lr_scaling": "linear"})
    assert "samples per step); the scheduler starts at " in said
    assert "learning rate: 0.1 (" in output(capsys, tmp_path / "none")


@pytest.mark.parametrize(
    ("first", "place"),
    [
        ({"epochs": 2}, "after epoch 2 of 5, step 8"),
        ({"max_steps": 6}, "in epoch 2 of 5 at step 6"),
    ],
    ids=["after an epoch", "inside an epoch"],
)
def test_a_resume_counts_epochs_as_the_progress_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: dict[str, Any], place: str
) -> None:
    kept = {"run_name": "it", "enable_fault_tolerance": True, "epochs": 5}
    output(capsys, tmp_path, settings={**kept, **first})
    said = output(capsys, tmp_path, settings={**kept, "resume": "auto"})
    assert f"\nresumed {place}, learning rate 0.1 (" in said
    number = int(place.split("epoch ")[1][0]) + place.startswith("after")
    assert said.split("\nEpoch ")[1].startswith(f"{number}/5 ")
