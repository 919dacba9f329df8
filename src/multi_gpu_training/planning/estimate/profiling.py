"""Measure a recipe or script on one GPU or CPU rank: everything that a forecast starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.measure.case import Case, CaseResult
from multi_gpu_training.measure.memory_model import BENT, Line, MemoryPoint
from multi_gpu_training.measure.script_runner import MeasureError, ScriptRunner
from multi_gpu_training.planning.forecast.profile import GradientBucket, StepProfile

DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
# Facts that a profile has under the same name.
AS_MEASURED = (
    *("per_rank_batch", "accumulation", "forward_s", "backward_s", "optimizer_s"),
    *("dataset_samples", "epochs", "max_steps", "loader_workers", "data_on_device"),
    *("parameter_bytes", "images", "power_w", "precision"),
    *("optimizer_bytes", "block_bytes", "blocks"),
)
MEMORY_STEPS = 4  # enough for a step to be recorded, or compiled: both take memory of their own


@dataclass(frozen=True)
class Profiled:
    """The profile, and what to tell the user."""

    profile: StepProfile
    notes: tuple[str, ...] = ()


def profile_training(runner: ScriptRunner, name: str) -> Profiled:
    """Run the training for some steps; where its batch does not fit, with a smaller one."""
    found, notes = _first_that_fits(runner)
    facts = found.facts
    profile = StepProfile(
        name=name,
        device=facts["device_name"],
        buckets=tuple(GradientBucket(**bucket) for bucket in facts["buckets"]),
        step_times_s=tuple(facts["step_times_s"]),
        scaling="strong" if facts["keeps_global_batch"] else "weak",
        loader_rates={int(key): rate for key, rate in facts["loader_rates"].items()},
        memory=tuple(_memory(runner, found, notes)),
        memory_total_bytes=facts["total_bytes"] or None,
        memory_outside_bytes=facts["outside_bytes"],
        execution=str(facts["execution"]["mode"]),
        **{name: facts[name] for name in AS_MEASURED},
    )
    if facts["sync_bn"] and facts["norms"]:
        notes.append(
            f"sync_bn exchanges the statistics of {facts['norms']} layers in every forward and "
            "backward; that time is not in the forecast for several GPUs"
        )
    return Profiled(profile, tuple(notes))


def _first_that_fits(runner: ScriptRunner) -> tuple[CaseResult, list[str]]:
    asked: int | None = None
    size: int | None = None
    while True:
        settings = {} if size is None else {"batch_size": size}
        name = "one rank" if size is None else f"batch {size}"
        found = runner(Case(name, DDP, 1, settings, kind="profiler"))
        if found.ok and found.facts.get("profiled"):
            break
        if not found.out_of_memory:  # a smaller batch would fail in the same way
            raise MeasureError(why_not_profiled(found, runner))
        if size is None:
            size = asked = found.sizes.get("per_rank") or found.asked.get("per_rank_batch")
        if asked is None or size is None or size == 1:
            raise MeasureError(
                f"the training does not fit into this GPU's memory even with a batch of "
                f"{size or 'its own'}: {found.error}. Use a smaller model, mixed precision "
                "(use_mixed_precision=true), use_gradient_checkpointing=true, or a larger GPU",
                code="MGT603",
            )
        size = max(1, size // 2)
    if asked is None:
        return found, []
    taken = found.facts["per_rank_batch"]
    return found, [
        f"batch_size={asked} does not fit on this GPU: measured, and forecast, with {taken} per GPU"
    ]


def why_not_profiled(found: CaseResult, runner: ScriptRunner) -> str:
    """Why nothing is known, in terms of what the user gave."""
    if not found.ok:
        what = " ".join(runner.command)
        return found.error if found.error.startswith(what) else f"{what}: {found.error}"
    lines = (runner.out / "output.txt").read_text(errors="replace").split("\n")
    said = [line for line in lines if line.strip()] or ["it said nothing"]
    return f"the steps of {' '.join(runner.command)} could not be taken apart: {said[-1]}"


def _memory(runner: ScriptRunner, found: CaseResult, notes: list[str]) -> list[MemoryPoint]:
    """Peaks at the batch of the training and at half of it. Where the script makes its own batches,
    or memory grows faster than the batch, those of one process that cut its batches count too."""
    facts = found.facts
    whole, half = facts["per_rank_batch"], facts["per_rank_batch"] // 2
    cut = {int(size): tuple(peaks) for size, peaks in facts["memory_by_batch"].items()}
    top = MemoryPoint(
        whole, facts["peak_bytes"], facts["reserved_bytes"], cut.get(whole, (0, None))[1]
    )
    points = [top]
    if half < 1:
        return points
    lower = _alone(runner, half, facts)
    if lower is not None:
        points.insert(0, replace(lower, backward_bytes=cut.get(half, (0, None))[1]))
    elif half in cut:
        points.insert(0, _cut(top, cut, half))
    else:
        notes.append(
            "memory was measured for one batch size only: the script makes its own batches, and "
            "they could not be cut"
        )
    quarter = half // 2
    if quarter in cut and len(points) == 2:
        third = _cut(top, cut, quarter)
        line = Line.through([(size, cut[size][1]) for size in (half, whole)])
        if abs(line(quarter) - cut[quarter][1]) > BENT * cut[quarter][1]:
            points.insert(0, third)
    return points


def _cut(top: MemoryPoint, cut: Mapping[int, tuple[int, ...]], size: int) -> MemoryPoint:
    """A smaller batch than that of `top`, by what a cut batch took less."""
    less = cut[top.per_rank_batch][0] - cut[size][0]
    reserved = (top.reserved_bytes or top.peak_bytes) - less
    return MemoryPoint(size, top.peak_bytes - less, reserved, cut[size][1])


def _alone(runner: ScriptRunner, size: int, facts: Mapping[str, Any]) -> MemoryPoint | None:
    """The peak of the same training with another batch, in a process of its own."""
    if facts["own_batches"]:
        return None
    # The accumulation is kept: gradients that wait for the step take memory too.
    settings = {"batch_size": size, "gradient_accumulation_steps": facts["accumulation"]}
    case = Case(f"batch {size}, for its memory", DDP, 1, settings, steps=MEMORY_STEPS)
    found = runner(case)
    if not found.ok or found.facts["per_rank_batch"] != size:
        return None
    return MemoryPoint(size, found.facts["peak_bytes"], found.facts["reserved_bytes"])
