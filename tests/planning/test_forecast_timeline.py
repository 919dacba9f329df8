"""benchmarks/timeline.py emulates a network that sends one bucket after the other."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import timeline

    yield timeline
    sys.modules.pop("timeline")


def test_the_emulated_channel_sends_one_after_the_other(script: Any) -> None:
    clock = script.HostClock()
    try:
        start = time.perf_counter()
        first, second = (clock.send(torch.ones(1), 0.3) for _ in range(2))
        assert time.perf_counter() - start < 0.3, "sending does not hold up the backward"
        first.wait()
        halfway = time.perf_counter() - start
        second.wait()
        assert halfway >= 0.3
        assert time.perf_counter() - start >= 0.6
    finally:
        clock.close()


def test_the_profile_alone_makes_the_prediction(script: Any) -> None:
    quick = script.Step(0.01, 0.02, 0.005, ((2**20, 0.01), (2**20, 0.02)))
    network = script.named("ethernet-10g")
    each = network.allreduce_s(2**20, script.GPUS, script.NODES)
    case = script.compared("net", 1, "ethernet-10g", [quick] * 3, [1.0, 2.0, 9.0])
    assert case.measured_s == 2.0 and case.buckets == 2
    assert case.exposed_s == pytest.approx(max(0.01 + 2 * each, 0.02 + each) - 0.02)
    assert case.predicted_s == pytest.approx(0.035 + case.exposed_s)
    assert case.ratio == pytest.approx(case.predicted_s / 2.0)
