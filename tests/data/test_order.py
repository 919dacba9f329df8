"""Which samples form a step, and whose they are."""

from __future__ import annotations

import pytest

from multi_gpu_training.data.order import (
    ShuffledBatches,
    cut,
    proportional,
    shares,
)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 48])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_shares_cover_everything_and_differ_by_one_at_most(count: int, parts: int) -> None:
    pieces = [cut(count, parts, part) for part in range(parts)]
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 48, 1001])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_equal_weights_cut_as_no_weights_do(count: int, parts: int) -> None:
    for part in range(parts):
        assert cut(count, parts, part, (5,) * parts) == cut(count, parts, part)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 48, 1001])
@pytest.mark.parametrize("weights", [(2, 1), (1, 999), (43, 21), (7, 1, 1, 7), (1, 2, 3, 4, 5)])
def test_weighted_shares_cover_everything_and_follow_the_weights(
    count: int, weights: tuple[int, ...]
) -> None:
    pieces = [cut(count, len(weights), part, weights) for part in range(len(weights))]
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(count))
    for (start, stop), weight in zip(pieces, weights, strict=True):
        assert abs((stop - start) - count * weight / sum(weights)) < 1


def test_a_share_of_the_size_of_its_weights_is_exactly_them() -> None:
    assert proportional(64, (43, 21)) == (43, 21)
    assert proportional(128, (43, 21)) == (86, 42)
    assert proportional(0, (43, 21)) == (0, 0)


@pytest.mark.parametrize("weights", [None, (3, 1, 2)])
@pytest.mark.parametrize("micro", [48, 16, 7])
def test_weights_change_whose_a_sample_is_and_nothing_else(
    micro: int, weights: tuple[int, ...] | None
) -> None:
    source = ShuffledBatches(101, 48)
    alone = list(shares(source, micro, 3, 2, 0, 1))
    parts = [list(shares(source, micro, 3, 2, rank, 3, weights=weights)) for rank in range(3)]
    for one, together in zip(alone, zip(*parts, strict=True), strict=True):
        assert one.indices == tuple(i for share in together for i in share.indices)
        assert {share.window_count for share in together} == {one.window_count}


@pytest.mark.parametrize("micro", [48, 16, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_micro_batches_hold_the_same_samples_on_any_number_of_ranks(ranks: int, micro: int) -> None:
    source = ShuffledBatches(101, 48)
    one = list(shares(source, micro, 3, 2, 0, 1))
    many = [list(shares(source, micro, 3, 2, rank, ranks)) for rank in range(ranks)]
    for number, alone in enumerate(one):
        together = [parts[number] for parts in many]
        assert alone.indices == tuple(i for share in together for i in share.indices)
        assert {s.window_count for s in together} == {alone.window_count}
        assert {(s.first, s.last, s.position) for s in together} == {
            (alone.first, alone.last, alone.position)
        }
    assert all(len(parts) == len(one) for parts in many)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    source = ShuffledBatches(100, 32)
    assert list(source.batches(1, 0)) == list(source.batches(1, 0))
    assert list(source.batches(1, 0)) != list(source.batches(1, 1))
    assert list(source.batches(1, 0)) != list(source.batches(2, 0))


def test_starting_later_gives_the_rest_of_the_same_epoch() -> None:
    source = ShuffledBatches(100, 32)
    whole = list(shares(source, 16, 0, 4, 1, 3))
    rest = list(shares(source, 16, 0, 4, 1, 3, start=2))
    assert rest == [share for share in whole if share.position >= 2]
