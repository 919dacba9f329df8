"""Memory of one training: its parts, how it grows with the batch, and what still fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

KEPT_FREE = 0.1  # of the memory: fragments, NCCL's buffers, longer batches
ROUNDED_TO = 8


@dataclass(frozen=True)
class Breakdown:
    """Bytes of one rank with `per_rank_batch` samples in a micro-batch. All but `workspace` are
    counted; that is what the measured peak has beyond them: on a CPU rank the whole process."""

    per_rank_batch: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    batch: int
    activations: int
    data_on_device: int = 0
    workspace: int = 0

    @staticmethod
    def of(counted: Mapping[str, Any], per_rank_batch: int, peak_bytes: int) -> Breakdown:
        names = ("parameters", "gradients", "optimizer", "buffers", "batch", "activations")
        parts = {name: int(counted.get(name, 0)) for name in (*names, "data_on_device")}
        workspace = max(0, peak_bytes - sum(parts.values()))
        return Breakdown(per_rank_batch=per_rank_batch, workspace=workspace, **parts)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return {key: value for key, value in asdict(self).items() if key != "per_rank_batch"}

    @property
    def bytes_per_sample(self) -> float:
        """What grows with the batch, by count."""
        return (self.batch + self.activations) / self.per_rank_batch

    @property
    def checkpoint_bytes(self) -> int:
        return self.parameters + self.buffers + self.optimizer


@dataclass(frozen=True)
class Growth:
    """Bytes as a straight line over the samples of a micro-batch."""

    fixed: float
    per_sample: float

    def bytes_at(self, batch: int) -> float:
        return self.fixed + self.per_sample * batch

    def largest(self, budget: float) -> int | None:
        """The most samples within `budget` bytes; 0 if none fits, None where memory sets no
        limit that these figures show."""
        if self.bytes_at(1) > budget:
            return 0
        if self.per_sample <= 0:
            return None
        return int((budget - self.fixed) / self.per_sample)


def growth_of(points: Sequence[tuple[int, int]], least_per_sample: float = 0.0) -> Growth:
    """The line through measured (samples, peak bytes). `least_per_sample` is what was counted: a
    peak that was set elsewhere, at the start say, hides what a sample takes."""
    (small, low), (large, high) = min(points), max(points)
    slope = (high - low) / (large - small) if large > small else 0.0
    slope = max(slope, least_per_sample)
    # Through the higher point: rather too much than too little.
    return Growth(max(0.0, high - slope * large), slope)


def rounded(batch: int) -> int:
    """A size that people choose, no larger than `batch`."""
    return batch if batch < ROUNDED_TO else batch // ROUNDED_TO * ROUNDED_TO
