"""Memory of a batch that was not measured, and what is said to fit: the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.measure.case import Case, CaseResult
from multi_gpu_training.measure.footprint import COUNTED
from multi_gpu_training.measure.memory_model import (
    SAFETY_MARGIN,
    SEGMENTS_BYTES,
    FitVerdict,
    MemoryModel,
    MemoryPoint,
    rounded,
)
from multi_gpu_training.measure.rank_speed import share_limit
from multi_gpu_training.measure.request import MeasureRequest
from multi_gpu_training.measure.script_runner import ScriptRunner
from multi_gpu_training.planning.bench.bench_tables import compare_batch_sizes
from multi_gpu_training.planning.check.training_fit import Fitting
from multi_gpu_training.planning.estimate.outcome import available_bytes, largest_batch
from multi_gpu_training.planning.forecast.profile import StepProfile

GB = 2**30


def forecast(*points: MemoryPoint) -> MemoryModel:
    found = MemoryModel.from_points(points)
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


def test_what_is_needed_is_what_the_allocator_takes() -> None:
    found = forecast(line(32, GB // 8), line(64, GB // 8))
    assert found.needed(64) == line(64, GB // 8).reserved_bytes  # as it was seen
    for batch in (65, 256, 1024, 4096):
        assert found.needed(batch) == found.peak(batch) + GB // 8 + SEGMENTS_BYTES


def test_the_largest_batch_fits_and_leaves_little_unused() -> None:
    found = forecast(line(32), line(64))
    room = 16 * GB
    largest = found.largest_batch(room)
    assert largest is not None
    assert found.fits(largest, room) and not found.fits(largest + 1, room)
    assert (0.98 - SAFETY_MARGIN) * room < found.peak(largest) < (1 - SAFETY_MARGIN) * room


def test_a_batch_that_was_seen_to_train_fits() -> None:
    found = forecast(line(32), line(64))
    room = line(64).peak_bytes
    assert found.fits(64, room) and found.fits(40, room)
    assert not found.fits(65, room)
    # It leaves less free than the safety margin, and that is said.
    assert found.verdict(64, room) is FitVerdict.TIGHT
    assert found.verdict(64, room / (1 - SAFETY_MARGIN) + 1) is FitVerdict.FITS


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
    assert largest is not None and largest < 550


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
    assert MemoryModel.from_points([]) is None


def test_counted_activations_are_a_lower_bound_where_the_peak_was_elsewhere() -> None:
    flat = [MemoryPoint(32, GB), MemoryPoint(64, GB)]
    plain, counted = MemoryModel.from_points(flat), MemoryModel.from_points(flat, 2**20)
    assert plain is not None and plain.largest_batch(2 * GB) is None
    assert counted is not None and counted.peak(128) == GB + 64 * 2**20
    one = MemoryModel.from_points(flat[:1], 2**20)
    assert one is not None and one.grows
    assert rounded(482) == 480 and rounded(5) == 5


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


# One model for everybody

TOTAL, OUTSIDE = 16 * GB, GB
FIXED, PER_SAMPLE = 2 * GB, 10 * 2**20


def facts(batch: int) -> dict[str, Any]:
    """What the ranks of any case write down on a GPU where `line` holds."""
    peak = line(batch).peak_bytes
    return {
        "step_times_s": [0.01] * 4,
        "samples_per_step": batch,
        "per_rank_batch": batch,
        "accumulation": 1,
        "copies": 1,
        "global_batch": batch,
        "peak_bytes": peak,
        "reserved_bytes": peak,
        "total_bytes": TOTAL,
        "outside_bytes": OUTSIDE,
        "precision": "float32",
    }


def by_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int | None:
    def start(runner: ScriptRunner, request: MeasureRequest, log: Path) -> int:
        request.save()
        out, batch = Path(request.out), request.settings.get("batch_size", 32)
        (out / "rank-0.json").write_text(json.dumps(facts(batch)))
        counted = {"parameters": FIXED, "activations": 32 * PER_SAMPLE}
        (out / COUNTED).write_text(json.dumps(counted))
        log.write_text("")
        return 0

    monkeypatch.setattr(ScriptRunner, "start", start)
    runner = ScriptRunner(["train.py"], folder, 4, 1, "cpu")
    found = Fitting(runner, 1, [], 2**50, lambda finding: None).measure()
    assert found is not None
    return found.largest


def by_estimate() -> int | None:
    profile = StepProfile(
        *("x", "GPU", 64, 0.1, 0.1, 0.1, (), (0.3,)),
        memory=(line(32), line(64)),
        memory_total_bytes=TOTAL,
        memory_outside_bytes=OUTSIDE,
    )
    return largest_batch(profile)


def by_bench(*sizes: int) -> int:
    """All sizes are equally fast per sample but the largest that is named."""

    def measure(case: Case) -> CaseResult:
        size = case.settings["batch_size"]
        return CaseResult(case, (1 / size,), size, facts(size))

    report = compare_batch_sizes(measure, TrainingMode.SINGLE, 1, sizes)
    assert report.recommended is not None
    return int(report.recommended["batch_size"])


def test_check_estimate_bench_and_shares_agree_on_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = share_limit(FIXED, PER_SAMPLE, TOTAL - OUTSIDE)
    assert by_estimate() == largest
    assert by_check(tmp_path, monkeypatch) == rounded(largest)
    # Measured sizes need no room for the unknown: a few samples more than the forecast fit.
    assert by_bench(8, largest) == largest
    assert by_bench(8, largest + 10) == 8
    model = forecast(line(32), line(64))
    room = TOTAL - OUTSIDE
    assert model.verdict(largest, room) is FitVerdict.FITS
    assert model.verdict(largest + 1, room) is FitVerdict.TOO_LARGE
