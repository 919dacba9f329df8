"""What the fields about watching a run do."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import Callback
from multi_gpu_training.monitoring import run_events


class Pause(Callback):
    """Makes each step last."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, manager: Any, result: Any) -> None:
        time.sleep(self.seconds)


def recorded(folder: Path, pause_s: float = 0.0, **settings: Any) -> tuple[Path, Counter[str]]:
    settings = {"training_mode": "single", "batch_size": 2, "epochs": 3, "log_every": 4, **settings}
    manager = manager_for(folder, **settings)
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, callbacks=[Pause(pause_s)])
    lines = manager.run.events(0).read_text().splitlines()
    return manager.run.path, Counter(json.loads(text)["event"] for text in lines)


def test_monitor_records_phases_and_devices(tmp_path: Path) -> None:
    _, on = recorded(tmp_path, pause_s=0.02)
    assert on["phases"] >= 2 and on["device"] >= 1 and on["work"] == 1
    _, off = recorded(tmp_path, monitor=False)
    assert off["step"] == on["step"] == 6 and off["rank"] == off["run_end"] == 1
    assert not off["phases"] and not off["device"] and not off["work"]


def test_monitor_interval_s_is_how_often_devices_are_read(tmp_path: Path) -> None:
    _, often = recorded(tmp_path, pause_s=0.03, monitor_interval_s=0.02)
    _, seldom = recorded(tmp_path, pause_s=0.03, monitor_interval_s=60.0)
    assert often["device"] >= 5 and seldom["device"] == 1  # the one at the end


def test_report_is_written_at_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, _ = recorded(tmp_path)
    assert not (short / "report.html").exists()  # not worth it
    monkeypatch.setattr(run_events, "WORTH_A_REPORT_S", 0.0)
    path, _ = recorded(tmp_path)
    assert "</html>" in (path / "report.html").read_text() and (path / "metrics.png").exists()
    without, _ = recorded(tmp_path, report=False)
    assert not (without / "report.html").exists()


def test_validate_every_validates_inside_an_epoch(tmp_path: Path) -> None:
    validated: list[int] = []

    class Watch(Callback):
        def on_validation(self, run: Any, metrics: Any) -> None:
            validated.append(run.step)
            assert torch.is_grad_enabled() and run.model.training

    manager = manager_for(
        tmp_path, batch_size=2, training_mode="single", validate_every=3, epochs=2
    )
    manager.fit(line(), points(16), points(4), loss_fn=squares, optimizer=sgd, callbacks=[Watch()])
    assert validated == [3, 6, 8, 9, 12, 15, 16]  # and once at the end of each epoch


def test_validate_at_start_and_limit_val_batches_say_when_and_on_what(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def count(model: Any, batch: Any, metrics: Any) -> None:
        seen.append((manager.step, len(batch[0])))
        metrics.add("loss", 0.0, len(batch[0]))

    settings = {"batch_size": 4, "training_mode": "single", "validate_at_start": True}
    manager = manager_for(tmp_path, **settings, limit_val_batches=2)
    manager.fit(line(), points(16), points(16), loss_fn=squares, eval_fn=count)
    assert seen == [(0, 4), (0, 4), (4, 4), (4, 4)]


def test_f1_average_says_what_f1_is(tmp_path: Path) -> None:
    def predicted(model: Any, batch: Any, metrics: Any) -> None:
        metrics.add_predictions(torch.tensor([0, 0, 1, 0]), torch.tensor([0, 0, 1, 1]), 2)

    found = {}
    for how in ("macro", "micro", "binary"):
        manager = manager_for(tmp_path, training_mode="single", f1_average=how)
        data = points(4)
        result = manager.fit(line(), data, data, loss_fn=squares, eval_fn=predicted)
        found[how] = round(result.metrics["f1"], 4)
    assert found == {"macro": 0.7333, "micro": 0.75, "binary": 0.6667}


def test_ema_decay_and_swa_average_the_weights(tmp_path: Path) -> None:
    weights: list[Any] = []

    class Watch(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            weights.append(run.model.weight.detach().clone())

    def averaged(**settings: Any) -> Any:
        weights.clear()
        manager = manager_for(tmp_path, batch_size=4, training_mode="single", **settings)
        manager.fit(line(), points(20), loss_fn=squares, optimizer=sgd, callbacks=[Watch()])
        return manager.model.weight

    assert torch.allclose(averaged(swa_start=2, swa_every=3), (weights[1] + weights[4]) / 2)
    found, by_hand = averaged(ema_decay=0.5), line().weight.detach()
    for weight in weights:
        by_hand = 0.5 * by_hand + 0.5 * weight
    assert torch.allclose(found, by_hand)


def test_loggers_write_where_they_are_asked_to(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single", loggers=["csv"], log_every=1)
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    assert "1,train/loss," in (manager.folder / "metrics.csv").read_text()


def test_logger_options_reach_the_logger_and_secrets_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Trackio, which need not be installed."""
    asked: dict[str, Any] = {}
    logged: list[tuple[int, float]] = []

    class Tracked:
        id = "abc"

        def log(self, metrics: dict[str, float], step: int) -> None:
            logged.append((step, metrics["train/loss"]))

        def finish(self) -> None:
            asked["finished"] = True

    stand_in = ModuleType("trackio")
    stand_in.init = lambda **given: asked.update(given) or Tracked()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    options = {"trackio": {"project": "mine", "group": "first"}}
    manager = manager_for(
        tmp_path, training_mode="single", loggers=["trackio"], logger_options=options, log_every=1
    )
    manager.recipe_options["hub_token"] = "hf_secret"
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    assert (asked["project"], asked["group"], asked["finished"]) == ("mine", "first", True)
    assert asked["config"]["hub_token"] == "***" and asked["config"]["log_every"] == 1
    assert [step for step, _ in logged] == [1]


def test_profile_steps_are_traced_on_the_ranks_named(tmp_path: Path) -> None:
    settings = {"training_mode": "single", "batch_size": 4, "epochs": 1}  # four steps

    def traces(steps: str, ranks: str) -> list[str]:
        asked = {"profile_steps": steps, "profile_ranks": ranks}
        manager = manager_for(tmp_path / steps / ranks, **settings, **asked)
        manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)
        return sorted(path.name for path in (manager.folder / "profile").glob("*.gz"))

    assert traces("2-3", "0") == ["rank-0.steps-2-3.json.gz"]
    assert traces("2-3", "1") == [], "there is no such rank"
    assert traces("3-9", "all") == ["rank-0.steps-3-4.json.gz"], "training ended before"
    assert traces("5-9", "all") == []
