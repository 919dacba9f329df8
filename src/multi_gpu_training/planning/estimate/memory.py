"""Peak memory of a batch that was not measured, and the largest batch that fits.

A step's memory has a part that the batch does not change (weights, gradients, optimizer) and one
that grows with it (activations), so two measured batches give a line. Its highest point may lie
elsewhere in small batches (while the weights move) than in large ones (in backward): both are
lines, and the higher one counts. What a GPU must have is more than what tensors hold: the
allocator rounds up to blocks and leaves holes, cuDNN takes workspaces that depend on the shape. A
batch is called fitting only with room for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multi_gpu_training.planning.forecast.profile import MemoryPoint, StepProfile

# Of the peak: blocks, holes and workspaces that differ from those of the measured batches.
MARGIN = 0.03
# The same once more for every doubling beyond the largest measured batch.
MARGIN_A_DOUBLING = 0.01
# Segments of the allocator have 2 MiB or 20 MiB; the last one of each kind may be nearly empty.
SEGMENTS_BYTES = 2 * 20 * 2**20
LARGEST_BATCH = 2**24
# Beyond a line by less, three points are rounding; by more, memory grows faster than the batch.
BENT = 0.03


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
    def through(cls, points: Sequence[tuple[int, int]]) -> Line:
        """Through the two largest batches; a third one shows whether it bends."""
        ordered = sorted(set(points))
        batch, peak = ordered[-1]
        if len(ordered) == 1:
            return cls(batch, peak, 0.0)
        before, lower = ordered[-2]
        slope = max(0.0, (peak - lower) / (batch - before))
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
class MemoryForecast:
    """What a batch takes, from measured ones."""

    peaks: Line
    backward: Line | None
    reserved: Line
    measured: tuple[MemoryPoint, ...]

    @classmethod
    def of(cls, points: Sequence[MemoryPoint]) -> MemoryForecast | None:
        """None where nothing was measured."""
        if not points:
            return None
        ordered = tuple(sorted(points, key=lambda point: point.per_rank_batch))
        inner = [
            (p.per_rank_batch, p.backward_bytes) for p in ordered if p.backward_bytes is not None
        ]
        return cls(
            Line.through([(p.per_rank_batch, p.peak_bytes) for p in ordered]),
            Line.through(inner) if len(inner) > 1 else None,
            Line.through([(p.per_rank_batch, p.reserved_bytes or p.peak_bytes) for p in ordered]),
            ordered,
        )

    @property
    def grows(self) -> bool:
        """Whether two sizes were measured, so that others can be forecast at all."""
        return len({point.per_rank_batch for point in self.measured}) > 1

    def peak(self, batch: int) -> int:
        """The most that tensors hold at once, `torch.cuda.max_memory_allocated`."""
        highest = self.peaks(batch)
        if self.backward is not None:
            highest = max(highest, self.backward(batch))
        return round(max(0.0, highest))

    def needed(self, batch: int) -> int:
        """Memory with which this batch trains, with room for what is not known."""
        for point in self.measured:
            if point.per_rank_batch == batch:
                return point.reserved_bytes or point.peak_bytes
        largest = self.measured[-1].per_rank_batch
        margin = MARGIN
        size = float(batch)
        while size > largest:
            size /= 2
            margin += MARGIN_A_DOUBLING
        return round(
            max(self.peak(batch) * (1 + margin), self.reserved(batch) * (1 + margin / 3))
            + SEGMENTS_BYTES
        )

    def fits(self, batch: int, available_bytes: int) -> bool:
        """True only if there is no doubt."""
        largest = self.measured[-1]
        if batch <= largest.per_rank_batch and self.needed(largest.per_rank_batch) <= (
            available_bytes
        ):
            return True  # more than this was seen to fit
        return self.grows and self.needed(batch) <= available_bytes

    def largest_batch(self, available_bytes: int) -> int | None:
        """The largest that fits without doubt; 0 if none does, None where memory did not grow
        with the batch so that nothing is known."""
        if not self.grows or self.peak(LARGEST_BATCH) <= available_bytes:
            return None
        low, high = 0, LARGEST_BATCH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, available_bytes) else (low, middle)
        return low


def available_bytes(profile: StepProfile) -> int | None:
    """What torch's allocator can have of the device; None on CPUs."""
    if profile.memory_total_bytes is None:
        return None
    return profile.memory_total_bytes - profile.memory_outside_bytes


def largest_batch(profile: StepProfile) -> int | None:
    """Samples per GPU that fit without doubt; None where that is not known."""
    taken, room = MemoryForecast.of(profile.memory), available_bytes(profile)
    return taken.largest_batch(room) if taken is not None and room is not None else None
