"""The picture of a forecast is drawn from what is true of one GPU, and shows all of it."""

from __future__ import annotations

import pytest

from multi_gpu_training.planning.estimate.outcome import Outcome, _cost, _efficiency, _parts, _speed
from multi_gpu_training.planning.forecast import (
    GradientBucket,
    Interconnect,
    StepProfile,
    named,
    predict,
    price_per_gpu,
)

PROFILE = StepProfile(
    "net", "NVIDIA A100", 32, 0.03, 0.06, 0.01, (GradientBucket(25 * 2**20, 0.06),), (0.1,) * 20,
    dataset_samples=1_000_000,
)  # fmt: skip
LINK = named("a100-nvlink+infiniband-8x200g")


def outcome(gpus: list[int], link: Interconnect = LINK) -> Outcome:
    answer = predict(PROFILE, link, gpus, epochs=1, price=price_per_gpu(2.0), images=True)
    return Outcome(PROFILE, answer, "1 epoch")


@pytest.mark.parametrize("gpus", [[1, 8], [8, 64, 256]])
def test_linear_is_n_times_one_gpu_also_where_one_gpu_is_no_row(gpus: list[int]) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    _speed(axes, outcome(gpus).rows, gpus, "GPUs")
    (linear,) = [line for line in axes.get_lines() if line.get_label() == "linear"]
    assert list(linear.get_ydata()) == pytest.approx([320 * count for count in gpus])


def test_nothing_lies_on_the_edge_of_the_picture() -> None:
    from matplotlib.figure import Figure

    gpus = [8, 64, 256]  # costs differ by little: what margins take from their range is nothing
    found = outcome(gpus)
    efficiency, cost, parts = Figure().subplots(1, 3)
    _efficiency(efficiency, found.rows, gpus, "GPUs")
    _cost(cost, found, gpus, "GPUs")
    _parts(parts, found.rows, gpus, "GPUs")
    for axes, values in (
        (efficiency, [100 * row["high_efficiency"] for row in found.rows]),
        (cost, [row["high_cost"] for row in found.rows]),
        (parts, [1e3 * row["step_s"] for row in found.rows]),
    ):
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 1.05 * max(values)


def test_axes_are_named_and_their_ticks_can_be_read() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes, gpus = figure.subplots(), [1, 8, 1024]
    _speed(axes, outcome(gpus).rows, gpus, "GPUs")
    figure.canvas.draw()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("GPUs", "samples per second")
    ticks = [text.get_text() for text in axes.get_yticklabels()]
    assert {"1k", "10k", "100k"} <= set(ticks) and not any("$" in tick for tick in ticks)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "8", "1,024"]
