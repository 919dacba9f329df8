"""`mgt bench --tune` chooses what is faster, and what is only luckier it does not choose."""

from __future__ import annotations

import random
from collections.abc import Callable

from multi_gpu_training.measure.case import Case, CaseResult, Failure, Measure
from multi_gpu_training.planning.bench.tuning import (
    AGAIN,
    COMBINED,
    DEFAULT,
    Candidate,
    beats,
    tune,
)

FACTS = {"per_rank_batch": 32, "accumulation": 1, "global_batch": 64, "peak_bytes": 2**30}


def machine(speed: Callable[[Case], float], noise: float = 0.02, seed: int = 0) -> Measure:
    """Measures 10 ms a step divided by `speed`, and some noise."""
    random_numbers = random.Random(seed)

    def measure(case: Case) -> CaseResult:
        # A run is slow or fast as a whole: repeats within a process do not show it.
        step = 0.010 / speed(case) * (1 + noise * random_numbers.random())
        parts = case.settings.get("gradient_accumulation_steps", 1)
        samples = case.settings.get("batch_size", 32) * parts * case.ranks
        return CaseResult(case, (step * samples / 64,) * 9, samples, FACTS)

    return measure


def verdicts(report: object) -> dict[str, str]:
    return {row["case"]: row["verdict"] for row in report.rows}  # type: ignore[attr-defined]


def test_the_faster_of_two_is_chosen() -> None:
    fast = machine(lambda case: 1.1 if case.settings.get("static_graph") else 1.0)
    report = tune(fast, 2)
    assert report.recommended == {"static_graph": True}
    assert verdicts(report)["static graph"] == "faster"
    assert verdicts(report)["static graph, once more"] == "confirmed"
    assert verdicts(report)["bucket 5 MB"] in ("slower", "within the spread")
    assert "Chosen: static graph, 1." in report.markdown()
    names = [row["case"] for row in report.rows]
    assert names[:2] == [DEFAULT, AGAIN] and "compression" in names
    assert any("accumulation" in name for name in names)


def test_noise_chooses_nothing() -> None:
    for seed in range(200):
        report = tune(machine(lambda case: 1.0, noise=0.3, seed=seed), 2)
        assert report.recommended == {}, seed
        assert "keep" in report.markdown()


def test_a_gain_within_the_spread_is_no_gain() -> None:
    base = [1.00, 1.01, 1.04, 1.05]
    assert not beats([0.97, 0.98, 0.99], base)
    assert not beats([0.90, 0.91, 1.02], base)
    assert beats([0.90, 0.91, 0.92], base)
    assert not beats([0.9995], [1.0, 1.0])


def test_what_changes_the_arithmetic_is_shown_and_not_chosen() -> None:
    def speed(case: Case) -> float:
        if case.settings.get("fp16_compression"):
            return 1.5
        return 1.4 if case.settings.get("gradient_accumulation_steps") == 2 else 1.0

    report = tune(machine(speed), 2)
    shown = verdicts(report)
    assert shown["compression"].startswith("faster; not chosen, gradients are rounded to 16 bits")
    assert "global batch is doubled" in shown["accumulation 2, twice the step"]
    assert report.recommended == {"batch_size": 16, "gradient_accumulation_steps": 2}
    allowed = tune(machine(speed), 2, allow_compression=True)
    assert allowed.recommended is not None and allowed.recommended["fp16_compression"]


def test_winners_are_tried_together() -> None:
    def speed(case: Case) -> float:
        gain = 1.15 if case.settings.get("static_graph") else 1.0
        return gain * (1.2 if case.settings.get("bucket_cap_mb") == 100 else 1.0)

    report = tune(machine(speed), 2)
    assert report.recommended == {"static_graph": True, "bucket_cap_mb": 100.0}
    assert verdicts(report)[COMBINED] == "confirmed"


def test_luck_that_does_not_last_is_not_chosen() -> None:
    seen: dict[str, int] = {}

    def speed(case: Case) -> float:
        seen[case.name] = seen.get(case.name, 0) + 1
        return 1.3 if case.name == "static graph" else 1.0  # but not "once more"

    report = tune(machine(speed), 2)
    assert report.recommended == {}
    assert "was faster, but not again" in report.markdown()
    assert seen["static graph, once more"] == 3


def test_what_is_hopeless_or_fails_is_not_measured_again() -> None:
    tried: list[str] = []

    def measure(case: Case) -> CaseResult:
        tried.append(case.name)
        if case.settings.get("static_graph"):
            return CaseResult(case, failure=Failure.OUT_OF_MEMORY, error="CUDA out of memory")
        slow = case.settings.get("bucket_cap_mb") == 5
        return machine(lambda case: 0.5 if slow else 1.0)(case)

    report = tune(measure, 2)
    assert tried.count("bucket 5 MB") == tried.count("static graph") == 1
    assert tried.count("bucket 100 MB") == 3
    assert verdicts(report)["bucket 5 MB"] == "slower; one round"
    assert verdicts(report)["static graph"] == "out of memory"


def test_a_config_that_fails_says_so() -> None:
    report = tune(lambda case: CaseResult(case, failure=Failure.CRASH, error="no such data"), 2)
    assert report.recommended == {}
    assert "The config itself fails: no such data" in report.markdown()


def test_candidates_may_be_given() -> None:
    tried = [Candidate("large buckets", {"bucket_cap_mb": 200.0})]
    report = tune(machine(lambda case: 1.2 if case.settings else 1.0), 2, tried=tried)
    assert report.recommended == {"bucket_cap_mb": 200.0}
