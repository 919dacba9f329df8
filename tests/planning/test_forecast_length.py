"""Time and cost count steps: an epoch has at least one, and max_steps ends a training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multi_gpu_training import estimate_training_speedup
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.estimate.training_length import training_length
from multi_gpu_training.planning.forecast import (
    Curve,
    Interconnect,
    StepProfile,
    predict,
    price_per_gpu,
)
from multi_gpu_training.planning.forecast.question import Length

# 100 steps an epoch of 0.1 s each, and nothing to exchange.
PROFILE = StepProfile(
    "cnn.py", "CPU", 32, 0.04, 0.05, 0.01, (), (0.1,) * 20, dataset_samples=3200, epochs=4
)
FREE = Interconnect("free", "", (Curve(8, 1, (1,), (1e-9,), "x"), Curve(16, 2, (1,), (1e-9,), "x")))


def test_an_epoch_has_at_least_one_step() -> None:
    assert Length(4, 3200).steps(32) == 400
    assert Length(4, 3201).steps(32) == 404  # the last one of each epoch is not filled
    assert Length(4, 3200).steps(32 * 1024) == 4
    assert Length(0.5, 3200).steps(32 * 1024) == 1
    assert Length(2.5, 3201).steps(32) == 2 * 101 + 51


def test_more_gpus_than_an_epoch_fills_save_no_time_and_cost_more() -> None:
    answer = predict(
        PROFILE, FREE, [1, 100, 1024], epochs=4, price=price_per_gpu(3600.0), residual=False
    )
    one, filled, many = answer.rows
    assert one.training_s == pytest.approx(40)
    assert filled.training_s == many.training_s == pytest.approx(0.4)
    assert many.gpu_hours == pytest.approx(1024 * 0.4 / 3600)
    assert many.cost == pytest.approx(1024 * 0.4)
    assert many.low_cost == many.high_cost == many.cost  # without published losses: no band
    # 96 GPUs need two steps an epoch, 104 leave some of one empty; from 112 on it is 10 % and more.
    assert answer.cost_rises_from == 112
    (note,) = [note for note in answer.notes if "samples of an epoch" in note]
    assert note.startswith(
        "With 1024 or more GPUs, each step has room for more than the 3,200 samples"
    )


def test_what_is_left_out_at_the_end_of_an_epoch_is_not_counted_per_sample() -> None:
    (row,) = predict(PROFILE, FREE, [1], samples=6400 + 16).rows
    assert row.training_s == pytest.approx(201 * 0.1)  # two epochs and half a batch


def test_max_steps_ends_a_training_unless_its_epochs_do() -> None:
    short = replace(PROFILE, max_steps=50)
    length = training_length(short)
    assert length.words == "50 steps of one GPU" and length.epochs == 0.5
    assert training_length(replace(PROFILE, max_steps=1000)).words == "4 epochs"
    assert training_length(short, epochs=2).words == "2 epochs"
    stream = replace(short, dataset_samples=None)
    assert training_length(stream).samples == 50 * 32
    for samples in (3200, 3201, 3231):  # a last batch that is not full makes no step of it
        uneven = training_length(replace(short, dataset_samples=samples))
        assert Length.of(samples, uneven.epochs, None).steps(32) == 50  # type: ignore[union-attr]


def test_the_python_function_knows_max_steps() -> None:
    short = replace(PROFILE, max_steps=50)
    assert estimate_training_speedup(1, short)["training_s"] == pytest.approx(5.0)
    assert estimate_training_speedup(1, short, epochs=1)["training_s"] == pytest.approx(10.0)


@pytest.mark.parametrize("wrong", [{"epochs": -3.0}, {"epochs": 0.0}, {"samples": float("inf")}])
def test_a_training_without_a_length_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0"):
        predict(PROFILE, FREE, [1], epochs=wrong.get("epochs"), samples=wrong.get("samples"))
