"""Streams made of shards: one order on any number of ranks and workers, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import fork_workers, line, manager_for, sgd, squares
from torch import Tensor
from torch.utils.data import IterableDataset

from multi_gpu_training import MultiGPUError, ShardedStream
from multi_gpu_training.data.loader import Feeding
from multi_gpu_training.data.stream import StreamLoader

LENGTHS = [5, 0, 17, 9, 9, 30, 1, 12, 8, 14, 11]  # uneven, one empty: 116 samples


def numbers(shard: int) -> Iterator[int]:
    yield from range(100 * shard, 100 * shard + LENGTHS[shard])


def flat(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return [one for part in parts for one in part]


def everything() -> list[int]:
    return sorted(number for shard in range(len(LENGTHS)) for number in numbers(shard))


def sharded(known: bool = True, **options: Any) -> ShardedStream:
    lengths = LENGTHS if known else None
    return ShardedStream(range(len(LENGTHS)), numbers, lengths=lengths, buffer=20, **options)


def loader(
    stream: Any, rank: int = 0, ranks: int = 1, workers: int = 0, **how: Any
) -> StreamLoader:
    steps = how.pop("steps", None)
    prefetch = 2 if workers else None
    feeding = Feeding(6, 3, rank, ranks, num_workers=workers, prefetch_factor=prefetch, **how)
    return StreamLoader(stream, 12, feeding, steps)


def batches(ours: StreamLoader) -> Iterator[list[int]]:
    """The global micro-batches, from the parts of all ranks."""
    for batch in ours:
        yield batch.tolist()


def together(make: Callable[[int], StreamLoader], ranks: int) -> list[list[int]]:
    parts = [list(batches(make(rank))) for rank in range(ranks)]
    return [flat(part) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_does_not_depend_on_ranks_known_lengths_or_where_it_was_stopped(
    shuffle: bool,
) -> None:
    reference = list(batches(loader(sharded(shuffle=shuffle))))
    assert sorted(flat(reference)) == everything()
    assert flat(reference) != everything()
    drawn = random.Random(0)
    for known in (True, False):
        for ranks in (1, 2, 3, 5):
            start = drawn.randrange(9)

            def make(rank: int, ranks: int = ranks, known: bool = known, start: int = start) -> Any:
                ours = loader(sharded(known, shuffle=shuffle), rank, ranks)
                ours.seek(0, start)
                return ours

            assert together(make, ranks) == reference[2 * start :]


def test_passes_differ_by_seed_and_epoch_and_repeat_after_a_restart() -> None:
    ours = loader(sharded())
    first, second = list(batches(ours)), list(batches(ours))
    assert sorted(flat(second)) == everything()
    assert first != second
    again = loader(sharded())
    again.seek(1, 3)
    assert list(batches(again)) == second[6:]


def test_workers_share_the_lanes_and_keep_the_order() -> None:
    reference = list(batches(loader(sharded())))
    assert together(lambda rank: loader(sharded(), rank, 2, workers=2), 2) == reference


def test_an_epoch_in_steps_runs_on_over_the_ends_of_passes() -> None:
    reference: list[list[int]] = []
    ours = loader(sharded(known=False), steps=4)
    for _ in range(6):  # from the fourth epoch on the lengths are known from the first pass
        reference += list(batches(ours))
    assert ours.dataset.lengths == LENGTHS
    once = flat(reference)
    assert sorted(once[:116]) == sorted(once[116:232]) == everything()
    split = loader(sharded(), steps=4)
    split.seek(2, 1)
    assert list(batches(split)) == reference[18:24]


class Opened:
    """Opens shards and remembers which."""

    def __init__(self) -> None:
        self.shards: list[int] = []
        self.decoded = 0

    def open(self, shard: int) -> Iterator[int]:
        self.shards.append(shard)
        yield from range(100 * shard, 100 * shard + 16)

    def decode(self, number: int) -> int:
        self.decoded += 1
        return number


def test_a_rank_reads_only_its_own_shards_once_their_lengths_are_known() -> None:
    def read(rank: int, lengths: list[int] | None) -> Opened:
        opened = Opened()
        stream = ShardedStream(range(16), opened.open, decode=opened.decode, lengths=lengths)
        ours = StreamLoader(stream, 32, Feeding(32, 0, rank, 2))
        assert sum(len(batch) for batch in ours) == 128
        return opened

    zero, one = (read(rank, [16] * 16) for rank in range(2))
    assert sorted(zero.shards + one.shards) == list(range(16))
    every = read(0, None)  # all are read, but only this rank's samples are decoded
    assert sorted(every.shards) == list(range(16))
    assert every.decoded == zero.decoded == 128


def test_a_resume_opens_no_shard_that_was_used_up() -> None:
    opened = Opened()
    ours = StreamLoader(
        ShardedStream(range(16), opened.open, lengths=[16] * 16, lanes=4, buffer=0),
        16,
        Feeding(16, 0),
    )
    ours.seek(0, 12)
    assert len(list(ours)) == 4
    assert len(opened.shards) == 4


def draws(number: int) -> Tensor:
    return number + torch.rand(1, dtype=torch.float64)


def test_random_decoding_depends_on_the_sample_alone() -> None:
    def drawn(ranks: int, known: bool) -> list[Any]:
        def part(rank: int) -> list[Any]:
            ours = loader(sharded(known, decode=draws), rank, ranks)
            return [batch.flatten().tolist() for batch in ours]

        return [flat(p) for p in zip(*(part(rank) for rank in range(ranks)), strict=True)]

    assert drawn(1, True) == drawn(3, True) == drawn(2, False)


# Bad shards


def broken(shard: int) -> Iterator[int]:
    for number in numbers(shard):
        if shard == 3 and number == 304:
            raise OSError("unexpected end of file")
        yield number


def test_a_bad_shard_is_named_with_the_remedy_or_skipped_by_choice(tmp_path: Path) -> None:
    def settled(**options: Any) -> ShardedStream:
        stream = ShardedStream(range(len(LENGTHS)), broken, **options)
        stream.settle(0, 1, lambda told: [told])
        return stream

    with pytest.raises(MultiGPUError, match=r"first is 3 \(OSError: .*end of file.*on_bad_shard"):
        settled(count=True)
    with pytest.raises(MultiGPUError, match=r"shard 3 cannot be read past sample 4 \(OSError"):
        list(loader(settled()))
    stream = settled(on_bad_shard="skip")
    assert "1 of 11 shards cannot be read and are left out: 3 (OSError" in stream.describe()[0]
    left = [number for number in everything() if number // 100 != 3]
    assert sorted(flat(batches(loader(stream)))) == left
    told = ShardedStream(range(2), numbers, lengths=[5, 3])
    with pytest.raises(
        MultiGPUError, match="shard 1 holds 0 samples, but its length is known as 3"
    ):
        list(loader(told))
    told = ShardedStream([2], numbers, lengths=[16])
    with pytest.raises(MultiGPUError, match="shard 2 holds more than 16 samples"):
        list(loader(told))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": [3]}, "lengths names 1 shards, but there are 11"),
        ({"lanes": 0}, "lanes=0"),
        ({"on_bad_shard": "ignore"}, "use 'error' or 'skip'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MultiGPUError, match=said):
        ShardedStream(range(len(LENGTHS)), numbers, **options)


def test_a_missing_package_and_a_pattern_without_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "webdataset", None)
    with pytest.raises(MultiGPUError, match=r"needs webdataset.*pip install .*\[webdataset\]"):
        ShardedStream.from_webdataset("a.tar")
    with pytest.raises(MultiGPUError, match="no file matches"):
        ShardedStream.from_parquet(str(tmp_path / "*.parquet"))
    with pytest.raises(MultiGPUError, match="streaming=True"):
        ShardedStream.from_datasets([1, 2])


# Whole trainings


def pair(number: int) -> tuple[Tensor, Tensor, int]:
    return torch.full((4,), number / 1000), torch.full((1,), 1.0), number


def training(
    folder: Path, steps: int, known: bool, settings: dict[str, Any]
) -> list[tuple[int, list[int]]]:
    """Train to `steps`, and return (step, samples) of this rank."""
    fork_workers()
    seen: list[tuple[int, list[int]]] = []
    manager = manager_for(
        folder,
        **{
            "max_steps": steps,
            "epochs": 3,
            "run_name": "streamed",
            "resume": "auto",
            "global_batch_size": 12,
            "enable_fault_tolerance": True,
            **settings,
        },
    )

    def loss_fn(model: Any, batch: list[Tensor]) -> Tensor:
        seen.append((manager.trainer.state.step, batch[2].tolist()))
        return squares(model, batch)

    manager.fit(line(), sharded(known, decode=pair), loss_fn=loss_fn, optimizer=sgd)
    return seen


def joined(ranks: list[list[tuple[int, list[int]]]]) -> list[int]:
    """Samples in their global order; a rank without a share computes a stand-in."""
    order: list[int] = []
    for parts in zip(*ranks, strict=True):
        assert len({step for step, _ in parts}) == 1
        order += flat((numbers for _, numbers in parts))
    return order


def test_two_ranks_with_two_workers_continue_on_one_and_three(tmp_path: Path) -> None:
    alone = joined(run_ranks(1, training, tmp_path / "alone", 30, True, {}))
    assert sorted(alone[:116]) == sorted(alone[116:232]) == everything()
    # Ten steps are a pass: with unknown lengths the run learns them, and goes on split.
    for known, launches in (
        (True, ((2, 7, 2), (1, 13, 0), (3, 30, 1))),
        (False, ((2, 12, 2), (3, 18, 0))),
    ):
        order: list[int] = []
        for ranks, stop, workers in launches:
            how = {"num_workers": workers}
            folder = tmp_path / str(known)
            order += joined(run_ranks(ranks, training, folder, stop, known, how))
        assert order == alone[: len(order)]
        assert len(order) > 200


def test_a_changed_list_of_shards_is_refused_inside_a_pass(tmp_path: Path) -> None:
    training(tmp_path, 4, True, {})
    shorter = ShardedStream(range(4), numbers, lengths=LENGTHS[:4], decode=pair)
    manager = manager_for(
        tmp_path, run_name="streamed", resume="auto", enable_fault_tolerance=True, max_steps=8
    )
    with pytest.raises(MultiGPUError, match=r"another order: .*shards was 11, is 4"):
        manager.setup_training(line(), shorter, optimizer=sgd, loss_fn=squares)


# torchdata's stateful protocol


class Stateful(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.next = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < 60:
            self.drawn += 1
            self.next += 1
            yield torch.tensor(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_stream_continues_without_reading_what_was_used(
    steps: int | None, workers: int
) -> None:
    whole = loader(Stateful(), steps=steps)
    reference = list(batches(whole)) + list(batches(whole))
    first = loader(Stateful(), workers=workers, steps=steps)
    taken = list(islice(batches(first), 6))
    saved = first.state_dict()
    second = loader(Stateful(), steps=steps)
    second.load_state_dict(saved)
    second.seek(0, 3)
    rest = list(batches(second))
    per_epoch = 10 if steps is None else 8
    assert taken + rest == reference[:per_epoch]
    assert second.dataset.drawn == 6 * (per_epoch - 6)
    # Back in the same process, the stream begins where the loader says, not where it stands.
    second.seek(0)
    assert list(batches(second)) == reference[:per_epoch]
