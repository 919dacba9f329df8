"""Whether a recipe or script fits here: really train some steps of it, and judge the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.feeding import BatchSizes
from multi_gpu_training.measure.case import Case, CaseResult, Failure
from multi_gpu_training.measure.memory_model import (
    SAFETY_MARGIN,
    FitVerdict,
    MemoryModel,
    MemoryParts,
    MemoryPoint,
    available_bytes,
    rounded,
    with_margin,
)
from multi_gpu_training.measure.script_runner import ScriptRunner
from multi_gpu_training.planning.check.check_report import Finding, Group
from multi_gpu_training.planning.check.nvml import Gpu

GROUP = Group("Fit")
MEMORY = GROUP.about("memory")
SMALLER = "a smaller batch: --batch-size"
SINGLE, DDP = TrainingMode.SINGLE, TrainingMode.DISTRIBUTED_DATA_PARALLEL
NOT_YET = BatchSizes(1, 1, 1, 1)
HALVINGS = 6
TRIES = 3
NOISE = 1.2  # times what the ranks give each alone: more is no speed-up
# CPU steps are slow and need no graph to settle; None is what `mgt bench` takes on a GPU.
CPU_STEPS, CPU_WARMUP = 8, 3
GPU_STEPS = 30
WORTH_IT = 1.1  # times faster than one GPU: below it, more of them are wasted


@dataclass(frozen=True)
class MeasuredSpeed:
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
class TrainingFit:
    """All that was measured of one training on this machine.

    `too_busy`: the ranks together came out faster than they can be, so the speeds tell
    nothing about each other.
    """

    unit: str
    asked: Mapping[str, Any]
    counted: Mapping[str, Any]
    memory_parts: MemoryParts
    memory: MemoryModel
    available_bytes: int
    precision: str
    speeds: list[MeasuredSpeed]
    largest: int | None = None
    largest_tried: bool = False
    capped_by_data: bool = False
    too_busy: bool = False

    @property
    def batch(self) -> int:
        """Samples of one rank that trains alone."""
        return self.memory_parts.per_rank_batch

    @property
    def chosen(self) -> MeasuredSpeed:
        """The fastest way, or one rank where more are not worth it or nobody can tell."""
        rate = attrgetter("samples_per_s")
        best = max(self.speeds, key=rate)
        single = max((speed for speed in self.speeds if speed.ranks == 1), key=rate)
        worth = best.samples_per_s >= WORTH_IT * single.samples_per_s
        return best if worth and not self.too_busy else single


def judge(fit: TrainingFit, disk_free_bytes: int | None) -> Iterator[Finding]:
    """What the figures mean: memory, largest batch, speed, space for checkpoints."""
    batch = fit.chosen.batch.per_rank
    need = fit.memory.needed(batch)
    text = (
        f"{batch} samples per {fit.unit} take {size(need)} of {size(fit.available_bytes)} "
        f"({SAFETY_MARGIN:.0%} kept free)"
    )
    if fit.memory.verdict(batch, fit.available_bytes) is FitVerdict.FITS:
        yield MEMORY.passed(text, bytes=need)
    else:
        yield MEMORY.warn(f"{text}: it ran, and leaves too little", SMALLER)
    yield _largest_line(fit)
    ranks = max(speed.ranks for speed in fit.speeds)
    if ranks > 1:
        yield _sharded_line(fit, ranks)
    if fit.too_busy:
        yield _busy_line(fit)
    if disk_free_bytes is not None:
        yield _checkpoints(fit, disk_free_bytes)


def _largest_line(fit: TrainingFit) -> Finding:
    if fit.largest is None:
        text = "memory sets no limit that two batch sizes show"
    elif fit.capped_by_data:
        text = f"all {fit.largest:,} samples of the data fit into one batch"
    else:
        how = "tried" if fit.largest_tried else "by the growth between two measured sizes"
        text = f"{fit.largest:,} samples per {fit.unit} ({how})"
    return GROUP.passed("largest batch", text, largest=fit.largest, tried=fit.largest_tried)


def _sharded_line(fit: TrainingFit, ranks: int) -> Finding:
    parts = fit.memory_parts
    state = parts.parameters + parts.gradients + parts.optimizer
    text = (
        f"training_mode=fsdp would leave {size(state / ranks)} of weights, gradients and optimizer "
        f"state on each of {ranks} {fit.unit}s, not {size(state)}, and three blocks at a time"
    )
    return GROUP.passed("sharded", text, bytes=state // ranks)


def _busy_line(fit: TrainingFit) -> Finding:
    many = fit.speeds[-1]
    gain = many.samples_per_s / fit.speeds[0].samples_per_s
    return GROUP.warn(
        "speed",
        f"{many.name} came out {gain:.2f} times as fast as one, measured twice, and cannot be: "
        "this machine is too busy to tell",
        "run it again when nothing else runs here",
        gain=gain,
    )


def _checkpoints(fit: TrainingFit, free: int) -> Finding:
    topic, one = GROUP.about("checkpoints"), fit.memory_parts.checkpoint_bytes
    kept = int(fit.asked.get("keep_last") or 1) + 2  # the best one, and the one being written
    text = f"{size(one)} each, up to {kept} at a time; {size(free)} free on disk"
    if one * kept > free:
        return topic.fail(text, "free some space, choose another --save-dir, or keep_last=1")
    return topic.passed(text, bytes=one)


def broken(found: CaseResult) -> Finding:
    """A case that did not train."""
    remedy = "fix this first; `mgt train` or `mgt run` shows the whole message"
    if found.out_of_memory:
        remedy = SMALLER
    elif found.failure is Failure.TIMEOUT:
        remedy = "a longer --timeout: a case may take five times as long"
    reason = "out of memory" if found.out_of_memory else found.error
    if found.failure in (Failure.NO_MANAGER, Failure.TOO_SHORT):
        reason, _, remedy = reason.partition("; ")
    return GROUP.fail(found.case.name, f"it did not train: {reason}", remedy)


def too_large(fit: TrainingFit, whole: int) -> Finding:
    """`whole` samples do not fit on one rank; `fit` was measured with fewer."""
    text = f"{whole} samples per {fit.unit} do not fit: out of memory; {fit.batch} do"
    many = fit.speeds[-1]
    if not many.settings:
        text += f". {many.name} take {many.batch.per_rank} each, and that fits"
        return MEMORY.warn(text, f"on one {fit.unit}: --batch-size {fit.batch}")
    return MEMORY.fail(
        text,
        f"--batch-size {fit.batch} global_batch_size={fit.chosen.batch.global_batch} keeps the "
        "step as it is, in smaller parts; or use_gradient_checkpointing=true",
    )


def size(count: float) -> str:
    for unit, step in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} B"


# Measuring


@dataclass
class Fitting:
    """Measures `runner`'s training on `ranks` ranks; `gpus` are those they use, `free_bytes` is
    what one rank may take."""

    runner: ScriptRunner
    ranks: int
    gpus: Sequence[Gpu]
    free_bytes: int
    say: Callable[[Finding], None]
    gpu: int | None = None  # that one rank alone trains on
    asked: Mapping[str, Any] = field(default_factory=dict)
    alone: BatchSizes = NOT_YET  # what the user's settings give one rank
    smaller: int | None = None  # samples of a rank, where those of `alone` do not fit
    _cases: dict[str, Case] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return "GPU" if self.gpus else "CPU rank"

    def measure(self) -> TrainingFit | None:
        """The findings go to `say`; None where not even one sample could be trained."""
        if self.gpus:
            self.gpu = min(self.gpus, key=lambda gpu: gpu.free_bytes).index
        first = self._train("one rank")
        self.asked = dict(first.asked)
        self.alone = _sizes(first)
        if first.out_of_memory:
            found = self._halved()
            if found is None:
                return None
            first = found
        elif not first.ok:
            self.say(broken(first))
            return None
        fit = self._fit(first)
        self._largest(fit)
        self._speeds(fit)
        if self.smaller is not None:
            self.say(too_large(fit, self.alone.per_rank))
        return fit

    def _train(
        self, name: str, settings: Mapping[str, Any] | None = None, ranks: int = 1
    ) -> CaseResult:
        """Train one case and count its memory; one rank alone trains on `self.gpu`."""
        mode, gpu = (SINGLE, self.gpu) if ranks == 1 else (DDP, None)
        return self.runner(Case(name, mode, ranks, settings or {}, kind="footprint", gpu=gpu))

    def _halved(self) -> CaseResult | None:
        """The user's step in the largest parts that fit, of half a batch, a quarter and so on."""
        batch = self.alone.per_rank
        for _ in range(HALVINGS):
            batch //= 2
            if batch < 1:
                break
            found = self._train(f"batch {batch}", self._in_parts(batch, 1))
            if found.ok:
                self.smaller = int(found.facts["per_rank_batch"])
                return found
        text = f"{self.alone.per_rank} samples do not fit, nor do {max(batch, 1)}: out of memory"
        remedy = "a smaller model, use_gradient_checkpointing=true, or a GPU with more memory"
        self.say(MEMORY.fail(text, remedy))
        return None

    def _in_parts(self, batch: int, ranks: int) -> dict[str, Any]:
        """The settings with which a rank takes `batch` samples at a time, and the step and its
        learning rate stay what the user asked for."""
        asked = self.asked
        step = asked.get("global_batch_size") or self.alone.global_batch * ranks
        found = {"batch_size": batch, "global_batch_size": step}
        if (asked.get("gradient_accumulation_steps") or 1) > 1:
            found["gradient_accumulation_steps"] = asked["gradient_accumulation_steps"]
        if asked.get("base_batch_size"):
            found["base_batch_size"] = asked["base_batch_size"]
        return found

    def _fit(self, first: CaseResult) -> TrainingFit:
        batch = int(first.facts["per_rank_batch"])
        parts = MemoryParts.of(first.counted, batch, int(first.facts["peak_bytes"]))
        points = [_point(first)]
        # A second size tells what grows with the batch from the rest.
        samples = first.counted.get("samples")
        other = 2 * batch if samples is None or 2 * batch <= samples else batch // 2
        if other:
            second = self._train(f"batch {other}", {"batch_size": other})
            if second.ok:
                points.append(_point(second))
        memory = MemoryModel.from_points(points, parts.bytes_per_sample)
        assert memory is not None
        return TrainingFit(
            self.unit,
            self.asked,
            dict(first.counted),
            parts,
            memory,
            available_bytes(first.facts) or self.free_bytes,
            str(first.facts["precision"]),
            [self._speed(f"1 {self.unit}", first)],
        )

    def _largest(self, fit: TrainingFit) -> None:
        """The largest batch: by the line, then on a GPU really tried."""
        batch = fit.memory.largest_batch(fit.available_bytes)
        samples = fit.counted.get("samples")
        if samples is not None and (batch is None or batch >= samples):
            batch, fit.capped_by_data = int(samples), True
        if batch is None:
            return
        fit.largest = max(fit.batch, rounded(batch)) if not fit.capped_by_data else batch
        for _ in range(TRIES if self.gpus and fit.largest > fit.batch else 0):
            if self._train(f"batch {fit.largest}", {"batch_size": fit.largest}).ok:
                fit.largest_tried = True
                return
            fit.capped_by_data = False
            fit.largest = max(fit.batch, rounded(with_margin(fit.largest)))

    def _speeds(self, fit: TrainingFit) -> None:
        kinds = {gpu.name: gpu.index for gpu in reversed(self.gpus)}
        if len(kinds) > 1:
            fit.speeds = self._kinds(kinds, fit.speeds[0].settings) or fit.speeds
        many = self._many() if self.ranks > 1 else None
        if many is None:
            return
        if self._impossible(fit.speeds, many):
            fit.speeds, many = [self._again(speed) for speed in fit.speeds], self._again(many)
            fit.too_busy = self._impossible(fit.speeds, many)
        if len(kinds) > 1:
            fit.speeds.append(self._all_kinds(fit.speeds, many))
        fit.speeds.append(many)

    def _impossible(self, alone: Sequence[MeasuredSpeed], many: MeasuredSpeed) -> bool:
        """Whether the ranks came out faster than each alone: something else held those up. Only
        larger parts of a batch could really do that."""
        larger = many.batch.per_rank > min(speed.batch.per_rank for speed in alone)
        return not larger and many.samples_per_s > NOISE * self._without_exchange(alone)

    def _again(self, speed: MeasuredSpeed) -> MeasuredSpeed:
        """Measured once more. The faster counts: a busy machine only ever takes away."""
        case = self._cases[speed.name]
        found = self.runner(replace(case, name=f"{case.name}, again"))
        if not found.ok or found.samples_per_s <= speed.samples_per_s:
            return speed
        return replace(speed, samples_per_s=found.samples_per_s, step_s=found.step_s)

    def _many(self) -> MeasuredSpeed | None:
        """All ranks with the user's own settings, in smaller parts where those do not fit."""
        ways: list[Mapping[str, Any]] = [{}]
        if self.smaller is not None:
            # Ranks that share a global batch take less of it than one alone.
            ways = ways if self.asked.get("global_batch_size") else []
            ways = [*ways, self._in_parts(self.smaller, self.ranks)]
        for settings in ways:
            found = self._train(f"{self.ranks} ranks", settings, self.ranks)
            if not found.out_of_memory:
                break
        if not found.ok:
            self.say(broken(found))
            return None
        return self._speed(f"{self.ranks} {self.unit}s", found)

    def _kinds(self, kinds: Mapping[str, int], settings: Mapping[str, Any]) -> list[MeasuredSpeed]:
        """Mixed GPUs: each kind alone."""
        speeds = []
        for name, index in sorted(kinds.items()):
            self.gpu = index
            found = self._train(f"1 {name}", settings)
            if found.ok:
                speeds.append(self._speed(f"1 {name}", found))
            else:
                self.say(broken(found))
        return speeds

    def _all_kinds(self, alone: Sequence[MeasuredSpeed], many: MeasuredSpeed) -> MeasuredSpeed:
        """Mixed GPUs: what all of them would give without any exchange."""
        text = "all of them, shares by speed, without exchange"
        rate = self._without_exchange(alone)
        return replace(many, name=text, samples_per_s=rate, step_s=None, predicted=True)

    def _without_exchange(self, alone: Sequence[MeasuredSpeed]) -> float:
        """Samples per second of all ranks, each as fast as alone."""
        if len(alone) == 1:
            return self.ranks * alone[0].samples_per_s
        names = [f"1 {gpu.name}" for gpu in self.gpus[: self.ranks]]
        return sum(names.count(speed.name) * speed.samples_per_s for speed in alone)

    def _speed(self, name: str, found: CaseResult) -> MeasuredSpeed:
        """A line of the table, which can be measured again."""
        self._cases[name] = found.case
        return speed_of(name, found)


def speed_of(name: str, found: CaseResult) -> MeasuredSpeed:
    """What was measured, with the batch that was trained."""
    case, names = found.case, ("per_rank_batch", "accumulation", "copies", "global_batch")
    batch = BatchSizes(*(int(found.facts[name]) for name in names))
    mode = "single" if case.mode is SINGLE else "ddp"
    settings = dict(case.settings)
    if settings:
        settings["batch_size"] = batch.per_rank
    return MeasuredSpeed(name, mode, case.ranks, found.samples_per_s, found.step_s, batch, settings)


def _point(found: CaseResult) -> MemoryPoint:
    names = ("per_rank_batch", "peak_bytes", "reserved_bytes")
    return MemoryPoint(*(int(found.facts[name]) for name in names))


def _sizes(found: CaseResult) -> BatchSizes:
    """What the user's settings give one rank."""
    if found.sizes:
        return BatchSizes(**found.sizes)
    batch = int(found.asked.get("batch_size") or 0)  # it did not get so far
    return BatchSizes(batch, 1, 1, batch)
