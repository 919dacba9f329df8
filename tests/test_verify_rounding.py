"""`mgt verify` tells rounding that an optimizer made larger from a real difference."""

from __future__ import annotations

from typing import Any

import torch

from multi_gpu_training.planning.verify import RecordedRun, VerifyReport
from multi_gpu_training.planning.verify import compare as compare_runs

APART = 3e-5  # more than float32 may differ; seen where Adam makes a step of a rounded zero


def compare(in_float32: dict[str, float], in_float64: dict[str, float]) -> VerifyReport:
    """A verification of trainings that end apart by so much, on two ranks and by hand."""

    def run(ranks: int, double: bool = False, **changes: Any) -> Any:
        apart = in_float64 if double else in_float32
        mine = torch.ones(4, dtype=torch.float64)
        weights = {"w": mine * (1 + (apart["ranks"] if ranks > 1 else 0.0))}
        by_hand = {"w": mine * (1 + apart["by_hand"])} if ranks == 1 else None
        facts = {
            "seen": [],
            "metrics": None,
            "largest": {"w": 1.0},
            "batchnorm": [],
            "sync_bn": False,
            "loss_depends_on_batch": False,
        }
        return RecordedRun(ranks, weights, by_hand, [facts] * ranks)

    return compare_runs(run, [2])


def test_a_plain_loop_that_differs_in_float32_alone_is_rounding() -> None:
    report = compare({"ranks": APART, "by_hand": APART}, {"ranks": 1e-15, "by_hand": 1e-15})
    assert report.passed
    assert report.rounding
    assert "agree to 1.0e-15" in report.notes[0] or "agree to 1.1e-15" in report.notes[0]
    assert compare({"ranks": 0.0, "by_hand": APART}, {"ranks": 0.0, "by_hand": 0.0}).passed


def test_a_difference_that_stays_in_float64_is_real() -> None:
    by_hand = compare({"ranks": 0.0, "by_hand": APART}, {"ranks": 0.0, "by_hand": APART})
    assert not by_hand.passed
    assert "one rank does not compute what a plain PyTorch loop computes" in by_hand.problems[0]
    ranks = compare({"ranks": APART, "by_hand": APART}, {"ranks": APART, "by_hand": 0.0})
    assert not ranks.passed
    assert ranks.outcomes[0].problems
    assert compare({"ranks": 0.0, "by_hand": 0.0}, {}).passed
