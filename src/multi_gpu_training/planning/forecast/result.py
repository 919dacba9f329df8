"""What a forecast says: one row for each number of GPUs, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Scaling = Literal["weak", "strong"]
Strategy = Literal["ddp", "fsdp"]

# The names of what holds a row back: the largest of the losses against perfect scaling.
Limit = Literal["nothing", "communication", "stragglers", "input pipeline", "unexplained", "batch"]


@dataclass(frozen=True)
class Price:
    """What a GPU costs, with where the number comes from and of which day it is."""

    per_gpu_hour: float
    source: str
    date: str
    currency: str = "USD"
    # Where nodes are rented whole: this many GPUs are paid together.
    gpus_billed_together: int = 1
    # Its type, where it is an offer of a catalog.
    instance: str = ""

    def hourly(self, gpus: int) -> float:
        """An hour of so many GPUs, and of those that come with them."""
        together = self.gpus_billed_together
        return math.ceil(gpus / together) * together * self.per_gpu_hour


@dataclass(frozen=True)
class ForecastRow:
    """A training on this many GPUs. Times are seconds, of one optimizer step unless it says so.

    `low_*` and `high_*` bound the band: see `Forecast.band_meaning`."""

    gpus: int
    nodes: int
    per_rank_batch: int
    accumulation: int
    global_batch: int
    step_s: float
    low_step_s: float
    high_step_s: float
    samples_per_s: float
    low_samples_per_s: float
    high_samples_per_s: float
    speedup: float
    efficiency: float
    low_efficiency: float
    high_efficiency: float
    # Where the step's time goes: compute + exposed + straggler + input + unexplained = step_s.
    compute_s: float
    communication_s: float  # all of it, hidden or not
    exposed_communication_s: float
    straggler_s: float
    input_wait_s: float
    unexplained_s: float
    limit: Limit
    extrapolated: bool  # the all-reduce time is beyond what was measured
    price: Price | None = None
    training_s: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    low_cost: float | None = None
    high_cost: float | None = None
    electricity_cost: float | None = None


@dataclass(frozen=True)
class Forecast:
    """`rows` in the order asked for. `notes` are sentences to print below the table."""

    profile_name: str
    device: str
    interconnect: str
    interconnect_source: str
    scaling: Scaling
    rows: tuple[ForecastRow, ...]
    band_level: float
    band_meaning: str
    # The smallest N from which a sample costs 10 % more GPU time than on one GPU, and stays so up
    # to the largest asked for; None if it does not stay so. `notes` name smaller ones.
    cost_rises_from: int | None
    notes: tuple[str, ...] = ()

    @property
    def prices(self) -> tuple[Price, ...]:
        """What the rows are paid with; several where a catalog has cheaper ones for some."""
        return tuple(dict.fromkeys(row.price for row in self.rows if row.price is not None))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
