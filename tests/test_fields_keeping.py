"""What is kept and what is shown: checkpoints, resuming, the best one, the run folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import RankError, run_ranks
from tiny import flat, line, manager_for, points, sgd
from torch import Tensor, nn

from multi_gpu_training import Callback, MetricsCollector, MultiGPUTrainingManager
from multi_gpu_training.errors import CheckpointError

KEPT = {"enable_fault_tolerance": True, "run_name": "kept", "batch_size": 4, "epochs": 2}


class Notes(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.saved: list[str] = []

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.steps.append(step)

    def on_checkpoint(self, manager: MultiGPUTrainingManager, path: Path) -> None:
        self.saved.append(path.name)


def train(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Four steps an epoch on one rank, two on two."""
    hook, model = Notes(), line()
    result = manager_for(folder, **settings).fit(model, points(), optimizer=sgd, callbacks=[hook])
    return {
        "steps": hook.steps,
        "saved": hook.saved,
        "weights": flat(model),
        "folder": result.folder,
        "left": sorted(p.name for p in result.folder.glob("checkpoints/step-*")),
    }


def trained(folder: Path, world: int = 1, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(world, train, folder, settings)[0]
    return found


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def test_enable_fault_tolerance_saves_or_does_not(tmp_path: Path) -> None:
    kept = trained(tmp_path / "on", **KEPT)
    assert kept["left"] == names(4, 8)
    assert (kept["folder"] / "checkpoints" / "best" / "model.safetensors").exists()
    never = {**KEPT, "enable_fault_tolerance": False, "checkpoint_frequency": 1}
    off = trained(tmp_path / "off", **never)
    assert off["left"] == off["saved"] == []


def test_checkpoint_frequency_counts_steps(tmp_path: Path) -> None:
    every = {**KEPT, "epochs": 1, "global_batch_size": 2, "keep_last": 9}
    # 8 steps; the end of the epoch is saved whatever the frequency.
    assert trained(tmp_path / "3", **every, checkpoint_frequency=3)["saved"] == names(3, 6, 8)
    assert trained(tmp_path / "5", 2, **every, checkpoint_frequency=5)["saved"] == names(5, 8)


def test_keep_last_drops_older_checkpoints(tmp_path: Path) -> None:
    often = {**KEPT, "checkpoint_frequency": 1}
    for count in (1, 3):
        got = trained(tmp_path / str(count), **often, keep_last=count)
        assert set(got["saved"]) == set(names(*range(1, 9)))
        best = (got["folder"] / "checkpoints" / "best").resolve().name
        assert got["left"] == sorted({*names(*range(1, 9))[-count:], best})


def test_resume_goes_on_where_the_run_was(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", **{**KEPT, "epochs": 3})
    trained(tmp_path / "parts", **KEPT)
    rest = trained(tmp_path / "parts", **{**KEPT, "epochs": 3}, resume="auto")
    assert rest["steps"] == [9, 10, 11, 12]
    assert torch.equal(rest["weights"], whole["weights"])
    with pytest.raises(RankError, match="already has checkpoints; add --resume auto"):
        trained(tmp_path / "parts", **{**KEPT, "epochs": 3})


def test_resume_anyway_goes_on_with_another_seed(tmp_path: Path) -> None:
    trained(tmp_path, **KEPT)
    more = {**KEPT, "epochs": 3, "seed": 5, "resume": "auto"}
    with pytest.raises(RankError, match=r"seed +0 +5 +refused"):
        trained(tmp_path, **more)
    assert trained(tmp_path, **more, resume_anyway=True)["steps"] == [9, 10, 11, 12]


def test_a_resumed_run_keeps_its_global_batch_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks of 4 samples make steps of 8; one rank goes on with steps of 8, not of 4."""
    trained(tmp_path, world=2, **{**KEPT, "epochs": 1})
    rest = trained(tmp_path, world=1, **{**KEPT, "epochs": 3}, resume="auto")
    assert rest["steps"] == [3, 4, 5, 6]


def test_a_new_global_batch_goes_on_behind_the_samples_that_were_seen(tmp_path: Path) -> None:
    """16 samples; one step of 8 was saved: two of 4 are left, and 5 does not divide them."""
    whole = {**KEPT, "batch_size": 8, "checkpoint_frequency": 1, "epochs": 1, "keep_last": 9}
    trained(tmp_path, **whole)
    first = str(tmp_path / "custom" / "kept" / "checkpoints" / names(1)[0])
    with pytest.raises(RankError, match="8 samples into an epoch, which global_batch_size=5"):
        trained(tmp_path, **{**whole, "global_batch_size": 5}, resume=first)
    rest = trained(tmp_path, **{**whole, "global_batch_size": 4}, resume=first)
    assert rest["steps"] == [2, 3]


def test_resume_takes_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    first = trained(tmp_path, **KEPT)
    settings = {**KEPT, "run_name": None, "epochs": 3}
    early = first["folder"] / "checkpoints" / names(4)[0]
    rest = trained(tmp_path, **settings, resume=str(early))
    assert rest["steps"] == list(range(5, 13))
    assert rest["folder"] == first["folder"]


def train_restarted(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A rank that the launcher has started a second time."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    try:
        return train(folder, settings)
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_resume_after_a_restart_takes_the_newest(tmp_path: Path) -> None:
    first = trained(tmp_path, 2, **KEPT)
    began = first["folder"] / "checkpoints" / names(2)[0]
    settings = {**KEPT, "epochs": 3, "resume": str(began)}
    for rest in run_ranks(2, train_restarted, tmp_path, settings):
        assert rest["steps"] == [5, 6]


def train_scored(folder: Path, scores: list[float], settings: dict[str, Any]) -> tuple[Any, ...]:
    """A validation whose metric `score` is given epoch by epoch; `loss` rises all the time."""
    manager = manager_for(folder, **{**KEPT, "epochs": len(scores), **settings})

    def eval_fn(model: nn.Module, batch: list[Tensor], metrics: MetricsCollector) -> None:
        count = len(batch[0])
        metrics.add("score", scores[manager.progress.epochs_done] * count, count)
        metrics.add("loss", float(manager.progress.epochs_done) * count, count)

    result = manager.fit(line(), points(), points(), eval_fn=eval_fn, optimizer=sgd)
    best = result.folder / "checkpoints" / "best"
    return result.best, best.resolve().name, len(result.history)


def best_of(folder: Path, scores: list[float], **settings: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = run_ranks(1, train_scored, folder, scores, settings)[0]
    return found


def test_best_metric_names_the_best_checkpoint(tmp_path: Path) -> None:
    scores = [0.2, 0.7, 0.4]
    assert best_of(tmp_path / "loss", scores)[:2] == (0.0, "step-00000004")
    assert best_of(tmp_path / "score", scores, best_metric="score")[:2] == (0.7, "step-00000008")


def train_and_list(folder: Path, scores: list[float], settings: dict[str, Any]) -> list[str]:
    train_scored(folder, scores, settings)
    return sorted(path.name for path in folder.glob("custom/kept/checkpoints/step-*"))


def test_keep_best_keeps_the_best_of_all_epochs(tmp_path: Path) -> None:
    """Four steps an epoch; the best scores are those of epochs 2 and 1, the newest is 5."""
    scores = [0.7, 0.9, 0.1, 0.6, 0.2]
    settings = {"best_metric": "score", "keep_last": 1}
    for keep, expected in {1: names(8, 20), 2: names(4, 8, 20), 3: names(4, 8, 16, 20)}.items():
        more = {**settings, "keep_best": keep}
        [left] = run_ranks(1, train_and_list, tmp_path / str(keep), scores, more)
        assert left == expected


def train_on_a_bad_disk(folder: Path, policy: str) -> tuple[list[int], str]:
    """Between steps 1 and 5 the place of the checkpoints is taken by a file."""
    place, hook = folder / "custom" / "kept" / "checkpoints", Notes()

    class Spoil(Callback):
        def on_step_end(self, manager: Any, result: Any) -> None:
            step = result.step
            manager.fault_tolerance.wait()  # so that it is known which saves fail
            if step == 1:
                place.write_text("")
            if step == 5:
                place.unlink()

    settings = {**KEPT, "checkpoint_frequency": 2, "on_save_failure": policy}
    manager = manager_for(folder, **settings, training_mode="single")
    try:
        manager.fit(line(), points(), optimizer=sgd, callbacks=[hook, Spoil()])
    except CheckpointError as error:
        return hook.steps, str(error)
    return hook.steps, ", ".join(sorted(path.name for path in place.glob("step-*")))


def test_on_save_failure_says_whether_training_goes_on(tmp_path: Path) -> None:
    [(steps, left)] = run_ranks(1, train_on_a_bad_disk, tmp_path / "a", "continue")
    assert steps == list(range(1, 9))
    assert left == ", ".join(names(6, 8))
    [(steps, told)] = run_ranks(1, train_on_a_bad_disk, tmp_path / "b", "stop")
    assert steps in ([1, 2], [1, 2, 3])  # at the first look after the writing has failed
    assert "could not save step 2" in told


def test_best_metric_mode_says_which_way_is_better(tmp_path: Path) -> None:
    scores = [0.7, 0.2, 0.4]
    chosen = {"best_metric": "score"}
    for mode, best in (("auto", 0.7), ("max", 0.7), ("min", 0.2)):
        got = best_of(tmp_path / mode, scores, **chosen, best_metric_mode=mode)
        assert got[0] == pytest.approx(best), mode
    lost = best_of(tmp_path / "lost", scores, best_metric="loss", best_metric_mode="max")
    assert lost[:2] == (2.0, "step-00000012")


def test_early_stopping_patience_ends_a_run_that_gets_no_better(tmp_path: Path) -> None:
    scores = [0.1, 0.3, 0.2, 0.3, 0.1, 0.9]
    chosen = {"best_metric": "score"}
    assert best_of(tmp_path / "all", scores, **chosen)[2] == 6
    for patience, epochs in ((1, 3), (2, 4), (3, 5), (4, 6)):
        folder = tmp_path / str(patience)
        got = best_of(folder, scores, **chosen, early_stopping_patience=patience)
        assert got[2] == epochs, patience


def test_save_dir_recipe_and_run_name_make_the_run_folder(tmp_path: Path) -> None:
    folder = trained(tmp_path / "here", 2, recipe="digits", run_name="first")["folder"]
    assert folder == tmp_path / "here" / "digits" / "first"
    assert yaml.safe_load((folder / "config.yaml").read_text())["recipe"] == "digits"
    assert sorted(p.name for p in (folder / "events").iterdir()) == [
        "rank-0.jsonl",
        "rank-1.jsonl",
    ]
    # Without a name each run gets a folder of its own.
    first, second = (trained(tmp_path / "there")["folder"] for _ in range(2))
    assert first != second and first.parent == second.parent == tmp_path / "there" / "custom"


def logged(folder: Path) -> list[int]:
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    return [e["step"] for e in map(json.loads, lines) if e["event"] == "step"]


def test_forecast_is_kept_with_the_run(tmp_path: Path) -> None:
    expected = tmp_path / "estimate" / "forecast.json"
    expected.parent.mkdir()
    expected.write_text('{"gpus": {"1": {"step_time_s": 0.5}}}')
    for given in (expected, expected.parent):
        folder = trained(tmp_path, forecast=str(given))["folder"]
        assert (folder / "forecast.json").read_text() == expected.read_text()
    expected.write_text('{"rows": []}')
    with pytest.raises(RankError, match=r"is not a forecast; give the forecast\.json"):
        trained(tmp_path, forecast=str(expected))
    with pytest.raises(RankError, match=r"forecast=.*/nothing\.json cannot be read: .*No such"):
        trained(tmp_path, forecast="nothing.json")


def test_log_every_says_how_often_a_step_is_recorded(tmp_path: Path) -> None:
    for every, steps in ((1, list(range(1, 9))), (3, [3, 6]), (20, [])):
        got = trained(tmp_path, batch_size=2, log_every=every)
        assert logged(got["folder"]) == steps


def test_tensorboard_writes_curves(tmp_path: Path) -> None:
    folder = trained(tmp_path, tensorboard=True, batch_size=4, log_every=1)["folder"]
    (curves,) = (folder / "tensorboard").iterdir()
    # A TensorBoard file holds its tags as plain bytes.
    assert b"train/loss" in curves.read_bytes() and b"train/lr" in curves.read_bytes()
    assert not (trained(tmp_path, batch_size=4)["folder"] / "tensorboard").exists()


def shown(folder: Path, capsys: pytest.CaptureFixture[str], style: str) -> str:
    manager = manager_for(folder, progress=style, batch_size=4, training_mode="single")
    manager.fit(line(), points(), optimizer=sgd)
    return capsys.readouterr().out


def test_progress_chooses_what_a_person_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(tmp_path, capsys, "off") == ""
    lines = shown(tmp_path, capsys, "lines")
    assert "Epoch 1/1 - train loss" in lines and "━" not in lines.split("Summary")[0]
    assert "Epoch 1/1 - train loss" in shown(tmp_path, capsys, "auto")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any output for a terminal
    assert "━" in shown(tmp_path, capsys, "bar").split("Summary")[0]
    assert "━" not in shown(tmp_path, capsys, "auto").split("Summary")[0]  # it is a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "━" in shown(tmp_path, capsys, "auto").split("Summary")[0]
    assert "━" not in shown(tmp_path, capsys, "lines").split("Summary")[0]
