"""Time in which no step is computed: checkpoints, and what comes between epochs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from multi_gpu_training.monitoring.report.attribution import FEWEST, Steps
from multi_gpu_training.monitoring.report.cause import EVERYWHERE, NOTICEABLE, Cause
from multi_gpu_training.monitoring.report.history import Event, time_of
from multi_gpu_training.monitoring.report.run_record import RunRecord

WORTH_NAMING_S = 1.0  # of pauses in all: a run of a few steps is no measure


def checkpoints(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """Checkpoints that training stands still for: those at the ends of epochs, and those between,
    which alone `checkpoint_frequency` moves."""
    kept = [e for e in run.notable if e["event"] == "checkpoint"]
    stalled = sum(_stall(e) for e in kept)
    writing = sum(float(e.get("write_s") or 0.0) for e in kept) / max(run.trained_s, 1e-9)
    ends = _ends_that_save(run, kept)
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


def _ends_that_save(run: RunRecord, kept: list[Event]) -> set[int]:
    """Steps at which a checkpoint was written because an epoch ended, and not because of
    `checkpoint_frequency`: where it is that which counts, not every epoch has one, or epochs are
    long enough for one and have none but at their ends."""
    ends = {e["step"] for e in run.epochs if isinstance(e.get("step"), int)}
    steps = {e.get("step") for e in kept}
    every = run.config.get("checkpoint_frequency")
    length = max(ends, default=0) / max(len(ends), 1)
    due = isinstance(every, int) and every <= length and steps <= ends
    return set() if due or len(steps & ends) < 0.9 * len(ends) else ends


def _stall(event: Event) -> float:
    return float(event.get("stall_s") or 0.0) + float(event.get("waited_s") or 0.0)


def between_epochs(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """Validation, and what comes after it before the next epoch's steps: as the latest start of
    the first rank has timed it."""
    rank = run.ranks[0]
    begun = time_of(run.facts.get(rank, {}))
    ends = [e for e in run.ends if e.get("rank") == rank]
    seen = sorted(_seen(run, begun) + [(time_of(e), int(e.get("step") or 0)) for e in ends])
    epochs = [e for e in run.epochs if time_of(e) > begun and isinstance(e.get("step"), int)]
    if not begun or not epochs or not seen:
        return
    whole = seen[-1][0] - begun
    step_s = _mean_step(run, steps, rank)
    stalls: dict[Any, float] = {}
    for event in run.notable:
        if event["event"] == "checkpoint":
            stalls[event.get("step")] = stalls.get(event.get("step"), 0.0) + _stall(event)
    pauses: dict[str, list[float]] = {"validation": [], "epochs": []}
    afters: list[float] = []
    for epoch, following in zip(epochs, [*epochs[1:], {}], strict=True):
        before, after = _around(epoch, seen, step_s)
        # Samples that a policy collects for the next epoch are work, not a pause.
        collecting = float((following.get("train") or {}).get("collect_s") or 0.0)
        known = collecting + stalls.get(epoch["step"], 0.0)
        pauses["validation" if epoch.get("val") else "epochs"].append(before)
        afters.append(max(after - known, 0.0))
    # After the last epoch comes what belongs to the end of the run as well.
    usual = sum(afters[:-1]) / max(len(afters) - 1, 1)
    pauses["epochs"] += [*afters[:-1], min(afters[-1], usual)]
    for kind, found in pauses.items():
        total = sum(found)
        if total >= max(EVERYWHERE * whole, WORTH_NAMING_S):
            share, count = min(total / whole, 1.0), len(epochs)
            facts = {"share": share, "each_s": total / count}
            yield Cause(kind, (), share, share, 1.0, facts)


def _mean_step(run: RunRecord, steps: Steps, rank: int) -> float:
    """Seconds of a step, rather too many: what is no step must not be one by mistake."""
    timed = float(steps.step_s[steps.ranks.index(rank)].mean()) if rank in steps.ranks else 0.0
    rates, batch = run.rates(), float(run.facts.get(rank, {}).get("global_batch") or 0)
    return max(timed, batch / float(np.median(rates)) if rates else 0.0)


def _seen(run: RunRecord, begun: float) -> list[tuple[float, int]]:
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
    earlier, later = bisect_left(seen, (at, 0)), bisect_right(seen, (at, 2**62))
    before = after = 0.0
    if earlier:
        time, step = seen[earlier - 1]
        before = max(at - time - (last - step) * step_s, 0.0)
    if later < len(seen):
        time, step = seen[later]
        after = max(time - at - (step - last) * step_s, 0.0)
    return before, after
