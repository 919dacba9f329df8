"""`mgt estimate`: measure one GPU, forecast many, and say what they cost."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from multi_gpu_training.cli.estimate_flags import (
    EstimateFlags,
    check,
    gpus_of,
    interconnect,
    listing,
    prices_of,
)
from multi_gpu_training.cli.measured_script import runner_for
from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from multi_gpu_training.planning.estimate.outcome import Outcome
    from multi_gpu_training.planning.estimate.profiling import Profiled
    from multi_gpu_training.planning.forecast.interconnect import Interconnect
    from multi_gpu_training.planning.forecast.profile import StepProfile
    from multi_gpu_training.planning.forecast.result import Price


def estimate(flags: EstimateFlags) -> int:
    """0 once the forecast is written."""
    from multi_gpu_training.planning.estimate.estimate_files import save

    check(flags)
    link, prices = interconnect(flags), prices_of(flags)
    console = Console(highlight=False, soft_wrap=True, stderr=flags.as_json)
    if flags.profile is None:
        found = measured_here(flags, console)
    else:
        from multi_gpu_training.planning.estimate.profiling import Profiled
        from multi_gpu_training.planning.estimate.speedup import load_profile

        found = Profiled(load_profile(flags.profile))
    outcome = forecast(flags, found, link, prices)
    files = save(outcome, Path(flags.out or default_folder(found.profile.name)))
    if flags.as_json:
        print(json.dumps(outcome.as_dict(), indent=1))
    else:
        say(outcome, console, asked_for_many=link is not None)
    console.print(f"written: {', '.join(map(str, files))}", markup=False)
    return 0


def measured_here(flags: EstimateFlags, console: Console) -> Profiled:
    from multi_gpu_training.planning.estimate.profiling import profile_training

    with runner_for("estimate", flags, console) as runner:
        return profile_training(runner, name_of(flags.command))


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
            "--electricity: no power was measured (that takes an NVIDIA GPU with NVML), so there "
            "is no cost of electricity"
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
    )
    return Outcome(profile, result, length.words, tuple(notes))


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
    outcome.report().show(console)
    if not asked_for_many:
        console.print()
        console.print(
            "For more than one GPU say what connects them: --interconnect NAME, or --curve FILE "
            "with your own times. There are",
            markup=False,
        )
        console.print(listing(), markup=False)


def name_of(command: Sequence[str]) -> str:
    """`image --mode cnn` or `train.py`: what the forecast is of."""
    return " ".join([Path(command[0]).name, *command[1:]])


def default_folder(name: str) -> Path:
    word = re.sub(r"[^A-Za-z0-9]+", "-", Path(name.split()[0]).stem).strip("-") or "training"
    return Path("runs/estimate") / f"{word}-{datetime.now():%Y%m%d-%H%M%S}"
