"""A request reaches a user's script through the environment, and leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import line, manager_for, points, sgd, squares
from torch import Tensor, nn

from multi_gpu_training import Callback, MultiGPUConfig, TrainingMode
from multi_gpu_training.measure.case import Case, CaseResult
from multi_gpu_training.measure.footprint import COUNTED, Footprint
from multi_gpu_training.measure.meter import Meter
from multi_gpu_training.measure.request import ASKED, VARIABLE, MeasureRequest, requested
from multi_gpu_training.measure.script_runner import describe

KINDS = ("meter", "footprint", "profiler", "recorder")


def request_for(folder: Path, kind: str) -> MeasureRequest:
    return MeasureRequest(kind, str(folder / "out"), 1, 4, mode="single", device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_without_saving_and_notes_what_the_user_asked_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(request_for(tmp_path, kind), settings={"learning_rate": 0.5})
    monkeypatch.setenv(VARIABLE, request.save())
    measurement = requested()
    assert measurement is not None and measurement.request == request
    asked = MultiGPUConfig(batch_size=24, epochs=7, resume="auto", learning_rate=0.1)
    config = measurement.adapt(asked)
    assert (config.learning_rate, config.resume) == (0.5, None)
    assert not config.enable_fault_tolerance and Path(config.save_dir).is_relative_to(request.out)
    noted = json.loads((Path(request.out) / ASKED).read_text())
    assert (noted["epochs"], noted["batch_size"], noted["per_rank_batch"]) == (7, 24, 24)


def test_an_ordinary_run_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert requested() is None


def test_a_footprint_counts_one_step_and_then_leaves_the_trainer_alone(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, batch_size=8, training_mode="single")
    _, loader, _ = manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    manager.callbacks.add(Footprint(manager, str(tmp_path)))
    manager.train_epoch(loader, 0)
    manager.finish()
    counted = json.loads((tmp_path / COUNTED).read_text())
    assert counted["parameters"] == counted["gradients"] == 4 * 5
    assert counted["batch"] == 8 * 4 * 5
    # The output of the line, its difference from the targets, or both.
    assert 8 * 4 <= counted["activations"] <= 2 * 8 * 4
    assert manager.trainer.state.transform is None


def test_a_loss_that_fails_while_it_is_counted_ends_the_counting(tmp_path: Path) -> None:
    def fails(model: nn.Module, batch: list[Tensor]) -> Tensor:
        raise ValueError("not today")

    manager = manager_for(tmp_path, batch_size=8, training_mode="single")
    _, loader, _ = manager.setup_training(line(), points(), loss_fn=fails, optimizer=sgd)
    counting = Footprint(manager, str(tmp_path))
    manager.callbacks.add(counting)
    with pytest.raises(ValueError, match="not today"):
        manager.train_epoch(loader, 0)
    manager.finish()
    before = counting.found["activations"]
    weight = torch.ones(100, requires_grad=True)
    (weight * torch.ones(100).exp()).sum().backward()
    assert counting.found["activations"] == before and manager.trainer.state.transform is None


class Replayed(Callback):
    """Forgets the events inside a step, as a replayed CUDA graph has none."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.steps = 0

    def on_forward(self, run: Any, share: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            self.meter.on_forward(run, share)

    def on_step_end(self, run: Any, result: Any) -> None:
        self.meter.on_step_end(run, result)


def test_steps_without_inner_events_have_the_samples_of_those_before(tmp_path: Path) -> None:
    request = replace(request_for(tmp_path, "meter"), warmup=1)
    request.save()
    manager = manager_for(tmp_path, training_mode="single")
    manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    manager.callbacks.add(Replayed(Meter(manager, request)))
    with pytest.raises(SystemExit):
        for _ in range(10):
            manager.trainer.train_step([torch.randn(6, 4), torch.randn(6, 1)])
    manager.finish()
    record = json.loads((tmp_path / "out" / "rank-0.json").read_text())
    assert record["samples_per_step"] == 6 and len(record["step_times_s"]) == 4


@pytest.mark.parametrize(("step_s", "shown"), [(1.39, "1,390 ms"), (0.0123, "12.3 ms")])
def test_a_measured_case_is_told_in_plain_figures(step_s: float, shown: str) -> None:
    found = CaseResult(Case("one rank", TrainingMode.SINGLE, 1), (step_s,) * 3, 32)
    assert describe(found).startswith(f"one rank: {shown} per step, ")
