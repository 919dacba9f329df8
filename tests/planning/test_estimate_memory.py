"""Memory of a batch that was not measured, and what is called fitting."""

from __future__ import annotations

from multi_gpu_training.planning.estimate.memory import (
    SEGMENTS_BYTES,
    MemoryForecast,
    available_bytes,
)
from multi_gpu_training.planning.forecast.profile import MemoryPoint, StepProfile

GB = 2**30


def forecast(*points: MemoryPoint) -> MemoryForecast:
    found = MemoryForecast.of(points)
    assert found is not None
    return found


def line(batch: int, extra: int = 0) -> MemoryPoint:
    """2 GB, and 10 MB a sample."""
    peak = 2 * GB + batch * 10 * 2**20
    return MemoryPoint(batch, peak, peak + extra)


def test_other_batches_lie_on_the_line_through_two() -> None:
    found = forecast(line(32), line(64))
    for batch in (1, 48, 64, 200, 1000):
        assert found.peak(batch) == line(batch).peak_bytes


def test_what_is_needed_is_more_than_the_peak_and_more_so_far_from_what_was_measured() -> None:
    found = forecast(line(32, GB // 8), line(64, GB // 8))
    assert found.needed(64) == line(64, GB // 8).reserved_bytes  # as it was seen
    shares = [found.needed(batch) / found.peak(batch) for batch in (65, 256, 1024, 4096)]
    assert all(share > 1.03 for share in shares)
    slack = [(found.needed(b) - SEGMENTS_BYTES) / found.peak(b) for b in (256, 1024, 4096)]
    assert slack == sorted(slack)


def test_the_largest_batch_fits_and_leaves_little_unused() -> None:
    found = forecast(line(32), line(64))
    room = 16 * GB
    largest = found.largest_batch(room)
    assert largest is not None
    assert found.fits(largest, room) and not found.fits(largest + 1, room)
    assert 0.9 * room < found.peak(largest) < room


def test_a_batch_that_was_seen_to_train_fits() -> None:
    found = forecast(line(32), line(64))
    room = line(64).peak_bytes
    assert found.fits(64, room) and found.fits(40, room)
    assert not found.fits(65, room)


def test_nothing_fits_where_the_weights_alone_are_too_large() -> None:
    found = forecast(line(1), line(2))
    assert not found.fits(1, GB) and found.largest_batch(GB) == 0


def test_activations_below_the_optimizers_peak_are_not_overlooked() -> None:
    """With small batches the most is taken while the weights move, whatever the batch."""
    flat = 4 * GB
    points = [MemoryPoint(b, flat, flat, 2 * GB + b * 10 * 2**20) for b in (16, 32)]
    found = forecast(*points)
    assert found.peak(64) == flat
    assert found.peak(1024) == 2 * GB + 1024 * 10 * 2**20
    largest = found.largest_batch(8 * GB)
    assert largest is not None and largest < 620


def test_a_loss_over_pairs_of_samples_grows_with_the_square() -> None:
    def pairs(batch: int) -> MemoryPoint:
        return MemoryPoint(batch, GB + 4096 * batch * batch)

    found = forecast(pairs(256), pairs(512), pairs(1024))
    assert abs(found.peak(4096) / pairs(4096).peak_bytes - 1) < 0.01
    # Rounding that three points show is no bend.
    rounded = forecast(line(16), line(32), MemoryPoint(64, line(64).peak_bytes + 2**20))
    assert abs(rounded.peak(1024) / line(1024).peak_bytes - 1) < 0.02


def test_one_measured_batch_says_nothing_of_larger_ones() -> None:
    found = forecast(line(32))
    assert not found.grows
    assert found.fits(32, 16 * GB) and not found.fits(33, 16 * GB)
    assert found.largest_batch(16 * GB) is None
    assert MemoryForecast.of([]) is None


def test_memory_of_others_is_not_available() -> None:
    profile = StepProfile("x", "GPU", 8, 0.1, 0.1, 0.1, (), (0.3,), memory_total_bytes=16 * GB)
    assert available_bytes(profile) == 16 * GB
    shared = StepProfile(
        "x",
        "GPU",
        8,
        0.1,
        0.1,
        0.1,
        (),
        (0.3,),
        memory_total_bytes=16 * GB,
        memory_outside_bytes=GB,
    )
    assert available_bytes(shared) == 15 * GB
    assert available_bytes(StepProfile("x", "CPU", 8, 0.1, 0.1, 0.1, (), (0.3,))) is None
