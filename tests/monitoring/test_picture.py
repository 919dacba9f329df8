"""metrics.png and plot_metrics(): axes that a person can read."""

from __future__ import annotations

from typing import Any

import numpy as np

from multi_gpu_training.monitoring.report.charts import Series
from multi_gpu_training.monitoring.report.picture import device_panel, figure_of, logged_panel

STEPS = np.arange(1.0, 401.0)


def drawn(name: str, values: np.ndarray) -> Any:
    figure = figure_of([logged_panel(name, [Series("training", STEPS[: len(values)], values)])])
    figure.canvas.draw()
    return figure.axes[0]


def labels(axis: Any) -> list[str]:
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    return [text.get_text() for place, text in ticks if low <= place <= high]


def test_one_spike_does_not_press_the_loss_flat() -> None:
    loss = 0.5 + np.exp(-STEPS / 100)
    loss[200] = 45.0
    axes = drawn("loss", loss)
    assert axes.get_yscale() == "linear" and 1.4 < axes.get_ylim()[1] < 2.0
    assert axes.get_title() == "Loss (1 point outside, up to 45)"
    loss[200] = -45.0
    assert drawn("loss", loss).get_title() == "Loss (1 point outside, down to -45)"
    # The start is high for a reason, and stays in the picture.
    assert drawn("loss", 0.5 + 10 * np.exp(-STEPS / 30)).get_ylim()[1] > 10


def test_a_loss_over_decades_has_a_log_axis_with_ticks_in_plain_numbers() -> None:
    axes = drawn("loss", 20 * np.exp(-STEPS / 80))
    assert axes.get_yscale() == "log"
    shown = labels(axes.yaxis)
    assert len(shown) >= 3 and {"0.5", "1", "10"} <= set(shown)
    assert not any("10^" in label or "$" in label for label in shown)


def test_rates_begin_at_zero_and_axes_have_names_and_units() -> None:
    axes = drawn("samples_per_s", 3000 + 100 * np.sin(STEPS))
    assert axes.get_ylim()[0] == 0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer step", "samples per second")
    assert "1k" in labels(axes.yaxis)
    assert drawn("accuracy", STEPS / 400).get_ylabel() == "%"
    memory = Series("rank 0", np.array([0.0, 1200.0]), np.array([18.0, 18.2]))
    axes = figure_of([device_panel("Memory", "GB", [memory])]).axes[0]
    assert axes.get_ylim()[0] == 0 and axes.get_ylabel() == "GB"
    assert axes.get_xlabel() == "minutes since the start" and axes.get_xlim()[1] < 30
