"""What a training of known length takes: hours, GPU-hours, money, electricity."""

from __future__ import annotations

import math
from dataclasses import replace

from .length import Length
from .result import Price, Row


def priced(
    row: Row,
    length: Length | None,
    price: Price | None,
    power_w: float | None,
    electricity_per_kwh: float | None,
    power_overhead: float = 1.0,
) -> Row:
    """The row with time and cost; as it is where the training's length is unknown."""
    if length is None:
        return row
    steps = length.steps(row.global_batch)
    hours = steps * row.step_s / 3600
    result = replace(row, training_s=hours * 3600, gpu_hours=hours * row.gpus)
    if price is not None:
        paid = math.ceil(row.gpus / price.gpus_billed_together) * price.gpus_billed_together
        hourly = paid * price.per_gpu_hour
        result = replace(
            result,
            cost=hourly * hours,
            low_cost=hourly * steps * row.low_step_s / 3600,
            high_cost=hourly * steps * row.high_step_s / 3600,
        )
    if electricity_per_kwh is not None and power_w is not None:
        kilowatts = row.gpus * power_w * power_overhead / 1000
        result = replace(result, electricity_cost=kilowatts * hours * electricity_per_kwh)
    return result
