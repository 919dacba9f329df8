"""The flags of `mgt estimate`: what they mean, and which contradict each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multi_gpu_training.cli.bench_command import numbers
from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from multi_gpu_training.planning.forecast.interconnect import Interconnect
    from multi_gpu_training.planning.forecast.result import Price

MOST_GPUS = 1024
NO_TARGET = "image"  # the recipe that is measured where the command names none


@dataclass(frozen=True)
class EstimateFlags:
    """What the command line said; None where it said nothing."""

    command: list[str]
    gpus: str | None = None
    interconnect: str | None = None
    curve: str | None = None
    gpus_per_node: int = 8
    scaling: str | None = None
    epochs: float | None = None
    samples: float | None = None
    price: float | None = None
    price_per: str = "gpu"
    price_source: str | None = None
    price_date: str | None = None
    catalog: str | None = None
    accelerator: str | None = None
    instance: str | None = None
    region: str | None = None
    spot: bool = False
    electricity: float | None = None
    profile: str | None = None
    steps: int = 50
    warmup: int | None = None
    device: str = "auto"
    timeout_s: float = 600.0
    as_json: bool = False
    out: str | None = None


def gpus_of(flags: EstimateFlags) -> list[int]:
    if flags.gpus is not None:
        return sorted(set(numbers("--gpus", flags.gpus)))
    if flags.interconnect is None and flags.curve is None:
        return [1]
    return [2**power for power in range(int(math.log2(MOST_GPUS)) + 1)]


def interconnect(flags: EstimateFlags) -> Interconnect | None:
    """None where one GPU is all that is asked for; several without one are refused."""
    from multi_gpu_training.planning.forecast import measured, named

    link = None
    if flags.curve is not None:
        link = measured(Path(flags.curve))
    elif flags.interconnect is not None:
        link = named(flags.interconnect)
    if link is not None:
        if flags.gpus is not None:  # refused now, not after minutes of measuring
            for count in gpus_of(flags):
                link.allreduce_s(1.0, count, math.ceil(count / flags.gpus_per_node))
        return link
    many = [count for count in gpus_of(flags) if count > 1]
    if many:
        raise ConfigError(
            f"--gpus {flags.gpus}: how fast {many[0]} GPUs exchange gradients depends on what "
            "connects them, and that is not guessed; give --interconnect NAME or --curve FILE. "
            f"There are\n{listing()}"
        )
    return None


def prices_of(flags: EstimateFlags) -> tuple[Price, ...]:
    """What was given, or what a catalog offers; nothing without either."""
    from multi_gpu_training.planning.forecast import (
        price_per_gpu,
        price_per_node,
        prices_from_catalog,
    )

    if flags.catalog is not None:
        return prices_from_catalog(
            Path(flags.catalog),
            flags.accelerator,
            instance=flags.instance,
            region=flags.region,
            spot=flags.spot,
        )
    if flags.price is None:
        return ()
    source = flags.price_source or "given with --price"
    if flags.price_per == "node":
        node = flags.gpus_per_node
        return (price_per_node(flags.price, node, source=source, date=flags.price_date),)
    return (price_per_gpu(flags.price, source=source, date=flags.price_date),)


def listing() -> str:
    """The named interconnects, one a line."""
    from multi_gpu_training.planning.forecast import named_interconnects

    known = named_interconnects()
    wide = max(len(link.name) for link in known)
    return "\n".join(f"  {link.name:{wide}}  {link.about}" for link in known)


def check(flags: EstimateFlags) -> None:
    """Raise one ConfigError with everything that is wrong with the flags."""
    problems = []
    if flags.interconnect is not None and flags.curve is not None:
        problems.append("--interconnect and --curve both say what connects the GPUs; give one")
    if flags.epochs is not None and flags.samples is not None:
        problems.append("--epochs and --samples both say how long the training is; give one")
    if flags.scaling not in (None, "strong", "weak"):
        problems.append(f"--scaling {flags.scaling}: use strong or weak")
    if flags.price_per not in ("gpu", "node"):
        problems.append(f"--price-per {flags.price_per}: use gpu or node")
    if flags.price is not None and flags.catalog is not None:
        problems.append("--price and --catalog both say what a GPU costs; give one")
    if flags.catalog is None and (
        flags.accelerator or flags.instance or flags.region or flags.spot
    ):
        problems.append("--accelerator, --instance, --region and --spot choose from a --catalog")
    if flags.catalog is not None and not (flags.accelerator or flags.instance):
        problems.append("--catalog needs --accelerator (like H100) or --instance to choose a row")
    if flags.price is None and (
        flags.price_per == "node" or flags.price_source or flags.price_date
    ):
        problems.append("--price-per, --price-source and --price-date describe a --price; add it")
    if flags.profile is not None and flags.command != [NO_TARGET]:
        problems.append(
            f"--profile measures nothing, so {' '.join(flags.command)} would not be used; "
            "drop one of the two"
        )
    for name, value in (
        ("--price", flags.price),
        ("--electricity", flags.electricity),
        ("--epochs", flags.epochs),
        ("--samples", flags.samples),
        ("--timeout", flags.timeout_s),
    ):
        if value is not None and not (value > 0 and math.isfinite(value)):
            problems.append(f"{name} {value:g}: give a number above 0")
    for name, count, least in (
        ("--steps", flags.steps, 2),
        ("--warmup", flags.warmup, 1),
        ("--gpus-per-node", flags.gpus_per_node, 1),
    ):
        if count is not None and count < least:
            problems.append(f"{name} {count}: use at least {least}")
    if flags.device not in ("auto", "cpu", "cuda"):
        problems.append(f"--device {flags.device}: use auto, cpu or cuda")
    try:
        gpus_of(flags)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
