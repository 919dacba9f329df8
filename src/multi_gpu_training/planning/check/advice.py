"""What to do with a measured training: memory and time as tables, and a command that is ready."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multi_gpu_training.planning.check.fit import Fit, Speed, size

WORTH_IT = 1.1  # times faster than one GPU: below it, more of them are wasted
# Flags of which the recommendation has its own, and how many words follow them.
OWN_FLAGS = ("--batch-size", "--num-gpus", "--multi-gpu")
OWN_FIELDS = ("batch_size", "num_workers", "use_mixed_precision", "world_size", "training_mode")


@dataclass(frozen=True)
class Recommendation:
    mode: str
    ranks: int
    batch_size: int
    num_workers: int
    mixed_precision: bool
    precision: str
    command: str
    reasons: tuple[str, ...]


def recommend(fit: Fit, words: Sequence[str], workers: int, ranks_at_hand: int) -> Recommendation:
    """The fastest way to run this training here with the batch that the user chose."""
    speed = chosen_speed(fit)
    reasons = []
    if speed.ranks > 1:
        gain = speed.samples_per_s / fit.speeds[0].samples_per_s
        text = "put together from each kind's speed" if speed.predicted else "measured"
        reasons.append(f"{speed.ranks} {fit.unit}s are {gain:.2f} times as fast as one ({text})")
    elif ranks_at_hand > 1:
        reasons.append(f"{ranks_at_hand} {fit.unit}s are hardly faster than one, or slower")
    if fit.counted.get("in_memory"):
        workers = 0
        reasons.append("the data is in memory: loader workers would only carry it about")
    elif workers:
        reasons.append(f"{workers} loader workers for each rank's cores")
    else:
        reasons.append("no core is left for loader workers")
    mixed = "mixed" in fit.precision
    reasons.append(f"{fit.precision} is what this training takes here")
    settings = {
        "batch_size": fit.batch,
        "num_workers": workers,
        "use_mixed_precision": mixed,
    }
    command = command_for(words, speed, settings)
    return Recommendation(
        speed.mode, speed.ranks, fit.batch, workers, mixed, fit.precision, command, tuple(reasons)
    )


def chosen_speed(fit: Fit) -> Speed:
    """The fastest, or one rank where more are not worth it."""
    best = fit.best
    single = max(
        (speed for speed in fit.speeds if speed.ranks == 1), key=lambda speed: speed.samples_per_s
    )
    return best if best.samples_per_s >= WORTH_IT * single.samples_per_s else single


def command_for(words: Sequence[str], speed: Speed, settings: dict[str, Any]) -> str:
    """As the user would type it; a script has its settings in its own config."""
    if words[0].endswith(".py"):
        run = ["mgt", "run", "--num-gpus", str(speed.ranks), *words]
        fields = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{shlex.join(run)}    # with MultiGPUConfig({fields})"
    place = ["--num-gpus", str(speed.ranks)]
    if speed.mode == "single":
        place = ["--multi-gpu", "single"]
    own = [
        f"{name}={str(value).lower()}" for name, value in settings.items() if name != "batch_size"
    ]
    batch = ["--batch-size", str(settings["batch_size"])]
    return shlex.join(["mgt", "train", *_others(words), *place, *batch, *own])


def _others(words: Sequence[str]) -> list[str]:
    """The user's own words, without those that the recommendation replaces."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        field = name.lstrip("-").replace("-", "_")
        if f"--{field.replace('_', '-')}" in OWN_FLAGS or field in OWN_FIELDS:
            if word.startswith("--") and not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        kept.append(word)
    return kept


def memory_rows(fit: Fit) -> list[tuple[str, str, str]]:
    """Part, size, share of the whole."""
    parts = fit.breakdown.parts
    total = max(1, fit.breakdown.total)
    rest = "workspace" if fit.unit == "GPU" else "Python, torch, workspace"
    names = {"data_on_device": "data on the GPU", "workspace": rest}
    rows = [
        (names.get(name, name), size(count), f"{count / total:.0%}")
        for name, count in parts.items()
        if count or name not in ("buffers", "data_on_device", "workspace")
    ]
    return [*rows, ("together", size(total), "100%")]


def time_rows(fit: Fit) -> list[tuple[str, ...]]:
    """What, step, samples a second, speed-up, epoch, whole training."""
    base = fit.speeds[0].samples_per_s
    rows: list[tuple[str, ...]] = []
    for speed in fit.speeds:
        epoch = epoch_s(fit, speed)
        whole = training_s(fit, speed)
        rows.append(
            (
                speed.name,
                "-" if speed.step_s is None else f"{speed.step_s * 1e3:.3g} ms",
                f"{speed.samples_per_s:,.0f}",
                f"{speed.samples_per_s / base:.2f}x",
                "-" if epoch is None else duration(epoch),
                "-" if whole is None else duration(whole),
            )
        )
    return rows


def epoch_s(fit: Fit, speed: Speed) -> float | None:
    samples = fit.counted.get("samples")
    return None if samples is None else samples / speed.samples_per_s


def training_s(fit: Fit, speed: Speed) -> float | None:
    """Steps alone: validation, checkpoints and the start come on top."""
    steps, epochs = fit.asked.get("max_steps"), fit.asked.get("epochs")
    epoch = epoch_s(fit, speed)
    by_epochs = None if epoch is None or epochs is None else epoch * epochs
    by_steps = None if not steps or speed.step_s is None else steps * speed.step_s
    found = [value for value in (by_epochs, by_steps) if value is not None]
    return min(found) if found else None


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def plain(fit: Fit, advice: Recommendation) -> dict[str, Any]:
    """For `--json`."""
    return {
        "memory": {**fit.breakdown.parts, "together": fit.breakdown.total},
        "per_rank_batch": fit.batch,
        "largest_batch": fit.largest,
        "largest_batch_tried": fit.largest_tried,
        "times": [
            {
                **asdict(speed),
                "epoch_s": epoch_s(fit, speed),
                "training_s": training_s(fit, speed),
            }
            for speed in fit.speeds
        ],
        "recommendation": asdict(advice),
    }
