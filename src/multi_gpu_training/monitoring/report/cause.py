"""A cause of slowness, and what steps would be without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from multi_gpu_training.monitoring.report.attribution import Steps

NOTICEABLE = 0.10  # of a step, from which on a cause is one
EVERYWHERE = 0.2  # the same for what all ranks have alike


@dataclass(frozen=True)
class Cause:
    """kind: data, compute, hooks, network, unseen, batch, checkpoint, validation, epochs, shared.
    ranks: where it lies; empty is everywhere. seconds: of it in a step. saved_s: what a step would
    be shorter without it."""

    kind: str
    ranks: tuple[int, ...]
    seconds: float
    saved_s: float
    step_s: float
    facts: dict[str, Any]

    @property
    def gain(self) -> float:
        """How much more would be trained in the same time, 0.35 for 35 %."""
        left = max(self.step_s - self.saved_s, 0.02 * self.step_s)
        return self.step_s / left - 1.0


def saved(steps: Steps, less: np.ndarray) -> float:
    """What a typical step would be shorter if each rank took `less`."""
    return steps.step - float(np.median(steps.modelled(less)))


def saved_on_the_mean(steps: Steps, less: np.ndarray) -> float:
    """The same for what comes only in some steps, which the typical one has not."""
    return float(steps.modelled().mean() - steps.modelled(less).mean())


def ranks_of(steps: Steps, chosen: np.ndarray) -> tuple[int, ...]:
    """The chosen ranks; none if it is all of several."""
    if chosen.all() and len(steps.ranks) > 1:
        return everyone(steps)
    return tuple(rank for rank, yes in zip(steps.ranks, chosen, strict=True) if yes)


def everyone(steps: Steps) -> tuple[int, ...]:
    """No names, but where some ranks have no events: nothing is known of those."""
    return tuple(steps.ranks) if steps.unseen else ()
