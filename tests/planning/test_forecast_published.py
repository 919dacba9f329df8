"""What is learnt from published tables, and that the shipped numbers are those of the script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.forecast import published
from multi_gpu_training.planning.forecast.published import Kind, predict_efficiency, shipped

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
POINT = {
    "model": "BERT-large",
    "params_millions": "336.2",
    "hardware": "DGX A100",
    "unit": "sequences/s",
    "gpus": "8",
    "baseline_gpus": "1",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import forecast

    yield forecast
    sys.modules.pop("forecast")


def test_any_column_but_the_gpus_may_be_missing() -> None:
    for column in POINT:
        for point in (
            {**POINT, column: ""},
            {key: value for key, value in POINT.items() if key != column},
        ):
            if column == "gpus":
                with pytest.raises(ConfigError, match="needs 'gpus'"):
                    predict_efficiency(point)
            else:
                middle, low, high = predict_efficiency(point)
                assert 0 < low < middle <= high <= 1.06 and middle <= 1
    assert predict_efficiency({"gpus": 8})[0] < 1


def test_the_answer_is_never_read_from_the_point() -> None:
    point = {**POINT, "efficiency": "0.1", "throughput": "1", "speedup": "0.8"}
    assert predict_efficiency(point) == predict_efficiency(POINT)


def test_the_baseline_is_not_predicted() -> None:
    assert predict_efficiency({**POINT, "baseline_gpus": "8"}) == (1, 1, 1)


def test_published_trainings_lose_more_on_more_older_and_smaller() -> None:
    def at(**changes: Any) -> float:
        return predict_efficiency({**POINT, **changes})[0]

    assert at(gpus=64) < at() < 1
    assert at(hardware="DGX-1 V100") < at() < at(hardware="8x H100 80GB SXM5")
    assert at(params_millions="20") < at()
    assert at(grad_accum="8") > at()
    assert at(unit="img/s") > at()
    assert at(framework="TensorFlow") < at(framework="PyTorch (Megatron-DeepSpeed)") == at()
    shrunk = {"batch_per_gpu": "16", "quality_flags": "batch_per_gpu_differs_from_baseline(64)"}
    assert at(**shrunk) < at()


def test_tiny_models_are_not_extrapolated_to() -> None:
    small, tiny = (shipped().efficiency(Kind(8, params_millions=p, image=0)) for p in (15, 0.01))
    assert small == tiny > 0.4


def test_hardware_is_known_by_its_generation() -> None:
    known = {
        "NVIDIA H200": 1,
        "NVIDIA A100-SXM4-80GB": 0,
        "Tesla V100": -1,
        "cpu": 0,
        "B200": 1,
        "K80": -1,
    }
    assert {name: published.generation(name) for name in known} == known


def test_the_band_holds_the_middle_and_widens_with_the_loss() -> None:
    fit = shipped()
    ends = [fit.band(efficiency) for efficiency in (1.0, 0.9, 0.7, 0.5)]
    widths = [high - low for low, high in ends]
    assert widths[:3] == sorted(widths[:3])
    for efficiency, (low, high) in zip((1.0, 0.9, 0.7, 0.5), ends, strict=True):
        assert efficiency / 2 <= low < efficiency <= high <= published.MOST_EFFICIENT


def test_a_model_left_out_is_not_learnt_from(script: Any) -> None:
    """Two made-up laws: the left-out model's own points never show in its prediction."""
    rows = []
    for model, loss in (("one", 0.02), ("two", 0.02), ("odd", 0.3)):
        for power in (1, 2, 3):
            rows.append(
                {
                    "model": model,
                    "gpus": str(2**power),
                    "efficiency": str((1 - loss) ** power),
                    "framework": "PyTorch",
                    "hardware": "A100",
                    "unit": "tokens/s",
                }
            )
    points = script.Points.of(rows)
    import numpy as np

    groups = np.array([row["model"] for row in rows])
    predicted = script.left_out(points, groups)
    odd = predicted[groups == "odd"]
    assert odd == pytest.approx([0.98, 0.98**2, 0.98**3], abs=0.005)


def test_any_table_with_these_columns_is_scored(script: Any, tmp_path: Path) -> None:
    table = tmp_path / "points.csv"
    table.write_text(
        "framework,model,gpus,efficiency\nPyTorch,x,8,0.9\nPyTorch,x,1,1.0\nJAX,y,16,0.8\n"
        "PyTorch,x,4,\n"
    )
    rows = [row for row in script.read(table) if script.usable(row)]
    scores = script.score_points(rows)
    assert scores["none: all points"].points == 2
    assert scores["none: PyTorch points"].linear == pytest.approx(0.1)


def test_the_shipped_numbers_are_those_of_the_script(script: Any) -> None:
    beside = Path(__file__).parents[3] / "shared/data/scaling"
    data = Path(os.environ.get("SCALING_DATA", beside))
    if not (data / "scaling_tables.csv").is_file():
        pytest.skip("no scaling_tables.csv in $SCALING_DATA: nothing to learn again from")
    text, document = script.learn(data / "scaling_tables.csv")
    assert tuple(document["coefficients"].values()) == shipped().coefficients
    assert (document["low"], document["high"]) == (shipped().low, shipped().high)
    assert text in (BENCHMARKS / "forecast.md").read_text()
