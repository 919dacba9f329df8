"""What GPUs cost: from the user, or from a catalog file in SkyPilot's format."""

from __future__ import annotations

import csv
import datetime
import math
from pathlib import Path

from multi_gpu_training.errors import ConfigError

from .result import Price

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
        raise ConfigError(f"no price catalog at {path}")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        column = "SpotPrice" if spot else "Price"
        missing = [c for c in (*CATALOG[:2], column) if c not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(
                f"{path} is not a SkyPilot catalog: it lacks {', '.join(missing)}; its first line "
                "must name InstanceType, AcceleratorName, AcceleratorCount, Price, Region"
            )
        rows = list(reader)
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
        cheapest.setdefault(offer[1], offer)
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
