"""What a user's own loaders, batches and loops may look like, and what is refused by name."""

from __future__ import annotations

import math
import warnings
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import flat, line, manager_for, points, sgd, squares
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from multi_gpu_training.errors import CheckpointError, ConfigError, DataError


class Encoded(UserDict[str, Tensor]):
    """Like a tokenizer's BatchEncoding."""

    def to(self, device: Any) -> Encoded:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def encode(samples: list[tuple[Tensor, Tensor]]) -> Encoded:
    inputs, targets = zip(*samples, strict=True)
    return Encoded({"x": torch.stack(inputs), "labels": torch.stack(targets)})


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = line()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        class Output:
            loss = (self.line(x) - labels).square().mean()

        return Output()


def test_default_validation_takes_any_mapping(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, batch_size=4)
    loader = DataLoader(points(), batch_size=4, collate_fn=encode)
    model = WithLoss()
    result = manager.fit(model, loader, loader, optimizer=sgd)
    with torch.no_grad():
        expected = float(model(*points().tensors).loss)
    assert result.metrics["loss"] == pytest.approx(expected, rel=1e-6)


class PartOfARank(Sampler[int]):
    num_replicas, rank = 2, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 16, 2))


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ([2 * part for part in batch] for batch in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(points(), sampler=PartOfARank()), "PartOfARank gives a rank only its part"),
        (
            DataLoader(points(), batch_sampler=BatchSampler(PartOfARank(), 4, False)),
            "PartOfARank gives a rank only its part",
        ),
        (Doubling(points(), batch_size=4), "Doubling has its own __iter__"),
        (DataLoader(points(), batch_size=32, drop_last=True), "drop_last=True leaves no step"),
    ],
)
def test_a_loader_that_cannot_be_shared_out_is_refused_by_name(
    tmp_path: Path, loader: Any, named: str
) -> None:
    manager = manager_for(tmp_path)
    with pytest.raises(DataError, match=named):
        manager.setup_training(line(), loader, optimizer=sgd, loss_fn=squares)


def test_a_batch_sampler_keeps_its_size_and_a_loader_its_drop_last(tmp_path: Path) -> None:
    distributed = DistributedSampler(points(18), 2, 1, shuffle=False)
    for loader, sizes in (
        (DataLoader(points(18), batch_sampler=BatchSampler(range(18), 5, False)), [5, 5, 5, 3]),
        (DataLoader(points(18), batch_sampler=BatchSampler(range(18), 5, True)), [5, 5, 5]),
        (DataLoader(points(18), batch_sampler=BatchSampler(distributed, 8, False)), [8, 8, 2]),
        (DataLoader(points(18), batch_size=8, drop_last=True), [8, 8]),
        (DataLoader(points(18), batch_size=None), [1] * 18),
    ):
        manager = manager_for(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, ours, _ = manager.setup_training(line(), loader, optimizer=sgd, loss_fn=squares)
            found = [len(torch.atleast_2d(batch[0])) for batch in ours]
        assert found == sizes and ours.steps == len(sizes) == len(ours)
        manager.finish()


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((torch.tensor(0.5), torch.ones(6, 3), torch.ones(6)), 6),
        ((torch.ones(1), torch.ones(6, 3), torch.ones(6)), 6),
        ((torch.ones(9, 6, 3), torch.ones(6)), 6),  # time-major
        ((torch.ones(9, 6), torch.ones(7, 6)), 6),
        ({"name": ["a"] * 6, "x": torch.ones(6, 3), "on": True}, 6),
        (([torch.ones(3, 8, 8)] * 6, [{"boxes": torch.ones(n, 4)} for n in range(6)]), 6),
        ([(torch.ones(3, 8, 8), torch.tensor(1))] * 6, 6),
        ([[torch.ones(6, 3), torch.ones(6)], torch.ones(6)], 6),
        (type("Graphs", (), {"num_graphs": 6, "x": torch.ones(40, 3)})(), 6),
        ((torch.ones(0, 3), torch.ones(0)), 0),
        ((torch.ones(6, 3), torch.ones(5, 5)), None),
        ({"x": torch.ones(40, 3), "edges": torch.ones(2, 90), "y": torch.ones(6)}, None),
        (([torch.ones(3, 8, 8)] * 6, [torch.tensor(1)] * 6), None),
    ],
)
def test_samples_of_a_batch_are_seen_or_refused(batch: Any, count: int | None) -> None:
    from multi_gpu_training.data.sample_count import sample_count

    if count is not None:
        assert sample_count(batch) == count
        return
    with pytest.raises(DataError, match="batch_size_fn"):
        sample_count(batch)
    assert sample_count(batch, lambda batch: 6) == 6


def test_an_own_batch_whose_samples_cannot_be_counted_is_refused_where_it_matters(
    tmp_path: Path,
) -> None:
    inputs, targets = points().tensors

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return squares(model, batch[1:])

    for accumulation, count in ((1, None), (2, None), (2, lambda batch: len(batch[1]))):
        manager = manager_for(tmp_path, gradient_accumulation_steps=accumulation)
        manager.setup_training(
            line(), points(), loss_fn=loss_fn, optimizer=sgd, batch_size_fn=count
        )
        batch = (torch.eye(5), inputs, targets)
        if accumulation == 2 and count is None:
            with pytest.raises(DataError, match=r"\(5, 5\), \(16, 4\), \(16, 1\)"):
                manager.trainer.train_step(batch)
        else:
            moved = [manager.trainer.train_step(batch).moved for _ in range(2)]
            assert moved == ([True, True] if accumulation == 1 else [False, True])
        manager.finish()


class Blocks(Sampler[list[int]]):
    """A batch sampler without a batch_size to be seen."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return -(-16 // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(16))
        yield from (order[i : i + self.size] for i in range(0, 16, self.size))


def resume_blocks(folder: Path, size: int, resume: bool, **settings: Any) -> Any:
    seen: list[int] = []
    rows = {float(x[0]): i for i, x in enumerate(points().tensors[0])}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(rows[float(x[0])] for x in batch[0])
        return squares(model, batch)

    manager = manager_for(
        folder,
        run_name="blocks",
        enable_fault_tolerance=True,
        training_mode="single",
        resume="auto" if resume else None,
        max_steps=None if resume else 3,
        **settings,
    )
    manager.fit(
        line(), DataLoader(points(), batch_sampler=Blocks(size)), loss_fn=loss_fn, optimizer=sgd
    )
    return seen


def test_the_place_in_a_batch_samplers_epoch_is_not_rescaled(tmp_path: Path) -> None:
    assert resume_blocks(tmp_path, 4, False, global_batch_size=8) == list(range(12))
    assert resume_blocks(tmp_path, 4, True, global_batch_size=12) == list(range(12, 16))


def test_another_batch_sampler_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    resume_blocks(tmp_path, 4, False)
    with pytest.raises(ConfigError, match="step 3 of an epoch of 4 batches"):
        resume_blocks(tmp_path, 2, True)


class Wrapped:
    """As tqdm wraps a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def train_own_loader(folder: Path, kind: str, frequency: int) -> tuple[int, Tensor]:
    """The seventh batch of the second epoch is NaN, the first time."""
    failed = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        bad = manager.step == 10 and not failed
        failed.extend([1] if bad else [])
        return squares(model, batch) * (math.nan if bad else 1.0)

    manager = manager_for(
        folder,
        run_name=f"{kind}-{frequency}",
        enable_fault_tolerance=True,
        on_nonfinite="rollback",
        checkpoint_frequency=frequency,
        batch_size=2,
        training_mode="single",
        epochs=2,
        shuffle=False,
    )
    model, loader, _ = manager.setup_training(line(), points(), loss_fn=loss_fn, optimizer=sgd)
    kinds = {
        "ours": lambda: loader,
        "wrapped": lambda: Wrapped(loader),
        "own": lambda: DataLoader(points(), batch_size=2),
        "iterator": lambda: iter(DataLoader(points(), batch_size=2)),
    }
    try:
        for epoch in range(2):
            manager.train_epoch(kinds[kind](), epoch)
    finally:
        manager.finish()
    return manager.step, flat(model)


def test_a_rollback_takes_up_an_own_loader_where_it_can_and_says_where_it_cannot(
    tmp_path: Path,
) -> None:
    steps, by_steps = train_own_loader(tmp_path, "ours", 3)
    assert train_own_loader(tmp_path, "wrapped", 3)[0] == steps
    assert torch.equal(train_own_loader(tmp_path, "wrapped", 3 + 1000)[1], by_steps)
    assert train_own_loader(tmp_path, "own", 1000)[0] == 16
    with pytest.raises(CheckpointError, match="step 9 was saved in the middle of an epoch"):
        train_own_loader(tmp_path, "own", 3)
    with pytest.raises(CheckpointError, match="was given an iterator"):
        train_own_loader(tmp_path, "iterator", 1000)


def test_an_epoch_that_max_steps_cut_short_goes_on_behind_a_wrapper(tmp_path: Path) -> None:
    for steps, resume in ((3, None), (5, "auto")):
        manager = manager_for(
            tmp_path,
            run_name="cut",
            enable_fault_tolerance=True,
            batch_size=2,
            training_mode="single",
            max_steps=steps,
            resume=resume,
        )
        seen: list[int] = []
        _, loader, _ = manager.setup_training(
            line(), points(), optimizer=sgd, loss_fn=squares, callbacks=[]
        )

        def watched(loader: Any = loader, seen: list[int] = seen) -> Iterator[Any]:
            for batch in loader:
                seen.append(batch._mgt_share.position)
                yield batch

        manager.train_epoch(watched(), 0)
        manager.finish()
        state = manager.trainer.state
        assert (state.epoch, state.position) == (0, steps)
        assert seen == ([0, 1, 2] if resume is None else [3, 4])


def own_loop(folder: Path, steps: int, own_backward: bool, stream: bool) -> list[list[float]]:
    """Train up to `steps`, as the documentation writes it; the samples of each step."""
    data: Any = Stream() if stream else points(13)
    manager = manager_for(folder, batch_size=4, run_name="run", resume="auto", max_steps=steps)
    model, seen = line(), []
    if own_backward:
        trainer = manager.prepare(model, sgd(model.parameters()), dataset=data)
    else:
        manager.setup_training(model, data, loss_fn=squares, optimizer=sgd)
    while not manager.should_stop:
        for batch in manager.train_loader:
            seen.append(batch[1].flatten().tolist())
            if own_backward:
                with trainer.step(batch) as (x, y):
                    trainer.backward((model(x) - y).square().mean())
            else:
                manager.trainer.train_step(batch)
            if manager.should_stop:
                break
    manager.save_checkpoint()
    manager.finish()
    return seen


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*points(13).tensors, strict=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own_backward", [False, True])
def test_an_own_loop_that_max_steps_ended_goes_on_inside_its_epoch(
    tmp_path: Path, own_backward: bool, stream: bool
) -> None:
    whole = own_loop(tmp_path / "whole", 9, own_backward, stream)
    parts = [own_loop(tmp_path / "parts", steps, own_backward, stream) for steps in (2, 7, 9)]
    assert [len(part) for part in parts] == [2, 5, 2]
    assert [samples for part in parts for samples in part] == whole


def test_a_stream_read_here_leaves_the_global_generators_alone(tmp_path: Path) -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from points()

    manager = manager_for(tmp_path, global_batch_size=4)
    _, loader, _ = manager.setup_training(line(), Numbers(), optimizer=sgd, loss_fn=squares)
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    torch.manual_seed(5)
    assert [float(torch.rand(())) for _ in loader] == expected
    manager.finish()
