"""Whether a recipe or script fits here: measured by really training some steps of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.planning.bench.case import Case, Measurement
from multi_gpu_training.planning.bench.runner import Runner
from multi_gpu_training.planning.check.devices import Gpu
from multi_gpu_training.planning.check.findings import Finding, Group
from multi_gpu_training.planning.check.footprint import (
    KEPT_FREE,
    Breakdown,
    Growth,
    growth_of,
    rounded,
)
from multi_gpu_training.training.footprint import ASKED, FILE
from multi_gpu_training.training.measurement import Request

GROUP = Group("Fit")
SINGLE, DDP = TrainingMode.SINGLE, TrainingMode.DISTRIBUTED_DATA_PARALLEL
HALVINGS = 6
TRIES = 3
# CPU steps are slow and need no graph to settle; None is what `mgt bench` takes on a GPU.
CPU_STEPS, CPU_WARMUP = 8, 3
GPU_STEPS = 30


class FitRunner(Runner):
    """A runner that counts memory too; `gpu` trains single cases on that GPU."""

    gpu: int | None = None

    def request(self, case: Case, out: Path) -> Request:
        request = replace(super().request(case, out), footprint=True)
        if case.mode is SINGLE and self.gpu is not None:
            request = replace(request, device_ids=[self.gpu])
        return request

    def counted(self, name: str = FILE) -> dict[str, Any]:
        """What the last case wrote beside its times; empty where it did not come so far."""
        try:
            text = (self.folder / f"{self.count:03d}" / name).read_text()
        except OSError:
            return {}
        found: dict[str, Any] = json.loads(text)
        return found


@dataclass(frozen=True)
class Speed:
    """One line of the table of times. `predicted`: not measured, put together from others."""

    name: str
    mode: str
    ranks: int
    samples_per_s: float
    step_s: float | None
    predicted: bool = False


@dataclass
class Fit:
    """All that was measured of one training on this machine."""

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

    @property
    def batch(self) -> int:
        return self.breakdown.per_rank_batch

    @property
    def best(self) -> Speed:
        return max(self.speeds, key=lambda speed: speed.samples_per_s)


class Fitting:
    """Measures `runner`'s training on `ranks` ranks; `gpus` are those they use, `free_bytes` is
    what one rank may take."""

    def __init__(
        self,
        runner: FitRunner,
        ranks: int,
        gpus: Sequence[Gpu],
        free_bytes: int,
        say: Callable[[Finding], None],
    ) -> None:
        self.runner = runner
        self.ranks = ranks
        self.gpus = list(gpus)
        self.unit = "GPU" if gpus else "CPU rank"
        self.budget = int(free_bytes * (1 - KEPT_FREE))
        self.say = say

    def measure(self) -> Fit | None:
        """The findings go to `say`; None where not even one sample could be trained."""
        if self.gpus:
            self.runner.gpu = min(self.gpus, key=lambda gpu: gpu.free_bytes).index
        first = self.runner(Case("one rank", SINGLE, 1))
        asked, counted = self.runner.counted(ASKED), self.runner.counted()
        if not first.ok and first.out_of_memory:
            found = self._halved(asked)
            if found is None:
                return None
            first, counted = found
        elif not first.ok:
            self.say(_broken(first))
            return None
        fit = self._fit(first, asked, counted)
        self._largest(fit)
        self._speeds(fit)
        return fit

    def _halved(self, asked: dict[str, Any]) -> tuple[Measurement, dict[str, Any]] | None:
        """The first smaller batch that fits."""
        whole = batch = int(asked.get("batch_size") or 0)
        for _ in range(HALVINGS):
            batch //= 2
            if batch < 1:
                break
            found = self.runner(Case(f"batch {batch}", SINGLE, 1, {"batch_size": batch}))
            if found.ok:
                self.say(
                    GROUP.fail(
                        "memory",
                        f"{whole} samples a {self.unit} do not fit: out of memory; {batch} do",
                        f"--batch-size {batch} global_batch_size={whole * self.ranks} keeps the "
                        "step as it is, in smaller parts; or use_gradient_checkpointing=true",
                    )
                )
                return found, self.runner.counted()
        self.say(
            GROUP.fail(
                "memory",
                f"{whole} samples do not fit, nor do {max(batch, 1)}: out of memory",
                "a smaller model, use_gradient_checkpointing=true, or a GPU with more memory",
            )
        )
        return None

    def _fit(self, first: Measurement, asked: dict[str, Any], counted: dict[str, Any]) -> Fit:
        batch = int(first.facts["per_rank_batch"])
        peak = int(first.facts["peak_bytes"])
        breakdown = Breakdown.of(counted, batch, peak)
        other = self._other_batch(batch, counted.get("samples"))
        points = [(batch, peak)]
        if other is not None:
            second = self.runner(Case(f"batch {other}", SINGLE, 1, {"batch_size": other}))
            if second.ok:
                points.append(
                    (int(second.facts["per_rank_batch"]), int(second.facts["peak_bytes"]))
                )
        growth = growth_of(points, breakdown.bytes_per_sample)
        name = "1 GPU" if self.gpus else "1 CPU rank"
        speed = Speed(name, "single", 1, first.samples_per_s, first.step_s)
        precision = str(first.facts["precision"])
        return Fit(self.unit, asked, counted, breakdown, growth, self.budget, precision, [speed])

    @staticmethod
    def _other_batch(batch: int, samples: int | None) -> int | None:
        """A second size, so that the growth can be told from the rest."""
        if samples is None or 2 * batch <= samples:
            return 2 * batch
        return batch // 2 if batch > 1 else None

    def _largest(self, fit: Fit) -> None:
        """The largest batch: by the line, then on a GPU really tried."""
        batch = fit.growth.largest(self.budget)
        samples = fit.counted.get("samples")
        if samples is not None and (batch is None or batch >= samples):
            batch, fit.capped_by_data = int(samples), True
        if batch is None:
            return
        fit.largest = max(fit.batch, rounded(batch)) if not fit.capped_by_data else batch
        for _ in range(TRIES if self.gpus and fit.largest > fit.batch else 0):
            case = Case(f"batch {fit.largest}", SINGLE, 1, {"batch_size": fit.largest})
            found = self.runner(case)
            if found.ok:
                fit.largest_tried = True
                return
            fit.capped_by_data = False
            fit.largest = max(fit.batch, rounded(int(fit.largest * 0.85)))

    def _speeds(self, fit: Fit) -> None:
        kinds = {gpu.name: gpu.index for gpu in reversed(self.gpus)}
        if len(kinds) > 1:
            self._kinds(fit, kinds)
        if self.ranks < 2:
            return
        settings = {} if fit.batch == fit.asked.get("batch_size") else {"batch_size": fit.batch}
        found = self.runner(Case(f"{self.ranks} ranks", DDP, self.ranks, settings))
        if not found.ok:
            self.say(_broken(found))
            return
        name = f"{self.ranks} {self.unit}s"
        fit.speeds.append(Speed(name, "ddp", self.ranks, found.samples_per_s, found.step_s))

    def _kinds(self, fit: Fit, kinds: dict[str, int]) -> None:
        """Mixed GPUs: each kind alone, and what all of them would give without any exchange."""
        total = 0.0
        fit.speeds.clear()
        for name, index in sorted(kinds.items()):
            self.runner.gpu = index
            found = self.runner(Case(f"1 {name}", SINGLE, 1, {"batch_size": fit.batch}))
            if not found.ok:
                self.say(_broken(found))
                continue
            fit.speeds.append(Speed(f"1 {name}", "single", 1, found.samples_per_s, found.step_s))
            count = sum(gpu.name == name for gpu in self.gpus[: self.ranks])
            total += count * found.samples_per_s
        text = "all of them, shares by speed, without exchange"
        fit.speeds.append(Speed(text, "ddp", self.ranks, total, None, predicted=True))


def _broken(found: Measurement) -> Finding:
    remedy = "mend this first; `mgt train` or `mgt run` shows the whole message"
    if found.out_of_memory:
        remedy = "a smaller batch: --batch-size"
    elif found.error.startswith("not done after"):
        remedy = "a longer --timeout: a case may take five times as long"
    reason = "out of memory" if found.out_of_memory else found.error
    return GROUP.fail(found.case.name, f"it did not train: {reason}", remedy)


def judge(fit: Fit, disk_free_bytes: int | None) -> Iterator[Finding]:
    """What the figures mean: memory, largest batch, space for checkpoints."""
    need = fit.growth.bytes_at(fit.batch)
    text = (
        f"{fit.batch} samples a {fit.unit} take {size(need)} of {size(fit.budget_bytes)} "
        f"({KEPT_FREE:.0%} kept free)"
    )
    if need > fit.budget_bytes:
        yield GROUP.warn(
            "memory", f"{text}: it ran, and leaves too little", "a smaller batch: --batch-size"
        )
    else:
        yield GROUP.passed("memory", text, bytes=int(need))
    yield _largest_line(fit)
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


def size(count: float) -> str:
    for unit, step in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} B"
