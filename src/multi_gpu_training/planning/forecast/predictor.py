"""One measured step and an interconnect in, one row for each number of GPUs out."""

from __future__ import annotations

from collections.abc import Sequence

from .interconnect import Interconnect
from .profile import StepProfile
from .result import Forecast, Price, Scaling


def predict(
    profile: StepProfile,
    interconnect: Interconnect,
    gpus: Sequence[int],
    *,
    gpus_per_node: int = 8,
    scaling: Scaling = "weak",
    global_batch: int | None = None,
    epochs: float | None = None,
    samples: float | None = None,
    loader_workers: int | None = None,
    price: Price | None = None,
    electricity_per_kwh: float | None = None,
    power_overhead: float = 1.0,
    residual: bool = True,
) -> Forecast:
    """What to expect on each number of GPUs.

    `weak` keeps the profile's batch per GPU and its accumulation; `strong` keeps `global_batch`
    (by default what one GPU takes a step) and shares it out: first accumulation shrinks, then the
    micro-batch. Time, GPU-hours and cost need to know how long the training is: `samples` in all,
    or `epochs` of the profile's `dataset_samples`. `residual=False` leaves out what published
    points lose beyond communication, stragglers and input.
    """
    raise NotImplementedError
