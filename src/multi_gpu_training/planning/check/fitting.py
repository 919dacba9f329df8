"""Measures whether a recipe or script fits here: by really training some steps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.data.feeding import BatchSizes
from multi_gpu_training.planning.bench.case import Case, Measurement
from multi_gpu_training.planning.check.devices import Gpu
from multi_gpu_training.planning.check.findings import Finding
from multi_gpu_training.planning.check.fit import Fit, Speed, broken, nothing_fits, too_large
from multi_gpu_training.planning.check.fit_runner import FitRunner
from multi_gpu_training.planning.check.footprint import KEPT_FREE, Breakdown, growth_of, rounded
from multi_gpu_training.training.footprint import ASKED, SIZES

SINGLE, DDP = TrainingMode.SINGLE, TrainingMode.DISTRIBUTED_DATA_PARALLEL
HALVINGS = 6
TRIES = 3
NOISE = 1.2  # times what the ranks give each alone: more is no speed-up
# CPU steps are slow and need no graph to settle; None is what `mgt bench` takes on a GPU.
CPU_STEPS, CPU_WARMUP = 8, 3
GPU_STEPS = 30


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
        self.asked: dict[str, Any] = {}
        self.alone = BatchSizes(1, 1, 1, 1)  # what the user's settings give one rank
        self.smaller: int | None = None  # samples of a rank, where those of `alone` do not fit
        self._cases: dict[str, tuple[Case, int | None]] = {}

    def measure(self) -> Fit | None:
        """The findings go to `say`; None where not even one sample could be trained."""
        if self.gpus:
            self.runner.gpu = min(self.gpus, key=lambda gpu: gpu.free_bytes).index
        first = self.runner(Case("one rank", SINGLE, 1))
        self.asked = self.runner.counted(ASKED)
        self.alone = self._alone()
        if first.out_of_memory:
            found = self._halved()
            if found is None:
                return None
            first = found
        elif not first.ok:
            self.say(broken(first))
            return None
        fit = self._fit(first, self.runner.counted())
        self._largest(fit)
        self._speeds(fit)
        if self.smaller is not None:
            self.say(too_large(fit, self.alone.per_rank))
        return fit

    def _alone(self) -> BatchSizes:
        noted = self.runner.counted(SIZES)
        if noted:
            return BatchSizes(**noted)
        batch = int(self.asked.get("batch_size") or 0)  # it did not come to a step
        return BatchSizes(batch, 1, 1, batch)

    def _halved(self) -> Measurement | None:
        """The user's step in the largest parts that fit, of half a batch, a quarter and so on."""
        batch = self.alone.per_rank
        for _ in range(HALVINGS):
            batch //= 2
            if batch < 1:
                break
            found = self.runner(Case(f"batch {batch}", SINGLE, 1, self._in_parts(batch, 1)))
            if found.ok:
                self.smaller = int(found.facts["per_rank_batch"])
                return found
        self.say(nothing_fits(self.alone.per_rank, max(batch, 1)))
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

    def _fit(self, first: Measurement, counted: dict[str, Any]) -> Fit:
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
        speed = self._speed(f"1 {self.unit}", first)
        precision = str(first.facts["precision"])
        return Fit(
            self.unit, self.asked, counted, breakdown, growth, self.budget, precision, [speed]
        )

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

    def _impossible(self, alone: Sequence[Speed], many: Speed) -> bool:
        """Whether the ranks came out faster than each alone: something else held those up. Only
        larger parts of a batch could really do that."""
        larger = many.batch.per_rank > min(speed.batch.per_rank for speed in alone)
        return not larger and many.samples_per_s > NOISE * self._without_exchange(alone)

    def _again(self, speed: Speed) -> Speed:
        """Measured once more. The faster counts: a busy machine only ever takes away."""
        case, self.runner.gpu = self._cases[speed.name]
        found = self.runner(replace(case, name=f"{case.name}, again"))
        if not found.ok or found.samples_per_s <= speed.samples_per_s:
            return speed
        return replace(speed, samples_per_s=found.samples_per_s, step_s=found.step_s)

    def _many(self) -> Speed | None:
        """All ranks with the user's own settings, in smaller parts where those do not fit."""
        ways: list[Mapping[str, Any]] = [{}]
        if self.smaller is not None:
            # Ranks that share a global batch take less of it than one alone.
            ways = ways if self.asked.get("global_batch_size") else []
            ways = [*ways, self._in_parts(self.smaller, self.ranks)]
        for settings in ways:
            found = self.runner(Case(f"{self.ranks} ranks", DDP, self.ranks, settings))
            if not found.out_of_memory:
                break
        if not found.ok:
            self.say(broken(found))
            return None
        return self._speed(f"{self.ranks} {self.unit}s", found)

    def _kinds(self, kinds: Mapping[str, int], settings: Mapping[str, Any]) -> list[Speed]:
        """Mixed GPUs: each kind alone."""
        speeds = []
        for name, index in sorted(kinds.items()):
            self.runner.gpu = index
            found = self.runner(Case(f"1 {name}", SINGLE, 1, settings))
            if found.ok:
                speeds.append(self._speed(f"1 {name}", found))
            else:
                self.say(broken(found))
        return speeds

    def _all_kinds(self, alone: Sequence[Speed], many: Speed) -> Speed:
        """Mixed GPUs: what all of them would give without any exchange."""
        text = "all of them, shares by speed, without exchange"
        rate = self._without_exchange(alone)
        return replace(many, name=text, samples_per_s=rate, step_s=None, predicted=True)

    def _without_exchange(self, alone: Sequence[Speed]) -> float:
        """Samples a second of all ranks, each as fast as alone."""
        if len(alone) == 1:
            return self.ranks * alone[0].samples_per_s
        names = [f"1 {gpu.name}" for gpu in self.gpus[: self.ranks]]
        return sum(names.count(speed.name) * speed.samples_per_s for speed in alone)

    def _speed(self, name: str, found: Measurement) -> Speed:
        """A line of the table, which can be measured again."""
        self._cases[name] = found.case, self.runner.gpu
        return speed_of(name, found)


def speed_of(name: str, found: Measurement) -> Speed:
    """What was measured, with the batch that was trained."""
    facts, case = found.facts, found.case
    batch = BatchSizes(
        int(facts["per_rank_batch"]),
        int(facts["accumulation"]),
        int(facts["copies"]),
        int(facts["global_batch"]),
    )
    mode = "single" if case.mode is SINGLE else "ddp"
    settings = dict(case.settings)
    if settings:
        settings["batch_size"] = batch.per_rank
    return Speed(name, mode, case.ranks, found.samples_per_s, found.step_s, batch, settings)
