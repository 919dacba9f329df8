"""What a training takes: hours, GPU-hours, money, electricity, and where more GPUs cost more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .question import Length
from .result import ForecastRow, Price

DEARER = 1.1
MOST_SPANS = 4


def priced(
    row: ForecastRow,
    length: Length | None,
    offers: Sequence[Price],
    power_w: float | None,
    electricity_per_kwh: float | None,
    power_overhead: float = 1.0,
) -> ForecastRow:
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


def notes(rows: Sequence[ForecastRow], length: Length | None) -> list[str]:
    """What was paid, with its source and date, for which rows."""
    found = []
    users: dict[Price, list[ForecastRow]] = {}
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
                f"{_gpus(apart)}: no such instance holds a node of the forecast: several are "
                "taken, and what connects them may be slower."
            )
    return found


def _gpus(rows: Sequence[ForecastRow]) -> str:
    counts = [row.gpus for row in rows]
    return f"{', '.join(map(str, counts))} GPU{'s' if counts != [1] else ''}"


@dataclass(frozen=True)
class Rising:
    """`counts` are the numbers of GPUs that were looked at, ascending; `dearer` those of them
    where each sample costs 10 % more GPU time than on one GPU."""

    counts: tuple[int, ...]
    dearer: frozenset[int]

    @staticmethod
    def of(counts: Sequence[int], cost: Callable[[int], float | None]) -> Rising:
        """`cost` is GPU time against that of one GPU; None where it is not known."""
        costs = {count: cost(count) for count in sorted(set(counts))}
        known = {count: value for count, value in costs.items() if value is not None}
        return Rising(tuple(known), frozenset(n for n, value in known.items() if value >= DEARER))

    @property
    def lastingly_from(self) -> int | None:
        """The smallest number from which all that follow are dearer."""
        found = None
        for count in reversed(self.counts):
            if count not in self.dearer:
                break
            found = count
        return found

    def sentence(self) -> str:
        """What is true of all the numbers; nothing where there are none."""
        if not self.counts:
            return ""
        most, lasting = self.counts[-1], self.lastingly_from
        spans = self._spans(before=lasting)
        if lasting is None and not spans:
            return f"with up to {most} GPUs, no sample costs 10 % more GPU time than on one"
        if lasting is None:
            return (
                f"with {spans} GPUs, each sample costs 10 % more GPU time than on one; with {most} "
                "it does not"
            )
        also = f"; so it does with {spans}" if spans else ""
        return (
            f"with {lasting} or more GPUs, each sample costs 10 % more GPU time than on one{also}"
        )

    def _spans(self, before: int | None) -> str:
        """`2-4, 7`: the dearer numbers, neighbours together."""
        spans: list[list[int]] = []
        near = False
        for count in self.counts:
            if count == before:
                break
            if count in self.dearer:
                if near:
                    spans[-1].append(count)
                else:
                    spans.append([count])
            near = count in self.dearer
        words = [f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans]
        more = ["other"] if len(words) > MOST_SPANS else []
        return " and ".join([", ".join(words[:MOST_SPANS]), *more])
