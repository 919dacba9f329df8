"""What a batch needs of a rank's memory, and whether it fits. Arithmetic only, without torch.

A step's memory has a part that the batch does not change (weights, gradients, optimizer) and one
that grows with it (activations), so two measured batches give a line. Its highest point may lie
elsewhere in small batches (while the weights move) than in large ones (in backward): both are
lines, and the higher one counts.

`mgt check`, `bench`, `estimate` and unequal shares ask this model, with one safety margin: the same
figures get the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

# Of the memory that a rank can have, kept free: workspaces of cuDNN and holes of the allocator
# that differ from those of the measured batches, buffers of NCCL, longer samples than were seen.
# Forecasts of five models were 3.8 % too low at most (benchmarks/memory_forecast.md).
SAFETY_MARGIN = 0.1
# Segments of the allocator have 2 MiB or 20 MiB; the last one of each kind may be nearly empty.
SEGMENTS_BYTES = 2 * 20 * 2**20
LARGEST_BATCH = 2**24
# Beyond a line by less, three points are rounding; by more, memory grows faster than the batch.
BENT = 0.03
ROUNDED_TO = 8


class FitVerdict(StrEnum):
    FITS = "fits"
    TIGHT = "tight"  # it was seen to train, and leaves less free than the safety margin
    TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class MemoryPoint:
    """The most memory that a step took with this many samples in a micro-batch."""

    per_rank_batch: int
    peak_bytes: int
    # What torch's allocator took from the device for it: holes and rounding included.
    reserved_bytes: int | None = None
    # The most until the weights moved, in a step that was not recorded.
    backward_bytes: int | None = None


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one rank with `per_rank_batch` samples in a micro-batch. All but `workspace` are
    counted; that is what the measured peak has beyond them: on a CPU rank the whole process.

    A strategy that shards a part over ranks gives this rank's share of it.
    """

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
    def of(counted: Mapping[str, Any], per_rank_batch: int, peak_bytes: int) -> MemoryParts:
        names = ("parameters", "gradients", "optimizer", "buffers", "batch", "activations")
        parts = {name: int(counted.get(name, 0)) for name in (*names, "data_on_device")}
        workspace = max(0, peak_bytes - sum(parts.values()))
        return MemoryParts(per_rank_batch=per_rank_batch, workspace=workspace, **parts)

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
class Line:
    """Bytes by batch size. `bend` is the part that grows with its square, where there is one."""

    at: int
    start_bytes: float
    per_sample_bytes: float
    bend: float = 0.0
    bend_at: tuple[int, int] = (0, 0)

    def __call__(self, batch: float) -> float:
        found = self.start_bytes + self.per_sample_bytes * (batch - self.at)
        low, high = self.bend_at
        return found + self.bend * (batch - low) * (batch - high)

    @classmethod
    def through(cls, points: Sequence[tuple[int, int]], least_per_sample: float = 0.0) -> Line:
        """Through the two largest batches; a third one shows whether it bends. It rises by
        `least_per_sample` at least: a peak that was set elsewhere, at the start say, hides what a
        sample takes."""
        ordered = sorted(set(points))
        batch, peak = ordered[-1]
        if len(ordered) == 1:
            return cls(batch, peak, least_per_sample)
        before, lower = ordered[-2]
        slope = max(0.0, least_per_sample, (peak - lower) / (batch - before))
        if len(ordered) == 2:
            return cls(batch, peak, slope)
        first, first_peak = ordered[-3]
        above = first_peak - (peak - slope * (batch - first))
        if above < BENT * first_peak:
            return cls(batch, peak, slope)
        return cls(
            batch, peak, slope, above / ((first - before) * (first - batch)), (before, batch)
        )


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one rank by the number of samples in a micro-batch."""

    peaks: Line
    backward: Line | None
    reserved: Line
    measured: tuple[MemoryPoint, ...] = ()

    @classmethod
    def from_points(
        cls, points: Sequence[MemoryPoint], least_per_sample: float = 0.0
    ) -> MemoryModel | None:
        """From measured batches; None where nothing was measured."""
        if not points:
            return None
        ordered = tuple(sorted(points, key=lambda point: point.per_rank_batch))
        inner = [
            (p.per_rank_batch, p.backward_bytes) for p in ordered if p.backward_bytes is not None
        ]
        peaks = [(p.per_rank_batch, p.peak_bytes) for p in ordered]
        reserved = [(p.per_rank_batch, p.reserved_bytes or p.peak_bytes) for p in ordered]
        return cls(
            Line.through(peaks, least_per_sample),
            Line.through(inner) if len(inner) > 1 else None,
            Line.through(reserved, least_per_sample),
            ordered,
        )

    @classmethod
    def from_parts(cls, fixed_bytes: float, per_sample_bytes: float) -> MemoryModel:
        """From what does not depend on the batch, and what each sample takes."""
        line = Line(0, fixed_bytes, per_sample_bytes)
        return cls(line, None, line)

    @property
    def grows(self) -> bool:
        """Whether enough is known to forecast batches that were not measured."""
        several = len({point.per_rank_batch for point in self.measured}) > 1
        return several or self.peaks.per_sample_bytes > 0

    def peak(self, batch: int) -> int:
        """The most that tensors hold at once, `torch.cuda.max_memory_allocated`."""
        highest = self.peaks(batch)
        if self.backward is not None:
            highest = max(highest, self.backward(batch))
        return round(max(0.0, highest))

    def needed(self, batch: int) -> int:
        """What the allocator takes from the device for this batch."""
        for point in self.measured:
            if point.per_rank_batch == batch:
                return point.reserved_bytes or point.peak_bytes
        return round(max(self.peak(batch), self.reserved(batch)) + SEGMENTS_BYTES)

    def verdict(self, batch: int, available_bytes: float) -> FitVerdict:
        """Whether a rank that can have `available_bytes` trains this batch."""
        largest = self.measured[-1].per_rank_batch if self.measured else 0
        if (self.grows or batch <= largest) and self.needed(batch) <= budget(available_bytes):
            return FitVerdict.FITS
        if batch <= largest and self.needed(largest) <= available_bytes:
            return FitVerdict.TIGHT  # at least as much was seen to train
        return FitVerdict.TOO_LARGE

    def fits(self, batch: int, available_bytes: float) -> bool:
        return self.verdict(batch, available_bytes) is not FitVerdict.TOO_LARGE

    def largest_batch(self, available_bytes: float) -> int | None:
        """The largest batch that fits; 0 if none does, None where memory does not grow with the
        batch so that nothing is known."""
        if not self.grows or self.peak(LARGEST_BATCH) <= available_bytes:
            return None
        low, high = 0, LARGEST_BATCH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, available_bytes) else (low, middle)
        return low


def budget(available_bytes: float) -> float:
    """What a training may plan with."""
    return (1 - SAFETY_MARGIN) * available_bytes


def with_margin(batch: int) -> int:
    """Fewer samples than `batch`, which filled the memory to the brim."""
    return max(1, int(batch * (1 - SAFETY_MARGIN)))


def available_bytes(facts: Mapping[str, Any]) -> int | None:
    """What torch's allocator can have of a measured device: all but CUDA's own, NCCL's and other
    programs' memory. None on CPUs."""
    total = facts.get("total_bytes")
    return int(total - facts.get("outside_bytes", 0)) if total else None


def rounded(batch: int) -> int:
    """A size that people choose, no larger than `batch`."""
    return batch if batch < ROUNDED_TO else batch // ROUNDED_TO * ROUNDED_TO
