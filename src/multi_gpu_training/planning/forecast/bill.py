"""What a training of known length takes: hours, GPU-hours, money, electricity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .length import Length
from .result import Price, Row


def priced(
    row: Row,
    length: Length | None,
    offers: Sequence[Price],
    power_w: float | None,
    electricity_per_kwh: float | None,
    power_overhead: float = 1.0,
) -> Row:
    """The row with its price, and with time and cost where the training's length is known."""
    price = cheapest(offers, row.gpus, row.nodes)
    result = replace(row, price=price)
    if length is None:
        return result
    steps = length.steps(row.global_batch)
    hours = steps * row.step_s / 3600
    result = replace(result, training_s=hours * 3600, gpu_hours=hours * row.gpus)
    if price is not None:
        hourly = price.hourly(row.gpus)
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


def cheapest(offers: Sequence[Price], gpus: int, nodes: int) -> Price | None:
    """The cheapest offer for so many GPUs, of those that hold a node of them if any does: GPUs of
    two instances are not connected as those of one are."""
    inside = math.ceil(gpus / nodes)
    holding = [offer for offer in offers if offer.gpus_billed_together >= inside]
    return min(holding or offers, key=lambda offer: offer.hourly(gpus), default=None)


def notes(rows: Sequence[Row], length: Length | None) -> list[str]:
    """What was paid, with its source and date, for which rows."""
    found = []
    users: dict[Price, list[Row]] = {}
    for row in rows:
        if row.price is not None:
            users.setdefault(row.price, []).append(row)
    if users and length is None:
        found.append("No cost: it is not known how many samples the training has.")
    for price, paying in users.items():
        what = "Price" if len(users) == 1 else f"Price on {_gpus(paying)}"
        together = price.gpus_billed_together
        found.append(
            f"{what}: {price.per_gpu_hour:.4g} {price.currency} per GPU-hour, {price.source}, "
            f"{price.date}"
            + (f"; {together} GPUs are paid together, used or not." if together > 1 else ".")
        )
        apart = [row for row in paying if price.instance and together * row.nodes < row.gpus]
        if apart:
            found.append(
                f"{_gpus(apart)}: no such instance holds a node of the forecast, so that several "
                "are taken, and what connects them may be slower."
            )
    return found


def _gpus(rows: Sequence[Row]) -> str:
    counts = [row.gpus for row in rows]
    return f"{', '.join(map(str, counts))} GPU{'s' if counts != [1] else ''}"
