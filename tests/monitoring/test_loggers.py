"""Loggers: the same metrics in every one of them, in every kind of loop, and after a resume."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import Callback, ConfigError
from multi_gpu_training.monitoring.loggers import known_loggers


class Kept:
    """A logger of the user's own."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def rows(folder: Path) -> list[tuple[int, str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(r["step"]), r["name"], float(r["value"])) for r in csv.DictReader(file)]


class Own(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        run.log(twice=2 * result.step, **{"weights/norm": run.model.weight.norm()})


def test_every_logger_gets_training_validation_and_the_users_own(tmp_path: Path) -> None:
    kept = Kept()
    manager = manager_for(
        tmp_path, batch_size=8, training_mode="single", log_every=1, loggers=["csv"]
    )
    manager.fit(
        line(),
        points(16),
        points(4),
        loss_fn=squares,
        optimizer=sgd,
        callbacks=[Own()],
        loggers=[kept],
    )
    names = {(step, name) for step, metrics in kept.logged for name in metrics}
    assert {(1, "train/loss"), (2, "train/loss"), (2, "val/loss"), (1, "twice")} <= names
    assert kept.closed
    assert {(step, name) for step, name, _ in rows(manager.folder)} == names
    losses = [event["loss"] for event in events(manager.folder, "step")]
    logged = [metrics["train/loss"] for _, metrics in kept.logged if "train/loss" in metrics]
    assert losses == logged
    own = [event["values"]["twice"] for event in events(manager.folder, "metrics")]
    assert own == [2.0, 4.0]


def test_csv_holds_each_step_once_after_a_resume(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step == 6:
                raise KeyboardInterrupt

    settings: dict[str, Any] = {
        "batch_size": 4,
        "training_mode": "single",
        "log_every": 1,
        "loggers": ["csv"],
        "run_name": "it",
        "epochs": 2,
        "enable_fault_tolerance": True,
        "checkpoint_frequency": 4,
    }
    with pytest.raises(KeyboardInterrupt):
        manager_for(tmp_path, **settings).fit(
            line(), points(16), loss_fn=squares, optimizer=sgd, callbacks=[Stop()]
        )
    manager = manager_for(tmp_path, resume="auto", **settings)
    manager.fit(line(), points(16), loss_fn=squares, optimizer=sgd)
    steps = [step for step, name, _ in rows(manager.folder) if name == "train/loss"]
    assert steps == list(range(1, 9))


def test_an_unknown_logger_is_named_with_those_there_are(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single", loggers=["tensorbored"])
    with pytest.raises(ConfigError, match="'tensorbored' is not a logger; there are csv, jsonl"):
        manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)


@pytest.mark.parametrize("wrong", ["csv", object(), Own])
def test_an_object_that_is_no_logger_is_refused(tmp_path: Path, wrong: Any) -> None:
    manager = manager_for(tmp_path, training_mode="single")
    with pytest.raises(ConfigError, match=r"this is not a logger; give an object with log\(metric"):
        manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, loggers=[wrong])


def test_loggers_are_found_by_their_files() -> None:
    assert {"csv", "jsonl", "tensorboard"} <= set(known_loggers())


def test_logging_a_tensor_does_not_change_training(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [Own()]):
        model = line()
        manager = manager_for(tmp_path, batch_size=4, training_mode="single")
        manager.fit(model, points(16), loss_fn=squares, optimizer=sgd, callbacks=callbacks)
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("value", ["high", torch.ones(3), None])
def test_logging_what_is_not_a_number_says_so(tmp_path: Path, value: Any) -> None:
    manager = manager_for(tmp_path, training_mode="single")
    manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    with pytest.raises(ConfigError, match="is not a number; give a number"):
        manager.log(score=value)
    manager.finish()


def test_a_logger_that_fails_is_left_out_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Kept):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            super().log(metrics, step)
            raise OSError("no more quota")

    broken, kept = Broken(), Kept()
    manager = manager_for(tmp_path, batch_size=4, training_mode="single", log_every=1)
    manager.fit(line(), points(16), loss_fn=squares, optimizer=sgd, loggers=[broken, kept])
    assert len(broken.logged) == 1 and len(kept.logged) >= 4
    assert "Broken failed and is left out: OSError: no more quota" in capsys.readouterr().err
