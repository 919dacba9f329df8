"""One training to measure, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean, median
from typing import Any

from multi_gpu_training.config_fields import TrainingMode

SHORT = {
    TrainingMode.SINGLE: "single",
    TrainingMode.DATA_PARALLEL: "DP",
    TrainingMode.DISTRIBUTED_DATA_PARALLEL: "DDP",
    TrainingMode.FULLY_SHARDED: "FSDP",
}


@dataclass(frozen=True)
class Case:
    """One training to measure. `settings` replace fields of the user's MultiGPUConfig.

    kind: what is measured: meter, footprint, profiler or recorder.
    steps: how many; None takes the runner's number.
    gpu: the GPU that a single rank trains on; None takes the first.
    more: further fields of its MeasureRequest.
    """

    name: str
    mode: TrainingMode
    ranks: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False
    kind: str = "meter"
    steps: int | None = None
    gpu: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return self.ranks if self.mode.has_ranks else 1


class Failure(StrEnum):
    """Why a case has no result."""

    OUT_OF_MEMORY = "out of memory"
    NO_MANAGER = "no manager"  # the script ended well and never made one
    TOO_SHORT = "too short"  # the script ended well, before enough steps were trained
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True)
class CaseResult:
    """What a case cost, or why that is not known.

    facts: what rank 0 wrote, with the peaks of the fullest rank. records: what each rank wrote.
    asked, sizes: the user's own settings and batch, noted even where no step was trained.
    counted: the memory of a step by its parts, where that was asked for.
    """

    case: Case
    step_times_s: tuple[float, ...] = ()
    samples_per_step: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    error: str = ""
    records: Sequence[Mapping[str, Any]] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    counted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def out_of_memory(self) -> bool:
        return self.failure is Failure.OUT_OF_MEMORY

    @property
    def step_s(self) -> float:
        """Seconds of the median step."""
        return median(self.step_times_s)

    @property
    def samples_per_s(self) -> float:
        """Over the whole time that was measured, slow steps included."""
        return self.samples_per_step / fmean(self.step_times_s)

    def row(self) -> dict[str, Any]:
        """Everything under its JSON name; what is not known is None."""
        facts, times = self.facts, self.step_times_s
        execution = facts.get("execution", {})
        return {
            "case": self.case.name,
            "mode": self.case.mode.value,
            "ranks": self.case.ranks,
            "settings": dict(self.case.settings),
            "per_rank_batch": facts.get("per_rank_batch"),
            "accumulation": facts.get("accumulation"),
            "global_batch": facts.get("global_batch"),
            "steps": len(times),
            "samples_per_s": self.samples_per_s if self.ok else None,
            "step_mean_s": fmean(times) if times else None,
            "step_p10_s": percentile(times, 10) if times else None,
            "step_p50_s": percentile(times, 50) if times else None,
            "step_p90_s": percentile(times, 90) if times else None,
            "clock": facts.get("clock"),
            "peak_bytes": facts.get("peak_bytes"),
            "reserved_bytes": facts.get("reserved_bytes"),
            "total_bytes": facts.get("total_bytes"),
            "outside_bytes": facts.get("outside_bytes", 0),
            "device": facts.get("device_name"),
            "precision": facts.get("precision"),
            "parameters": facts.get("parameters"),
            "execution": execution.get("mode"),
            "graph_share": execution.get("share"),
            "not_a_graph_because": execution.get("reason") or None,
            "out_of_memory": self.out_of_memory,
            "error": self.error or None,
        }


Measure = Callable[[Case], CaseResult]


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest values, as numpy does it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def together(parts: Sequence[CaseResult]) -> CaseResult:
    """Repeats of one case as one: all their steps, the largest memory, the first error."""
    good = [part for part in parts if part.ok]
    if not good:
        return parts[0]
    times = tuple(time for part in good for time in part.step_times_s)
    facts = dict(good[0].facts)
    for name in ("peak_bytes", "reserved_bytes"):
        facts[name] = max(part.facts.get(name, 0) for part in good)
    return replace(good[0], step_times_s=times, facts=facts)


def interleaved(
    measure: Measure, cases: Sequence[Case], repeats: int, begun: Sequence[CaseResult] = ()
) -> dict[str, list[CaseResult]]:
    """Every case `repeats` times, round by round: what slows the machine down for a while slows
    all cases down. A case that fails once is not tried again. `begun` was measured already."""
    found: dict[str, list[CaseResult]] = {case.name: [] for case in cases}
    for part in begun:
        found[part.case.name].append(part)
    for number in range(1, repeats + 1):
        for case in cases:
            parts = found[case.name]
            if len(parts) < number and all(part.ok for part in parts):
                parts.append(measure(case))
    return found
