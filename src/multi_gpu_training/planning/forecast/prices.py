"""What GPUs cost: from the user, or from a catalog file in SkyPilot's format."""

from __future__ import annotations

from pathlib import Path

from .result import Price


def price_per_gpu(amount: float, *, source: str = "--price", date: str | None = None) -> Price:
    raise NotImplementedError


def price_per_node(
    amount: float, gpus_per_node: int, *, source: str = "--price-per-node", date: str | None = None
) -> Price:
    """A node is paid whole, also when fewer of its GPUs are used."""
    raise NotImplementedError


def price_from_catalog(
    path: Path,
    accelerator: str,
    *,
    gpus: int | None = None,
    region: str | None = None,
    spot: bool = False,
) -> Price:
    """The cheapest matching offer of a SkyPilot catalog CSV (InstanceType, AcceleratorName,
    AcceleratorCount, Price, SpotPrice, Region, ...); its file's date is the price's date."""
    raise NotImplementedError
