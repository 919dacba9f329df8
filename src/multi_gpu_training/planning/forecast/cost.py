"""What GPUs cost, from the user or a catalog in SkyPilot's format, and what a training takes:
hours, GPU-hours, money, electricity, and where more GPUs cost more."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import UnreadableFile, read_csv

from .question import Length, Question
from .result import ForecastRow, Price

DEARER = 1.1
MOST_SPANS = 4
# What SkyPilot's catalogs call their columns; the other columns are not needed.
CATALOG = ("AcceleratorName", "AcceleratorCount", "Price")


def price_per_gpu(amount: float, *, source: str = "--price", date: str | None = None) -> Price:
    """An hour of one GPU; without a date it is today's."""
    return Price(_positive(amount, source), source, date or _today())


def price_per_node(
    amount: float, gpus_per_node: int, *, source: str = "--price-per-node", date: str | None = None
) -> Price:
    """A node is paid whole, also when fewer of its GPUs are used."""
    each = _positive(amount, source) / gpus_per_node
    return Price(each, source, date or _today(), gpus_billed_together=gpus_per_node)


LARGEST_CATALOG = 2**26


def prices_from_catalog(
    path: Path,
    accelerator: str | None = None,
    *,
    instance: str | None = None,
    gpus: int | None = None,
    region: str | None = None,
    spot: bool = False,
) -> tuple[Price, ...]:
    """Matching offers of a SkyPilot catalog CSV, of its file's date: for each number of GPUs in an
    instance the cheapest. Which of them is best depends on how many GPUs are used.

    `accelerator` is a GPU's name (H100), `instance` an instance type; `gpus` wants instances with
    exactly so many. An instance is paid whole."""
    if not path.is_file():
        raise ConfigError(f"no price catalog at {path}", code="MGT104")
    column = "SpotPrice" if spot else "Price"
    try:
        names, rows = read_csv(path, LARGEST_CATALOG)
    except UnreadableFile as error:
        raise ConfigError(f"{error}; give a SkyPilot catalog") from None
    missing = [c for c in (*CATALOG[:2], column) if c not in names]
    if missing:
        raise ConfigError(
            f"{path} is not a SkyPilot catalog: it lacks {', '.join(missing)}; its first line "
            "must name InstanceType, AcceleratorName, AcceleratorCount, Price, Region"
        )
    wanted = _named(rows, "AcceleratorName", accelerator, path)
    wanted = _named(wanted, "InstanceType", instance, path)
    offers = [
        offer
        for row in wanted
        if (offer := _offer(row, column)) is not None
        and (gpus is None or offer[1] == gpus)
        and (region is None or (row.get("Region") or "").casefold() == region.casefold())
    ]
    if not offers:
        asked = [f"{gpus} GPUs" if gpus else "", region or "", "spot" if spot else ""]
        raise ConfigError(
            f"{path} has {instance or accelerator}, but none with a price and "
            f"{', '.join(filter(None, asked)) or 'a count of GPUs'}"
        )
    cheapest: dict[int, tuple[float, int, dict[str, str]]] = {}
    for offer in sorted(offers, key=lambda each: each[0]):
        cheapest.setdefault(offer[1], offer)  # the first of each size is its cheapest
    # The file does not say of which day its prices are.
    date = datetime.date.fromtimestamp(path.stat().st_mtime).isoformat()
    label = f"{path.name}: spot," if spot else f"{path.name}:"
    return tuple(
        _price(amount, count, row, label, date)
        for amount, count, row in sorted(cheapest.values(), key=lambda each: each[1])
    )


def _price(amount: float, count: int, row: dict[str, str], label: str, date: str) -> Price:
    instance = row.get("InstanceType") or ""
    place = ", ".join(filter(None, [instance, row.get("Region")]))
    return Price(amount / count, f"{label} {place}", date, "USD", count, instance)


def _named(
    rows: list[dict[str, str]], column: str, name: str | None, path: Path
) -> list[dict[str, str]]:
    """The rows of that name, in any case; all of them where none is asked for."""
    if name is None:
        return rows
    found = [row for row in rows if (row.get(column) or "").casefold() == name.casefold()]
    if not found:
        names = sorted({row[column] for row in rows if row.get(column)})
        raise ConfigError(f"{path} has no {name}; it has {', '.join(names) or 'no GPUs'}")
    return found


def _offer(row: dict[str, str], column: str) -> tuple[float, int, dict[str, str]] | None:
    """Price of the instance and its GPUs; None where the catalog leaves one of them empty."""
    try:
        amount, count = float(row[column]), float(row["AcceleratorCount"])
    except (TypeError, ValueError):
        return None
    if not (0 < amount < math.inf and 1 <= count < math.inf):
        return None
    return amount, int(count), row


def _positive(amount: float, source: str) -> float:
    if not 0 < amount < math.inf:
        raise ConfigError(f"{source}={amount:g} is not a price; give what an hour costs, above 0")
    return amount


def _today() -> str:
    return datetime.date.today().isoformat()


# The bill of a training


def priced(row: ForecastRow, question: Question) -> ForecastRow:
    """The row with its price, and with time and cost where the training's length is known."""
    price = cheapest(question.offers, row.gpus, row.nodes)
    if question.length is None:
        return replace(row, price=price)
    steps = question.length.steps(row.global_batch)
    hours = steps * row.step_s / 3600
    bill: dict[str, Any] = {"training_s": hours * 3600, "gpu_hours": hours * row.gpus}
    if price is not None:
        per_s = price.hourly(row.gpus) / 3600
        bill["cost"] = per_s * steps * row.step_s
        bill["low_cost"] = per_s * steps * row.low_step_s
        bill["high_cost"] = per_s * steps * row.high_step_s
    power, per_kwh = question.profile.power_w, question.electricity_per_kwh
    if per_kwh is not None and power is not None:
        kilowatts = row.gpus * power * question.power_overhead / 1000
        bill["electricity_cost"] = kilowatts * hours * per_kwh
    return replace(row, price=price, **bill)


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
        lasting = list(takewhile(lambda count: count in self.dearer, reversed(self.counts)))
        return lasting[-1] if lasting else None

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
        counts = takewhile(lambda count: count != before, self.counts)
        groups = groupby(counts, key=lambda count: count in self.dearer)
        spans = [list(neighbours) for dearer, neighbours in groups if dearer]
        words = [f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans]
        more = ["other"] if len(words) > MOST_SPANS else []
        return " and ".join([", ".join(words[:MOST_SPANS]), *more])
