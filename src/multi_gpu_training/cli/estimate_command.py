"""`mgt estimate`: measure one GPU, forecast many, and say what they cost."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from multi_gpu_training.cli.measured_script import (
    MeasuringFlags,
    folder_problems,
    numbers,
    runner_for,
    too_small,
)
from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from multi_gpu_training.planning.estimate.outcome import Outcome
    from multi_gpu_training.planning.estimate.profiling import Profiled
    from multi_gpu_training.planning.forecast.interconnect import Interconnect
    from multi_gpu_training.planning.forecast.profile import StepProfile
    from multi_gpu_training.planning.forecast.result import Price, Strategy

MOST_GPUS = 1024
NO_TARGET = "image"  # the recipe that is measured where the command names none


@dataclass(frozen=True)
class EstimateFlags(MeasuringFlags):
    gpus: str | None
    interconnect: str | None
    curve: str | None
    gpus_per_node: int
    scaling: str | None
    strategy: str
    epochs: float | None
    samples: float | None
    price: float | None
    price_per: str
    price_source: str | None
    price_date: str | None
    catalog: str | None
    accelerator: str | None
    instance: str | None
    region: str | None
    spot: bool
    electricity: float | None
    profile: str | None
    as_json: bool
    out: str | None


def estimate(flags: EstimateFlags) -> int:
    """0 once the forecast is written."""
    from multi_gpu_training.planning.estimate.outcome import save
    from multi_gpu_training.planning.estimate.profiling import Profiled, profile_training
    from multi_gpu_training.planning.estimate.speedup import load_profile

    check(flags)
    link, prices = interconnect(flags), prices_of(flags)
    console = Console(highlight=False, stderr=flags.as_json)
    console.soft_wrap = not console.is_terminal  # files and pipes get whole lines
    if flags.profile is not None:
        found = Profiled(load_profile(flags.profile))
    else:
        target, *words = flags.command
        with runner_for("estimate", flags, console) as runner:
            # `image --mode cnn` or `train.py`: what the forecast is of.
            found = profile_training(runner, " ".join([Path(target).name, *words]))
    outcome = forecast(flags, found, link, prices)
    files = save(outcome, Path(flags.out or default_folder(found.profile.name)))
    if flags.as_json:
        print(json.dumps(outcome.as_dict(), indent=1))
    else:
        say(outcome, console, asked_for_many=link is not None)
    console.print(f"written: {', '.join(map(str, files))}", markup=False)
    return 0


def forecast(
    flags: EstimateFlags, found: Profiled, link: Interconnect | None, prices: tuple[Price, ...]
) -> Outcome:
    from multi_gpu_training.planning.estimate.outcome import Outcome
    from multi_gpu_training.planning.estimate.speedup import ONE_GPU
    from multi_gpu_training.planning.estimate.training_length import training_length
    from multi_gpu_training.planning.forecast import predict

    profile = found.profile
    length = training_length(profile, flags.epochs, flags.samples)
    notes = [*found.notes, *length.notes]
    if profile.device == "CPU" and link is not None:
        notes.append("measured on a CPU: this is a forecast for CPU ranks, not for GPUs")
    if flags.electricity is not None and profile.power_w is None:
        notes.append(
            "--electricity: no power was measured (that takes an NVIDIA GPU with NVML), so the "
            "cost of electricity is unknown"
        )
    strategy: Strategy = "fsdp" if flags.strategy == "fsdp" else "ddp"
    if strategy == "fsdp" and not profile.block_bytes:
        raise ConfigError(
            "--strategy fsdp needs the model's blocks, which this profile.json was made without; "
            "measure again without --profile"
        )
    strong = (flags.scaling or profile.scaling) == "strong"
    result = predict(
        profile,
        link or ONE_GPU,
        possible(flags, link, profile, strong, notes),
        gpus_per_node=flags.gpus_per_node,
        scaling="strong" if strong else "weak",
        epochs=length.epochs,
        samples=length.samples,
        price=prices,
        electricity_per_kwh=flags.electricity if profile.power_w is not None else None,
        images=profile.images,
        strategy=strategy,
    )
    return Outcome(profile, result, length.words, tuple(notes), strategy)


def possible(
    flags: EstimateFlags,
    link: Interconnect | None,
    profile: StepProfile,
    strong: bool,
    notes: list[str],
) -> list[int]:
    """The numbers of GPUs to forecast: those asked for, or all that can be."""
    if flags.gpus is not None or link is None:
        return gpus_of(flags)
    known = []
    for count in gpus_of(flags):
        try:
            link.allreduce_s(1.0, count, math.ceil(count / flags.gpus_per_node))
            known.append(count)
        except ConfigError as error:
            refusal = error.problems[0]
    if len(known) < len(gpus_of(flags)):
        notes.append(f"other numbers of GPUs: {refusal}")
    whole = profile.per_rank_batch * profile.accumulation
    if strong and whole < known[-1]:
        notes.append(f"strong scaling of a batch of {whole} ends at {whole} GPUs")
        known = [count for count in known if count <= whole]
    return known


def say(outcome: Outcome, console: Console, asked_for_many: bool) -> None:
    from multi_gpu_training.planning.estimate.outcome import measured_lines

    console.print("measured", markup=False)
    for line in measured_lines(outcome.profile):
        console.print(f"  {line}", markup=False)
    console.print()
    width = console.width
    for table in outcome.tables():
        table.show(console)
        console.width = width  # which a wide table may have changed
    if not asked_for_many:
        console.print()
        console.print(
            f"For more than one {outcome.unit} say what connects them: --interconnect NAME, or "
            "--curve FILE with your own times. There are",
            markup=False,
        )
        console.print(listing(), markup=False)


def default_folder(name: str) -> Path:
    word = re.sub(r"[^A-Za-z0-9]+", "-", Path(name.split()[0]).stem).strip("-") or "training"
    return Path("runs/estimate") / f"{word}-{datetime.now():%Y%m%d-%H%M%S}"


# What the flags mean, and which contradict each other


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
            f"--gpus {flags.gpus}: how fast {many[0]} GPUs exchange gradients depends on the "
            "network between them; give --interconnect NAME or --curve FILE. "
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


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def check(flags: EstimateFlags) -> None:
    """Raise one ConfigError with everything that is wrong with the flags."""
    problems = flags.problems()
    problems += too_small(("--gpus-per-node", flags.gpus_per_node, 1))
    problems += folder_problems("--out", flags.out)
    chooses = flags.accelerator or flags.instance
    describes = flags.price_per == "node" or flags.price_source or flags.price_date
    wrong = {
        "--interconnect and --curve both describe the network; use only one": (
            flags.interconnect is not None and flags.curve is not None
        ),
        "--epochs and --samples both set the length of the training; use only one": (
            flags.epochs is not None and flags.samples is not None
        ),
        f"--scaling {flags.scaling}: use strong or weak": (
            flags.scaling not in (None, "strong", "weak")
        ),
        f"--strategy {flags.strategy}: use ddp or fsdp": flags.strategy not in ("ddp", "fsdp"),
        f"--price-per {flags.price_per}: use gpu or node": flags.price_per not in ("gpu", "node"),
        "--price and --catalog both set the price; use only one": (
            flags.price is not None and flags.catalog is not None
        ),
        "--accelerator, --instance, --region and --spot choose from a --catalog": (
            flags.catalog is None and bool(chooses or flags.region or flags.spot)
        ),
        "--catalog needs --accelerator (like H100) or --instance to choose a row": (
            flags.catalog is not None and not chooses
        ),
        "--price-per, --price-source and --price-date describe a --price; add it": (
            flags.price is None and bool(describes)
        ),
        f"--profile measures nothing, so {' '.join(flags.command)} would not be used; drop one of "
        "the two": flags.profile is not None and flags.command != [NO_TARGET],
    }
    problems += [text for text, is_so in wrong.items() if is_so]
    for name in ("price", "electricity", "epochs", "samples"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < math.inf:
            problems.append(f"--{name} {value:g}: give a number above 0")
    if flags.price_date is not None and not _is_day(flags.price_date):
        problems.append(f"--price-date {flags.price_date[:40]!r}: give a day like 2026-01-31")
    try:
        gpus_of(flags)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
