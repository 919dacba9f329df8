"""How long a training is, and how many steps that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Length:
    """So many epochs of so many samples. What is not divided into epochs is one of them."""

    epochs: float
    epoch_samples: float

    @staticmethod
    def of(
        dataset_samples: int | None, epochs: float | None, samples: float | None
    ) -> Length | None:
        """`samples` in all, or `epochs` of the dataset; None where neither says how long."""
        if samples is not None:
            whole = dataset_samples or samples
            return Length(samples / whole, whole)
        if epochs is not None and dataset_samples:
            return Length(epochs, dataset_samples)
        return None

    def steps(self, global_batch: int) -> int:
        """An epoch ends with a step, filled or not: it has at least one."""
        whole, rest = divmod(self.epochs, 1)
        last = round(rest * self.epoch_samples / global_batch, 6)  # a hair more is no step more
        steps = int(whole) * math.ceil(self.epoch_samples / global_batch) + math.ceil(last)
        return max(1, steps)
