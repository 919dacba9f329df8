"""What was measured of one training here, and what the figures mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from multi_gpu_training.data.feeding import BatchSizes
from multi_gpu_training.planning.bench.case import Measurement
from multi_gpu_training.planning.check.findings import Finding, Group
from multi_gpu_training.planning.check.footprint import KEPT_FREE, Breakdown, Growth

GROUP = Group("Fit")
WORTH_IT = 1.1  # times faster than one GPU: below it, more of them are wasted


@dataclass(frozen=True)
class Speed:
    """One line of the table of times. `batch` is what a step took, `settings` what the user's
    config needs for it. `predicted`: not measured, put together from others."""

    name: str
    mode: str
    ranks: int
    samples_per_s: float
    step_s: float | None
    batch: BatchSizes
    settings: Mapping[str, Any] = field(default_factory=dict)
    predicted: bool = False


@dataclass
class Fit:
    """All that was measured of one training on this machine.

    `too_busy`: the ranks together came out faster than they can be, so that the speeds tell
    nothing about each other.
    """

    unit: str
    asked: dict[str, Any]
    counted: dict[str, Any]
    breakdown: Breakdown
    growth: Growth
    budget_bytes: int
    precision: str
    speeds: list[Speed]
    largest: int | None = None
    largest_tried: bool = False
    capped_by_data: bool = False
    too_busy: bool = False

    @property
    def batch(self) -> int:
        """Samples of one rank that trains alone."""
        return self.breakdown.per_rank_batch

    @property
    def chosen(self) -> Speed:
        """The fastest way, or one rank where more are not worth it or nobody can tell."""
        best = max(self.speeds, key=_rate)
        single = max((speed for speed in self.speeds if speed.ranks == 1), key=_rate)
        worth = best.samples_per_s >= WORTH_IT * single.samples_per_s
        return best if worth and not self.too_busy else single


def _rate(speed: Speed) -> float:
    return speed.samples_per_s


def judge(fit: Fit, disk_free_bytes: int | None) -> Iterator[Finding]:
    """What the figures mean: memory, largest batch, speed, space for checkpoints."""
    batch = fit.chosen.batch.per_rank
    need = fit.growth.bytes_at(batch)
    text = (
        f"{batch} samples a {fit.unit} take {size(need)} of {size(fit.budget_bytes)} "
        f"({KEPT_FREE:.0%} kept free)"
    )
    if need > fit.budget_bytes:
        yield GROUP.warn(
            "memory", f"{text}: it ran, and leaves too little", "a smaller batch: --batch-size"
        )
    else:
        yield GROUP.passed("memory", text, bytes=int(need))
    yield _largest_line(fit)
    if fit.too_busy:
        yield _busy_line(fit)
    yield from _checkpoints(fit, disk_free_bytes)


def _largest_line(fit: Fit) -> Finding:
    if fit.largest is None:
        text = "memory sets no limit that two batch sizes show"
    elif fit.capped_by_data:
        text = f"all {fit.largest:,} samples of the data fit into one batch"
    else:
        how = "tried" if fit.largest_tried else "by the growth between two measured sizes"
        text = f"{fit.largest:,} samples a {fit.unit} ({how})"
    return GROUP.passed("largest batch", text, largest=fit.largest, tried=fit.largest_tried)


def _busy_line(fit: Fit) -> Finding:
    many = fit.speeds[-1]
    gain = many.samples_per_s / fit.speeds[0].samples_per_s
    return GROUP.warn(
        "speed",
        f"{many.name} came out {gain:.2f} times as fast as one, measured twice, and cannot be: "
        "this machine is too busy to tell",
        "run it again when nothing else runs here",
        gain=gain,
    )


def _checkpoints(fit: Fit, free: int | None) -> Iterator[Finding]:
    if free is None:
        return
    one = fit.breakdown.checkpoint_bytes
    kept = int(fit.asked.get("keep_last") or 1) + 2  # the best one, and the one being written
    text = f"{size(one)} each, up to {kept} at a time; {size(free)} free on disk"
    if one * kept > free:
        yield GROUP.fail(
            "checkpoints", text, "free some space, choose another --save-dir, or keep_last=1"
        )
    else:
        yield GROUP.passed("checkpoints", text, bytes=one)


def broken(found: Measurement) -> Finding:
    """A case that did not train."""
    remedy = "mend this first; `mgt train` or `mgt run` shows the whole message"
    if found.out_of_memory:
        remedy = "a smaller batch: --batch-size"
    elif found.error.startswith("not done after"):
        remedy = "a longer --timeout: a case may take five times as long"
    reason = "out of memory" if found.out_of_memory else found.error
    if found.ended:
        reason, _, remedy = reason.partition("; ")
    return GROUP.fail(found.case.name, f"it did not train: {reason}", remedy)


def too_large(fit: Fit, whole: int) -> Finding:
    """`whole` samples do not fit on one rank; `fit` was measured with fewer."""
    text = f"{whole} samples a {fit.unit} do not fit: out of memory; {fit.batch} do"
    many = fit.speeds[-1]
    if not many.settings:
        each = many.batch.per_rank
        return GROUP.warn(
            "memory",
            f"{text}. {many.name} take {each} each, and that fits",
            f"on one {fit.unit}: --batch-size {fit.batch}",
        )
    return GROUP.fail(
        "memory",
        text,
        f"--batch-size {fit.batch} global_batch_size={fit.chosen.batch.global_batch} keeps the "
        "step as it is, in smaller parts; or use_gradient_checkpointing=true",
    )


def nothing_fits(whole: int, least: int) -> Finding:
    return GROUP.fail(
        "memory",
        f"{whole} samples do not fit, nor do {least}: out of memory",
        "a smaller model, use_gradient_checkpointing=true, or a GPU with more memory",
    )


def size(count: float) -> str:
    for unit, step in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} B"
