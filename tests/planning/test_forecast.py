"""From one measured step to N GPUs: the arithmetic, with plain numbers."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.forecast import (
    Curve,
    Forecast,
    GradientBucket,
    Interconnect,
    StepProfile,
    named,
    predict,
    price_per_gpu,
    price_per_node,
)
from multi_gpu_training.planning.forecast.timeline import (
    Phases,
    exchange,
    expected_slowest_s,
    straggler_s,
)

MB = 2**20


def profile(**changes: Any) -> StepProfile:
    """A step of 100 ms: 30 forward, 60 backward, 10 optimizer; four buckets of 25 MB."""
    buckets = tuple(GradientBucket(25 * MB, at) for at in (0.015, 0.030, 0.045, 0.060))
    start = StepProfile("net", "NVIDIA A100-SXM4-80GB", 32, 0.03, 0.06, 0.01, buckets, (0.1,) * 20)
    return dataclasses.replace(start, **changes)


def network(seconds: float) -> Interconnect:
    """Any message takes so long, within a node and between nodes."""
    curves = tuple(
        Curve(gpus, nodes, (1, 2**40), (seconds, seconds), "made up")
        for gpus, nodes in ((2, 1), (4, 1), (8, 1), (16, 2))
    )
    return Interconnect("flat", "for tests", curves)


def forecast(gpus: list[int], sends_s: float = 0.001, **options: Any) -> Forecast:
    options.setdefault("residual", False)
    changes = options.pop("changes", {})
    return predict(profile(**changes), network(sends_s), gpus, **options)


def test_only_what_is_sent_after_the_backward_costs_time() -> None:
    buckets = [GradientBucket(MB, 0.01), GradientBucket(MB, 0.02), GradientBucket(MB, 0.06)]
    fast = exchange(buckets, 0.06, lambda size: 0.005)
    assert fast.exposed_s == pytest.approx(0.005)
    assert fast.communication_s == pytest.approx(0.015)
    # One channel: the second waits for the first, the third for the second.
    slow = exchange(buckets, 0.06, lambda size: 0.04)
    assert [round(sent.start_s, 6) for sent in slow.sent] == [0.01, 0.05, 0.09]
    assert slow.exposed_s == pytest.approx(0.07)
    assert exchange([], 0.06, lambda size: 1.0).exposed_s == 0


def test_one_gpu_is_what_was_measured() -> None:
    row = forecast([1], changes={"step_times_s": (0.11, 0.13)}).rows[0]
    assert row.step_s == pytest.approx(0.12)
    assert (row.speedup, row.efficiency, row.limit) == (1, 1, "nothing")
    assert row.low_step_s == row.high_step_s == row.step_s


def test_phases_measured_apart_are_no_longer_than_the_step() -> None:
    phases = Phases.of(profile(step_times_s=(0.08,)), 32)
    assert phases.step_s(1) == pytest.approx(0.08)
    assert phases.buckets[-1].ready_s == pytest.approx(0.048)


def test_the_parts_of_a_step_add_up() -> None:
    times = tuple(0.1 + 0.002 * i for i in range(20))
    answer = predict(
        profile(step_times_s=times, loader_rates={2: 200.0}, loader_workers=2),
        named("a100-nvlink+ethernet-10g"),
        [1, 2, 8, 16, 512],
    )
    for row in answer.rows:
        parts = row.compute_s + row.exposed_communication_s + row.straggler_s
        assert row.step_s == pytest.approx(parts + row.unexplained_s + row.input_wait_s)
        assert row.speedup == pytest.approx(row.gpus * row.efficiency)
        assert row.low_step_s <= row.step_s <= row.high_step_s
        assert row.low_efficiency <= row.efficiency <= row.high_efficiency


def test_accumulation_exchanges_once_a_step() -> None:
    once, four = (
        forecast([8], 0.02, changes={"accumulation": n, "step_times_s": ()}).rows[0] for n in (1, 4)
    )
    assert once.exposed_communication_s == four.exposed_communication_s > 0
    assert four.compute_s == pytest.approx(4 * 0.09 + 0.01)
    assert four.efficiency > once.efficiency


def test_each_loss_is_named_as_the_limit() -> None:
    assert forecast([8]).rows[0].limit == "nothing"
    assert forecast([8], 0.05).rows[0].limit == "communication"
    uneven = {"step_times_s": (0.1,) * 15 + (0.2,) * 5}
    assert forecast([8], changes=uneven).rows[0].limit == "stragglers"
    hungry = {"loader_rates": {4: 200.0}, "loader_workers": 4}
    assert forecast([8], changes=hungry).rows[0].limit == "input pipeline"
    assert forecast([8], scaling="strong").rows[0].limit == "batch"
    small = {"buckets": (GradientBucket(80 * MB, 0.01),), "device": "Tesla V100"}
    assert forecast([8], 1e-5, changes=small, residual=True).rows[0].limit == "unexplained"


def test_the_slowest_of_n_ranks_is_exact_for_the_sample() -> None:
    times = [1.0, 2.0, 5.0]
    for ranks in (1, 2, 3):
        draws = list(itertools.product(times, repeat=ranks))
        expected = sum(max(draw) for draw in draws) / len(draws)
        assert expected_slowest_s(times, ranks) == pytest.approx(expected)
    assert expected_slowest_s(times, 10_000) == pytest.approx(5.0)
    assert straggler_s(times, 1) == straggler_s([1.0], 8) == 0


def test_a_loader_caps_what_all_ranks_reach() -> None:
    rates = {"loader_rates": {0: 100.0, 4: 1000.0}, "loader_workers": 4}
    # 32 samples in 0.1 s are 320 a second: four workers do, none do not.
    assert forecast([4], changes=rates).rows[0].input_wait_s == 0
    capped = forecast([1, 4], changes=rates, loader_workers=0)
    assert [row.samples_per_s for row in capped.rows] == pytest.approx([100, 400])
    shared = forecast([8], changes=rates, node_loader_rate=800.0).rows[0]
    assert shared.samples_per_s == pytest.approx(800)
    on_device = {**rates, "data_on_device": True}
    assert forecast([4], changes=on_device, loader_workers=0).rows[0].input_wait_s == 0


def test_strong_scaling_shares_accumulation_first() -> None:
    shares = {
        row.gpus: (row.per_rank_batch, row.accumulation)
        for row in forecast(
            [1, 2, 4, 8, 16], scaling="strong", changes={"accumulation": 4, "step_times_s": ()}
        ).rows
    }
    assert shares == {1: (32, 4), 2: (32, 2), 4: (32, 1), 8: (16, 1), 16: (8, 1)}
    with pytest.raises(ConfigError, match=r"batch of 32 cannot be shared by 64 GPUs"):
        forecast([64], scaling="strong")


def test_weak_scaling_keeps_the_batch_of_each_gpu() -> None:
    rows = forecast([1, 8], scaling="weak").rows
    assert [row.global_batch for row in rows] == [32, 256]


def test_cost_is_hours_times_gpus_times_price() -> None:
    price = price_per_gpu(3.99, date="2025-05-01", source="a shop")
    answer = forecast(
        [1, 4], 1e-6, samples=320 * 3600, price=price, electricity_per_kwh=0.3,
        changes={"power_w": 500.0},
    )  # fmt: skip
    one, four = answer.rows
    assert (one.training_s, one.gpu_hours) == pytest.approx((3600, 1))
    assert four.gpu_hours == pytest.approx(1, rel=1e-3)
    assert (one.cost, one.electricity_cost) == pytest.approx((3.99, 0.15))
    assert any("3.99 USD per GPU-hour, a shop, 2025-05-01" in note for note in answer.notes)
    whole = price_per_node(32.0, 8, date="2025-05-01")
    rented = forecast([1, 9], 1e-6, samples=320 * 3600, price=whole).rows
    assert rented[0].cost == pytest.approx(32.0)
    assert rented[1].cost == pytest.approx(64.0 / 9, rel=1e-3)


def test_without_a_length_there_is_no_cost() -> None:
    answer = forecast([2], price=price_per_gpu(1.0))
    assert answer.rows[0].cost is answer.rows[0].training_s is None
    assert any("No cost" in note for note in answer.notes)
    longer = forecast([2], price=price_per_gpu(1.0), epochs=2, changes={"dataset_samples": 640})
    assert longer.rows[0].training_s == pytest.approx(1280 / longer.rows[0].samples_per_s)


def test_the_number_from_which_a_sample_stays_dearer_is_found() -> None:
    cheap = forecast([1, 64], 1e-6)
    assert cheap.cost_rises_from is None
    dear = forecast([1, 64], 0.05)
    assert dear.cost_rises_from == 2
    spread = {"step_times_s": tuple(0.1 + 0.0021 * i for i in range(20))}
    later = forecast([1, 64], 1e-6, changes=spread)
    rows = {n: forecast([n], 1e-6, changes=spread).rows[0].efficiency for n in range(2, 9)}
    assert later.cost_rises_from == min(n for n, value in rows.items() if value <= 1 / 1.1)


def test_more_gpus_than_measured_are_marked() -> None:
    answer = predict(profile(), named("h100-nvlink+efa-32x100g"), [8, 16, 1024])
    assert [row.extrapolated for row in answer.rows] == [False, False, True]
    assert any("From 1024 GPUs" in note for note in answer.notes)


def test_nothing_is_guessed_where_nothing_was_measured() -> None:
    with pytest.raises(ConfigError, match="measured only within one node"):
        predict(profile(), named("h100-nvlink"), [1, 8, 16])


def test_published_losses_are_not_counted_twice() -> None:
    """A forecast is as slow as the slower of what was computed and what tables show."""
    free, busy = (
        forecast([8], seconds, residual=True).rows[0] for seconds in (1e-6, 0.001)
    )  # fmt: skip
    assert free.unexplained_s > busy.unexplained_s > 0
    assert free.step_s == pytest.approx(busy.step_s)
    slow = forecast([8], 0.05, residual=True).rows[0]
    assert slow.unexplained_s == 0


def test_what_cannot_be_forecast_is_all_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        forecast([0], gpus_per_node=0, epochs=1, electricity_per_kwh=0.3)
    assert len(caught.value.problems) == 4


def test_a_forecast_goes_to_json() -> None:
    import json

    answer = forecast([1, 2])
    raw = json.loads(json.dumps(answer.to_json()))
    assert raw["rows"][1]["gpus"] == 2 and raw["interconnect"] == "flat"


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    first = profile(loader_rates={0: 1.0, 4: 2.0})
    first.save(tmp_path / "profile.json")
    assert StepProfile.load(tmp_path / "profile.json") == first


def test_a_profile_scales_as_its_config_asks_unless_told_otherwise() -> None:
    kept = {"scaling": "strong"}
    assert forecast([8], changes=kept).scaling == "strong"
    assert forecast([8], changes=kept).rows[0].global_batch == 32
    assert forecast([8], changes=kept, scaling="weak").rows[0].global_batch == 256
    with pytest.raises(ConfigError, match="scaling='huge' must be weak or strong"):
        forecast([8], scaling="huge")


def test_a_profile_from_before_scaling_was_kept_still_loads(tmp_path: Path) -> None:
    import json

    file = tmp_path / "profile.json"
    profile(scaling="strong").save(file)
    assert StepProfile.load(file).scaling == "strong"
    old = {key: value for key, value in json.loads(file.read_text()).items() if key != "scaling"}
    file.write_text(json.dumps(old))
    assert StepProfile.load(file) == profile()
