"""Ranks that take long over their own work, in every step or only in some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from multi_gpu_training.monitoring.report.attribution import Steps
from multi_gpu_training.monitoring.report.cause import (
    EVERYWHERE,
    NOTICEABLE,
    Cause,
    everyone,
    ranks_of,
    saved,
    saved_on_the_mean,
)
from multi_gpu_training.monitoring.report.run_record import RunRecord

LONGER = 0.2  # than the others take, from which on a rank is slow


def compute(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """Ranks that compute longer than the others do, with what other work on their cores takes only
    where that is so much that it cannot be chance; or all ranks in some of the steps."""
    found = list(_excess("compute", steps, steps.computing)) or list(_hogged(steps))
    yield from found or _now_and_then(steps)


def hooks(run: RunRecord, steps: Steps) -> Iterator[Cause]:
    """Hooks and other Python between the phases, on some ranks or on all."""
    other = steps.phases["other"]
    found = list(_excess("hooks", steps, other))
    yield from found
    typical = np.median(other, axis=1)
    # What comes every few steps, like a rollout, is not in the median step, but in the mean.
    rare = float(spikes(other, 2).mean(axis=1).min())
    if not found and typical.min() + rare > max(EVERYWHERE * (steps.step + rare), 2e-3):
        less = saved(steps, typical[:, None]) + rare
        seconds, step_s = float(typical.max()) + rare, steps.step + rare
        yield Cause("hooks", everyone(steps), seconds, less, step_s, {})


def spikes(seconds: np.ndarray, least: int) -> np.ndarray:
    """What steps take beyond the rank's typical one, where it is far beyond; 0 in the others, and
    on ranks that had fewer than `least` of such steps: a busy machine delays one now and then, but
    so few that they hardly move the mean."""
    typical = np.median(seconds, axis=1, keepdims=True)
    far = seconds > 2 * typical + 1e-3
    often = far.sum(axis=1, keepdims=True) >= least
    return np.asarray(np.where(far & often, seconds - typical, 0.0))


def _excess(kind: str, steps: Steps, seconds: np.ndarray) -> Iterator[Cause]:
    """Ranks whose `seconds` are longer than the usual, in the typical step or on the mean."""
    if len(steps.ranks) < 2:
        return
    typical = np.median(seconds, axis=1)
    rare = spikes(seconds, 3)
    often = rare.mean(axis=1)
    rare[often <= 2 * _usual(often)] = 0.0  # the others have them as well
    level = typical + rare.mean(axis=1)
    usual = _usual(level)
    slow = (level - usual > LONGER * usual) & (level - usual > 0.05 * steps.step)
    lasting = np.where(slow, np.maximum(typical - _usual(typical), 0.0), 0.0)
    rare[~slow] = 0.0
    at_times = saved_on_the_mean(steps, rare)
    less = saved(steps, lasting[:, None]) + at_times
    step_s = steps.step + at_times
    if not slow.any() or less < NOTICEABLE * step_s:
        return
    facts = {"usual_s": usual, "typical_s": float(level.max())}
    if at_times > 0.5 * less:
        facts |= _about(rare)
    longest = float((level - usual)[slow].max())
    yield Cause(kind, ranks_of(steps, slow), longest, less, step_s, facts)


def _now_and_then(steps: Steps) -> Iterator[Cause]:
    """All ranks compute far longer in some steps."""
    rare = spikes(steps.computing, 3)
    at_times = saved_on_the_mean(steps, rare)
    if rare.max(axis=1).min() > 0 and at_times >= EVERYWHERE * (steps.step + at_times):
        seconds, step_s = float(rare.mean(axis=1).max()), steps.step + at_times
        yield Cause("compute", everyone(steps), seconds, at_times, step_s, _about(rare))


def _about(rare: np.ndarray) -> dict[str, Any]:
    """In which part of the steps the worst rank takes how much longer."""
    worst = rare[int(rare.mean(axis=1).argmax())]
    return {"part": float((worst > 0).mean()), "spike_s": float(worst[worst > 0].mean())}


def _hogged(steps: Steps) -> Iterator[Cause]:
    """A rank whose core other work has most of the time, while the others have theirs."""
    if len(steps.ranks) < 2:
        return
    queued = np.median(steps.queued, axis=1)
    worst, usual = int(queued.argmax()), float(np.median(np.delete(queued, queued.argmax())))
    excess, whole = float(queued[worst]) - usual, steps.loaded_step
    if excess < 0.3 * whole or excess < 2 * usual:
        return
    computing = float(np.median(steps.computing[worst]))
    facts = {"usual_s": computing, "typical_s": computing + excess}
    yield Cause("compute", (steps.ranks[worst],), excess, excess, whole, facts)


def _usual(of_ranks: np.ndarray) -> float:
    return float(np.median(of_ranks) if len(of_ranks) > 2 else of_ranks.min())
