"""What to do with a measured training: memory and time as tables, and a ready command."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from multi_gpu_training.data.feeding import BatchSizes
from multi_gpu_training.planning.check.check_report import Printer
from multi_gpu_training.planning.check.training_fit import MeasuredSpeed, TrainingFit, size
from multi_gpu_training.setting_names import ALIASES

PLACE = ("world_size", "training_mode")  # of which the recommendation has its own


@dataclass(frozen=True)
class Recommendation:
    """`batch_size` is that of a rank; `global_batch` is what a step takes of all of them."""

    mode: str
    ranks: int
    batch_size: int
    accumulation: int
    global_batch: int
    num_workers: int
    mixed_precision: bool
    precision: str
    command: str
    reasons: tuple[str, ...]


def recommend(
    fit: TrainingFit, words: Sequence[str], workers: int, ranks_at_hand: int
) -> Recommendation:
    """The fastest way to run this training here with the batch that the user chose."""
    speed = fit.chosen
    reasons = [*_why(fit, speed, ranks_at_hand)]
    if fit.counted.get("in_memory"):
        workers = 0  # a worker would copy from memory what the rank itself can read
        reasons.append("the data is in memory: loader workers would only copy it")
    elif workers:
        reasons.append(f"{workers} loader workers for each rank's cores")
    else:
        reasons.append("no core is left for loader workers")
    mixed = "mixed" in fit.precision
    reasons.append(f"this training computes in {fit.precision} here")
    settings = {**batch_settings(fit, speed), "num_workers": workers, "use_mixed_precision": mixed}
    return Recommendation(
        mode=speed.mode,
        ranks=speed.ranks,
        batch_size=speed.batch.per_rank,
        accumulation=speed.batch.accumulation,
        global_batch=speed.batch.global_batch,
        num_workers=workers,
        mixed_precision=mixed,
        precision=fit.precision,
        command=command_for(words, speed, settings),
        reasons=tuple(reasons),
    )


def _why(fit: TrainingFit, speed: MeasuredSpeed, ranks_at_hand: int) -> Iterator[str]:
    """Why so many ranks."""
    if speed.ranks > 1:
        gain = speed.samples_per_s / fit.speeds[0].samples_per_s
        text = "put together from each kind's speed" if speed.predicted else "measured"
        yield f"{speed.ranks} {fit.unit}s are {gain:.2f} times as fast as one ({text})"
    elif fit.too_busy:
        yield f"this machine is too busy to tell what {ranks_at_hand} {fit.unit}s give"
    elif ranks_at_hand > 1:
        yield f"{ranks_at_hand} {fit.unit}s are hardly faster than one, or even slower"


def batch_settings(fit: TrainingFit, speed: MeasuredSpeed) -> dict[str, Any]:
    """What the command says about the batch, so that it trains what was measured. A global batch
    and the batch of a DataLoader are the user's: another batch_size would divide them anew."""
    if speed.settings:
        return dict(speed.settings)
    own = fit.asked.get("batch_size")
    if fit.asked.get("global_batch_size") or own != speed.batch.per_rank:
        return {}
    return {"batch_size": own}


def batch_text(batch: BatchSizes) -> str:
    """As in `8 samples each, 2 accumulated, 32 per step`."""
    text = f"{batch.per_rank} samples" + (" each" if batch.ranks > 1 else "")
    if batch.accumulation > 1:
        text += f", {batch.accumulation} accumulated"
    if batch.global_batch != batch.per_rank:
        text += f", {batch.global_batch} per step"
    return text


def command_for(words: Sequence[str], speed: MeasuredSpeed, settings: Mapping[str, Any]) -> str:
    """As the user would type it; a script has its settings in its own config."""
    if words[0].endswith(".py"):
        run = ["mgt", "run", "--num-gpus", str(speed.ranks), *words]
        fields = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{shlex.join(run)}    # with MultiGPUConfig({fields})"
    place = ["--num-gpus", str(speed.ranks)]
    if speed.mode == "single":
        place = ["--multi-gpu", "single"]
    own = []
    for name, value in settings.items():
        flag = name == "batch_size"
        own += ["--batch-size", str(value)] if flag else [f"{name}={str(value).lower()}"]
    return shlex.join(["mgt", "train", *_others(words, {*PLACE, *settings}), *place, *own])


def _others(words: Sequence[str], replaced: Collection[str]) -> list[str]:
    """The user's own words, without those that the recommendation replaces."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        field = name.lstrip("-").replace("-", "_")
        if ALIASES.get(field, field) in replaced:
            if word.startswith("--") and not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)  # the value of `--flag value`
            continue
        kept.append(word)
    return kept


def memory_rows(fit: TrainingFit) -> list[tuple[str, str, str]]:
    """Part, size, share of the whole."""
    parts = fit.memory_parts.parts
    total = max(1, fit.memory_parts.total)
    rest = "workspace" if fit.unit == "GPU" else "Python, torch, workspace"
    names = {"data_on_device": "data on the GPU", "workspace": rest}
    rows = [
        (names.get(name, name), size(count), f"{count / total:.0%}")
        for name, count in parts.items()
        if count or name not in ("buffers", "data_on_device", "workspace")
    ]
    return [*rows, ("together", size(total), "100%")]


def time_rows(fit: TrainingFit) -> list[tuple[str, ...]]:
    """What, step, samples per second, speed-up, epoch, whole training."""
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
                # A figure that cannot be true is not shown.
                "?" if fit.too_busy and speed.ranks > 1 else f"{speed.samples_per_s / base:.2f}x",
                "-" if epoch is None else duration(epoch),
                "-" if whole is None else duration(whole),
            )
        )
    return rows


def epoch_s(fit: TrainingFit, speed: MeasuredSpeed) -> float | None:
    samples = fit.counted.get("samples")
    return None if samples is None else samples / speed.samples_per_s


def training_s(fit: TrainingFit, speed: MeasuredSpeed) -> float | None:
    """Steps alone: validation, checkpoints and the start come on top."""
    steps, epochs = fit.asked.get("max_steps"), fit.asked.get("epochs")
    epoch = epoch_s(fit, speed)
    by_epochs = None if epoch is None or epochs is None else epoch * epochs
    by_steps = None if not steps or speed.step_s is None else steps * speed.step_s
    found = [value for value in (by_epochs, by_steps) if value is not None]
    return min(found) if found else None  # whichever limit ends the training first


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def plain(fit: TrainingFit, advice: Recommendation) -> dict[str, Any]:
    """For `--json`."""
    return {
        "memory": {**fit.memory_parts.parts, "together": fit.memory_parts.total},
        "per_rank_batch": fit.batch,
        "largest_batch": fit.largest,
        "largest_batch_tried": fit.largest_tried,
        "times": [
            asdict(speed) | {"epoch_s": epoch_s(fit, speed), "training_s": training_s(fit, speed)}
            for speed in fit.speeds
        ],
        "recommendation": asdict(advice),
    }


def show(printer: Printer, fit: TrainingFit, advice: Recommendation) -> None:
    """Print the tables and the command that `mgt check RECIPE` ends with."""
    console = printer.console
    title = f"Memory of one {fit.unit}, {fit.batch} samples"
    memory = _table(title, memory_rows(fit), "part", "bytes", "share")
    time = _table(
        "Time (steps alone, measured here)",
        time_rows(fit),
        *("", "step", "samples/s", "speed-up", "epoch", "training"),
    )
    for table in (memory, time):
        console.print()
        console.print(table)
    how = f"{advice.ranks} {fit.unit}{'s' if advice.ranks > 1 else ''}"
    console.print(Text("\nRecommended", "bold"))
    printer.say(
        f"{advice.mode}, {how}, {batch_text(fit.chosen.batch)}, {advice.num_workers} loader "
        f"workers, {advice.precision}"
    )
    for reason in advice.reasons:
        printer.say(f"- {reason}")
    console.print()
    console.print(Text(f"  {advice.command}", "bold"), soft_wrap=True)


def _table(title: str, rows: Sequence[Sequence[str]], *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
