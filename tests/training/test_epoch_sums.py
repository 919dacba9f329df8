"""The mean of an epoch that was broken off and gone on with."""

from __future__ import annotations

from multi_gpu_training.training.metrics import EpochSums, MetricsCollector


def sums(total: float, weight: float) -> EpochSums:
    epoch, interval = MetricsCollector(), MetricsCollector()
    epoch.add("loss", total, weight)
    return EpochSums(epoch, interval)


def test_shares_of_other_ranks_count_once_however_often_they_are_loaded() -> None:
    saved = [sums(6.0, 2.0).state_dict(), sums(4.0, 3.0).state_dict()]
    ours = sums(0.0, 0.0)
    ours.load_shares(saved)
    assert ours.epoch.pair("loss") == (10.0, 5.0)
    ours.epoch.add("loss", 100.0, 1.0)  # a step that the run then goes back before
    ours.load_shares(saved)
    assert ours.epoch.pair("loss") == (10.0, 5.0)


def test_a_rank_that_gets_no_share_begins_with_nothing() -> None:
    ours = sums(6.0, 2.0)
    ours.load_shares([])
    assert ours.epoch.pair("loss") == (0.0, 0.0)
