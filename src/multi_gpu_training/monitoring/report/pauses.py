"""Time in which no step is computed: checkpoints, and what comes between epochs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from multi_gpu_training.monitoring.report.attribution import FEWEST, Steps
from multi_gpu_training.monitoring.report.cause import EVERYWHERE, NOTICEABLE, Cause
from multi_gpu_training.monitoring.report.history import Event, time_of
from multi_gpu_training.monitoring.report.run import Run

WORTH_NAMING_S = 1.0  # of pauses in all: a run of a few steps is no measure


def checkpoints(run: Run, steps: Steps) -> Iterator[Cause]:
    """Checkpoints that training stands still for: those at the ends of epochs, and those between,
    which alone `checkpoint_frequency` moves."""
    kept = [e for e in run.notable if e["event"] == "checkpoint"]
    stalled = sum(_stall(e) for e in kept)
    writing = sum(float(e.get("write_s") or 0.0) for e in kept) / max(run.trained_s, 1e-9)
    ends = {e.get("step") for e in run.epochs}
    for at_ends in (False, True):
        group = [_stall(e) for e in kept if (e.get("step") in ends) == at_ends]
        share = steps.checkpoint_share * sum(group) / max(stalled, 1e-9)
        if share < NOTICEABLE or len(group) < FEWEST:
            continue
        # The median step has no checkpoint in it: the time they take comes on top.
        mean = steps.step / max(1.0 - share, 0.02)
        every = None if at_ends else run.config.get("checkpoint_frequency")
        facts = {"every": every, "at_ends": at_ends, "stall_s": float(np.median(group))}
        facts |= {"share": share, "writing": writing}
        yield Cause("checkpoint", (), mean * share, mean * share, mean, facts)


def _stall(event: Event) -> float:
    return float(event.get("stall_s") or 0.0) + float(event.get("waited_s") or 0.0)


def between_epochs(run: Run, steps: Steps) -> Iterator[Cause]:
    """Validation, and what comes after it before the next epoch's steps: as the latest start of
    the first rank has timed it."""
    rank = run.ranks[0]
    begun = time_of(run.facts.get(rank, {}))
    ends = [e for e in run.ends if e.get("rank") == rank]
    seen = _seen(run, begun) + [(time_of(e), int(e.get("step") or 0)) for e in ends]
    epochs = [e for e in run.epochs if time_of(e) > begun and isinstance(e.get("step"), int)]
    if not begun or not epochs or not seen:
        return
    whole = max(time for time, _ in seen) - begun
    step_s = float(steps.step_s[steps.ranks.index(rank)].mean()) if rank in steps.ranks else 0.0
    pauses: dict[str, list[float]] = {"validation": [], "epochs": []}
    for epoch in epochs:
        before, after = _around(epoch, seen, step_s)
        saved = sum(_stall(e) for e in run.notable if _saves(e, epoch["step"]))
        pauses["validation" if epoch.get("val") else "epochs"].append(before)
        pauses["epochs"].append(max(after - saved, 0.0))
    for kind, found in pauses.items():
        total = sum(found)
        if total >= max(EVERYWHERE * whole, WORTH_NAMING_S):
            share, count = min(total / whole, 1.0), len(epochs)
            facts = {"share": share, "each_s": total / count}
            yield Cause(kind, (), share, share, 1.0, facts)


def _saves(event: Event, step: int) -> bool:
    return event["event"] == "checkpoint" and event.get("step") == step


def _seen(run: Run, begun: float) -> list[tuple[float, int]]:
    """When the first rank had done which step."""
    seen = [(time_of(event), int(event["step"])) for event in run.steps]
    samples = run.samples.get(run.ranks[0])
    if samples is not None:
        pairs = zip(samples.column("time"), samples.steps, strict=True)
        seen += [(float(time), int(step)) for time, step in pairs if np.isfinite(time)]
    return [(time, step) for time, step in seen if time > begun]


def _around(epoch: Event, seen: list[tuple[float, int]], step_s: float) -> tuple[float, float]:
    """Seconds before the epoch was told of and after it in which no step was computed."""
    at, last = time_of(epoch), epoch["step"]
    earlier = [(time, step) for time, step in seen if time < at and step <= last]
    later = [(time, step) for time, step in seen if time > at]
    before = after = 0.0
    if earlier:
        time, step = max(earlier)
        before = max(at - time - (last - step) * step_s, 0.0)
    if later:
        time, step = min(later)
        after = max(time - at - (step - last) * step_s, 0.0)
    return before, after
