"""Any DataLoader and any loop, on one to four ranks, against the same loop in plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from training import CLASSES, FEATURES, data, difference, manager_for, mlp, sgd

from multi_gpu_training.errors import DataError

DTYPE = torch.float64
SAMPLES = 50
WORLDS = (1, 2, 3, 4)


class Listed(Sampler[int]):
    """Gives the same samples in the same order in every pass."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Uneven(Sampler[list[int]]):
    """A batch sampler whose batches have 7, 1, 40 and 2 samples."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in (7, 1, 40, 2):
            yield list(range(start, start + size))
            start += size


class ReadyBatches(Dataset[tuple[Tensor, Tensor]]):
    """Every item is a batch, of another size each."""

    def __init__(self, pooled: bool = False) -> None:
        self.inputs, self.targets = data(DTYPE, SAMPLES).tensors
        self.pooled = pooled  # items without a row per sample

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        mine = slice(index * 10, index * 10 + 10 - index)
        if self.pooled:
            return self.inputs[index], self.targets[index]
        return self.inputs[mine], self.targets[mine]


class ReadyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        items = ReadyBatches()
        yield from (items[index] for index in range(len(items)))


class Samples(IterableDataset[Any]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from data(DTYPE, self.samples)


def time_major(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """A scalar first, then inputs of (features, batch)."""
    inputs, targets = zip(*samples, strict=True)
    return torch.tensor(1.0, dtype=DTYPE), torch.stack(inputs, 1), torch.stack(targets)


def training_loaders() -> dict[str, DataLoader[Any]]:
    dataset = data(DTYPE, SAMPLES)
    backwards = list(range(SAMPLES))[::-1]
    return {
        "in order": DataLoader(dataset, batch_size=12),
        "drop_last": DataLoader(dataset, batch_size=12, drop_last=True),
        "sampler": DataLoader(dataset, batch_size=12, sampler=Listed(backwards), drop_last=True),
        "part": DataLoader(dataset, batch_size=12, sampler=SequentialSampler(range(31))),
        "BatchSampler": DataLoader(
            dataset, batch_sampler=BatchSampler(Listed(backwards), 9, drop_last=True)
        ),
        "batch sampler": DataLoader(dataset, batch_sampler=Uneven()),
        "items": DataLoader(ReadyBatches(), batch_size=None),
        "whole items": DataLoader(ReadyBatches(pooled=True), batch_size=None),
        "bulk items": DataLoader(
            dataset, batch_size=None, sampler=BatchSampler(Listed(backwards), 9, drop_last=False)
        ),
        "stream of items": DataLoader(ReadyStream(), batch_size=None),
        "stream, drop_last": DataLoader(Samples(), batch_size=12, drop_last=True),
        "time-major": DataLoader(dataset, batch_size=12, collate_fn=time_major),
    }


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    *scalar, inputs, target = batch
    if scalar:
        inputs = inputs.T
    if target.ndim == 0:
        inputs, target = inputs[None], target[None]
    return F.cross_entropy(model(inputs), target)


def by_hand(batches: Callable[[int], Any], epochs: int = 2) -> dict[str, Tensor]:
    """The plain loop; `batches(epoch)` gives what it trains on."""
    model = mlp().to(DTYPE)
    optimizer = sgd(model.parameters())
    for epoch in range(epochs):
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    return model.state_dict()


def same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> bool:
    return max(difference(ours, reference).values()) <= 1e-12


def sized(name: str) -> dict[str, Any]:
    """Those with their own batches need no size: each is one step on any number of ranks."""
    own = {"BatchSampler", "batch sampler", "items", "whole items", "bulk items", "stream of items"}
    return {} if name in own else {"global_batch_size": 12}


def train_loaders(folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, loader in training_loaders().items():
        for accumulation in (1, 2) if name in ("in order", "batch sampler", "items") else (1,):
            model = mlp().to(DTYPE)
            manager = manager_for(
                folder, epochs=2, gradient_accumulation_steps=accumulation, **sized(name)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                manager.fit(model, loader, loss_fn=loss_fn, optimizer=sgd)
            found[f"{name}, {accumulation}"] = model.state_dict()
    return found


def test_every_kind_of_dataloader_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    loaders = training_loaders()
    references = {name: by_hand(lambda _, it=loader: it) for name, loader in loaders.items()}
    for world in WORLDS:
        for ours in run_ranks(world, train_loaders, tmp_path):
            wrong = [name for name in ours if not same(ours[name], references[name[:-3]])]
            assert not wrong, f"{world} ranks: {wrong}"


class Unseeded(Sampler[int]):
    """Makes a new generator in each pass: another order on every rank."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng().permutation(SAMPLES).tolist()


class Counting(Sampler[int]):
    """Shuffles by the number of its passes, as a plain loop goes through them."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from np.random.default_rng(self.passes).permutation(SAMPLES).tolist()


def train_drawn(folder: Path) -> tuple[dict[str, Tensor], str]:
    refused = ""
    loader = DataLoader(data(DTYPE, SAMPLES), batch_size=12, sampler=Counting())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mlp().to(DTYPE)
        manager_for(folder, epochs=2, global_batch_size=12).fit(
            model, loader, loss_fn=loss_fn, optimizer=sgd
        )
        manager = manager_for(folder, global_batch_size=12)
        loader = DataLoader(data(DTYPE, SAMPLES), sampler=Unseeded())
        if manager.placement.dp_size > 1:
            with pytest.raises(DataError) as error:
                manager.setup_training(mlp().to(DTYPE), loader, optimizer=sgd)
            refused = str(error.value)
    return model.state_dict(), refused


def test_ranks_that_draw_different_orders_are_refused(tmp_path: Path) -> None:
    loader = DataLoader(data(DTYPE, SAMPLES), batch_size=12, sampler=Counting())
    reference = by_hand(lambda _: loader)
    for world in (1, 2):
        for ours, refused in run_ranks(world, train_drawn, tmp_path):
            assert same(ours, reference)
            assert world == 1 or "Unseeded draws 2 different orders on 2 ranks" in refused


# Validation


def validation_loaders() -> dict[str, DataLoader[Any]]:
    dataset = data(DTYPE, SAMPLES)
    part = list(range(5, 28))
    some = WeightedRandomSampler(
        [1.0] * SAMPLES, 20, generator=torch.Generator().manual_seed(3), replacement=False
    )
    return {
        "all": DataLoader(dataset, batch_size=4),
        "subset": DataLoader(dataset, batch_size=4, sampler=SubsetRandomSampler(part)),
        "listed": DataLoader(dataset, batch_size=4, sampler=Listed([3, 3, 9, 40])),
        "part": DataLoader(dataset, sampler=SequentialSampler(range(13))),
        "batch sampler": DataLoader(dataset, batch_sampler=BatchSampler(Listed(part), 5, True)),
        "own batches": DataLoader(dataset, batch_sampler=Uneven()),
        "drop_last": DataLoader(dataset, batch_size=12, drop_last=True),
        "distributed": DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 0)),
        "items": DataLoader(ReadyBatches(), batch_size=None),
        "stream": DataLoader(Samples(), batch_size=12, drop_last=True),
        "drawn": DataLoader(dataset, batch_size=4, sampler=some),
    }


def validate_all(folder: Path) -> dict[str, tuple[float, list[int]]]:
    found = {}
    labels = data(DTYPE, SAMPLES).tensors[0][:, 0].tolist()
    for name, loader in validation_loaders().items():
        seen: list[int] = []

        def eval_fn(model: nn.Module, batch: Any, metrics: Any, seen: list[int] = seen) -> None:
            inputs, targets = batch
            total = F.cross_entropy(model(inputs), targets, reduction="sum")
            metrics.add("loss", total, len(targets))
            seen += [labels.index(value) for value in inputs[:, 0].tolist()]

        manager = manager_for(folder, epochs=1, global_batch_size=12)
        manager.setup_training(
            mlp().to(DTYPE), data(DTYPE, 12), loader, optimizer=sgd, eval_fn=eval_fn
        )
        first = manager.validate_epoch()
        seen.clear()
        again = manager.validate_epoch()
        assert first == again
        found[name] = again["loss"], seen
        manager.finish()
    return found


def test_validation_sees_the_samples_that_the_loaders_sampler_gives(tmp_path: Path) -> None:
    inputs, targets = data(DTYPE, SAMPLES).tensors
    expected = {
        "all": list(range(SAMPLES)),
        "subset": list(range(5, 28)),
        "listed": [3, 3, 9, 40],
        "part": list(range(13)),
        "batch sampler": list(range(5, 25)),
        "own batches": list(range(SAMPLES)),
        "drop_last": list(range(48)),
        "distributed": list(range(SAMPLES)),
        "items": [10 * i + k for i in range(5) for k in range(10 - i)],
        "stream": list(range(48)),
    }
    with torch.no_grad():
        each = F.cross_entropy(mlp().to(DTYPE)(inputs), targets, reduction="none")
    drawn = None
    for world in WORLDS:
        ranks = run_ranks(world, validate_all, tmp_path)
        for name, samples in expected.items():
            assert sorted(i for rank in ranks for i in rank[name][1]) == samples, (world, name)
            for rank in ranks:
                assert rank[name][0] == pytest.approx(float(each[samples].mean()), rel=1e-12)
        here = sorted(i for rank in ranks for i in rank["drawn"][1])
        drawn = drawn or here
        assert here == drawn and len(set(here)) == 20


def nothing_counts(folder: Path) -> dict[str, float]:
    """Only samples 0 and 5 have a label."""
    inputs, targets = data(DTYPE, 12).tensors
    targets = targets.where(torch.arange(12) % 5 == 0, -100)[:8]
    dataset = torch.utils.data.TensorDataset(inputs[:8], targets)
    results = {}
    for name, loss in (("default", None), ("own", lambda m, b: weighted(m, b))):
        manager = manager_for(folder, epochs=1, global_batch_size=4)
        manager.setup_training(mlp().to(DTYPE), data(DTYPE, 12), dataset, loss_fn=loss)
        results[name] = manager.validate_epoch()["loss"]
        manager.finish()
    return results


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(batch[0]), batch[1]), (batch[1] != -100).sum()


def test_a_share_of_a_validation_in_which_nothing_counts_is_left_out(tmp_path: Path) -> None:
    inputs, targets = data(DTYPE, 12).tensors
    with torch.no_grad():
        loss = float(F.cross_entropy(mlp().to(DTYPE)(inputs[[0, 5]]), targets[[0, 5]]))
    for world in WORLDS:
        for found in run_ranks(world, nothing_counts, tmp_path):
            assert found["default"] == pytest.approx(loss, rel=1e-12), world
            assert found["own"] == pytest.approx(loss, rel=1e-12), world


# Loops


def unpacked(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        pair = x, y
        yield pair


def on_the_device(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield [part.to("cpu") for part in batch]


def changed(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        yield x * 2, y.clone()


def as_dict(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        yield {"y": y + 0, "x": x + 0, "temperature": torch.ones(1)}


def filtered(loader: Any) -> Iterator[Any]:
    """Other numbers of samples than the loader gave."""
    for x, y in loader:
        kept = x[:, 0] < 1.0
        yield x[kept], y[kept]


def kept_in_a_list(loader: Any) -> Iterator[Any]:
    yield from [(x, y) for x, y in loader]


LOOPS = {
    f.__name__: f for f in (unpacked, on_the_device, changed, as_dict, filtered, kept_in_a_list)
}


def dict_loss(model: nn.Module, batch: Any) -> Tensor:
    batch = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return loss_fn(model, batch)


def train_loops(folder: Path) -> dict[str, tuple[dict[str, Tensor], int]]:
    found = {}
    for name, loop in LOOPS.items():
        for settings in ({}, {"batch_size": 2}):
            model = mlp().to(DTYPE)
            manager = manager_for(folder, global_batch_size=12, shuffle=False, **settings)
            _, loader, _ = manager.setup_training(
                model, data(DTYPE, SAMPLES), optimizer=sgd, loss_fn=dict_loss
            )
            for _ in range(2):
                for batch in loop(loader):
                    manager.trainer.train_step(batch)
            found[f"{name} {settings}"] = model.state_dict(), manager.step
            manager.finish()
    return found


def test_a_loop_may_unpack_move_and_change_its_batches(tmp_path: Path) -> None:
    loader = DataLoader(data(DTYPE, SAMPLES), batch_size=12)

    def reference(loop: Any) -> dict[str, Tensor]:
        return by_hand(lambda _: [b for b in map(as_pair, loop(loader)) if len(b[0])])

    references = {name: reference(loop) for name, loop in LOOPS.items()}
    for world in WORLDS:
        for ours in run_ranks(world, train_loops, tmp_path):
            for name, (weights, steps) in ours.items():
                assert steps == 10, (world, name)
                assert same(weights, references[name.split()[0]]), (world, name)


def as_pair(batch: Any) -> Any:
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


def train_with_breaks(folder: Path, resume: bool) -> Any:
    """Three batches of each epoch; looking at one before does not use up an epoch."""
    seen: list[list[float]] = []

    def watching(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            seen[-1] += batch[0][:, 0].tolist()
        return loss_fn(model, batch)

    manager = manager_for(
        folder,
        global_batch_size=12,
        run_name="breaks",
        enable_fault_tolerance=True,
        resume="auto" if resume else None,
    )
    model = mlp().to(DTYPE)
    _, loader, _ = manager.setup_training(
        model, data(DTYPE, SAMPLES), loss_fn=watching, optimizer=sgd
    )
    next(iter(loader))
    for epoch in range(manager.trainer.epoch, 4 if resume else 2):
        seen.append([])
        for number, (x, y) in enumerate(loader):
            manager.trainer.train_step((x, y))
            if number == 2:
                break
        if epoch == 1:
            manager.save_checkpoint()
    manager.finish()
    return seen, manager.step, model.state_dict()


def test_an_epoch_that_a_loop_breaks_off_is_followed_by_another_one(tmp_path: Path) -> None:
    from multi_gpu_training.data.order import ShuffledBatches

    inputs = data(DTYPE, SAMPLES).tensors[0]
    order = [
        [i for batch in list(ShuffledBatches(SAMPLES, 12).batches(0, epoch))[:3] for i in batch]
        for epoch in range(4)
    ]
    for world in (1, 2):
        before = run_ranks(world, train_with_breaks, tmp_path / str(world), False)
        after = run_ranks(world, train_with_breaks, tmp_path / str(world), True)
        for epoch in range(4):
            ranks = before if epoch < 2 else after
            found = [v for rank in ranks for v in rank[0][epoch % 2]]
            assert sorted(found) == sorted(inputs[order[epoch], 0].tolist()), (world, epoch)
        assert all(rank[1] == 12 for rank in after)


def first_batches(folder: Path, resume: bool) -> list[list[float]]:
    """Two steps, each on the first batch of a pass that is left before it is trained on."""
    manager = manager_for(
        folder,
        global_batch_size=12,
        run_name="first",
        enable_fault_tolerance=True,
        resume="auto" if resume else None,
    )
    _, loader, _ = manager.setup_training(
        mlp().to(DTYPE), data(DTYPE, SAMPLES), loss_fn=loss_fn, optimizer=sgd
    )
    seen = []
    for _ in range(2):
        x, y = next(iter(loader))
        seen.append(x[:, 0].tolist())
        manager.trainer.train_step((x, y))
    manager.save_checkpoint()
    manager.finish()
    return seen


def test_a_batch_of_each_pass_is_one_of_each_epoch(tmp_path: Path) -> None:
    from multi_gpu_training.data.order import ShuffledBatches

    inputs = data(DTYPE, SAMPLES).tensors[0]
    for world in (1, 2):
        runs = [
            run_ranks(world, first_batches, tmp_path / str(world), later) for later in (False, True)
        ]
        for epoch in range(4):
            first = next(iter(ShuffledBatches(SAMPLES, 12).batches(0, epoch)))
            found = [v for rank in runs[epoch // 2] for v in rank[epoch % 2]]
            assert sorted(found) == sorted(inputs[first, 0].tolist()), (world, epoch)


# Streams and randomness


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.norm(inputs))


def as_numbers(batch: Any, random: Any) -> Any:
    """Turns whole numbers into what the model takes; without it the model refuses them."""
    inputs, targets = batch
    return inputs.to(DTYPE) / 8 + random.uniform(FEATURES), targets


def train_short(folder: Path) -> list[dict[str, Tensor]]:
    """Two or three samples for four ranks, which must all run the model."""
    found = []
    for samples, augment in ((2, False), (3, True)):
        inputs, targets = data(DTYPE, samples).tensors
        stream: Any = Samples(samples)
        if augment:
            stream = torch.utils.data.TensorDataset((inputs * 8).long(), targets)
        model = Normed().to(DTYPE)
        manager = manager_for(folder, global_batch_size=4, sync_bn=True)
        manager.fit(model, stream, optimizer=sgd, augment=as_numbers if augment else None)
        found.append(model.state_dict())
    return found


def test_fewer_samples_than_ranks_under_synchronised_batchnorm(tmp_path: Path) -> None:
    references = run_ranks(1, train_short, tmp_path)[0]
    for world in (2, 4):
        for ours in run_ranks(world, train_short, tmp_path, timeout_s=60):
            assert all(same(mine, theirs) for mine, theirs in zip(ours, references, strict=True))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from generators that it keeps, one of them in a transform."""

    class Jitter:
        def __init__(self) -> None:
            self.rng = torch.Generator()

        def __call__(self, x: Tensor) -> Tensor:
            return x + torch.randn(FEATURES, generator=self.rng, dtype=DTYPE)

    def __init__(self) -> None:
        self.inputs, self.targets = data(DTYPE, SAMPLES).tensors
        self.rng = np.random.default_rng()
        self.transform = [self.Jitter()]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.inputs[index] + float(self.rng.normal())
        return self.transform[0](x), self.targets[index]


class OneStream(IterableDataset[Any]):
    """Shuffles with its own generator, in training and validation alike."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        dataset = data(DTYPE, SAMPLES)
        for _ in range(SAMPLES):
            yield dataset[(int(self.rng.integers(SAMPLES)) + self.epoch) % SAMPLES]


def train_noisy(folder: Path) -> list[dict[str, Tensor]]:
    found = []
    stream = OneStream()
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (Noisy(), None, {}),
        (stream, stream, {"validate_every": 2}),
        (OneStream(), None, {}),
    ]
    for dataset, validation, settings in cases:
        model = mlp().to(DTYPE)
        manager = manager_for(folder, global_batch_size=12, **settings)
        manager.fit(model, dataset, validation, optimizer=sgd)
        found.append(model.state_dict())
    return found


def test_generators_that_a_dataset_keeps_draw_alike_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    reference = run_ranks(1, train_noisy, tmp_path)[0]
    assert same(reference[1], reference[2]), "validation changed what training read"
    for world in (2, 3):
        for ours in run_ranks(world, train_noisy, tmp_path):
            assert all(same(mine, theirs) for mine, theirs in zip(ours, reference, strict=True))


# Labels and own batches


def drop_labels(batch: Any, random: Any) -> Any:
    inputs, targets = batch
    return inputs, targets.where(random.uniform() < 0.6, -100)


def train_own(folder: Path) -> list[dict[str, Tensor]]:
    """Labels that augment takes away; batches of one's own with a scalar first, time-major."""
    found = []
    model = mlp().to(DTYPE)
    manager = manager_for(folder, global_batch_size=12)
    manager.fit(model, data(DTYPE, SAMPLES), optimizer=sgd, augment=drop_labels)
    found.append(model.state_dict())
    rank, ranks = manager.placement.dp_rank, manager.placement.dp_size
    mine = [slice(0, None)] if ranks == 1 else [slice(0, 40), slice(40, None)]
    inputs, targets = (tensor[mine[rank]] for tensor in data(DTYPE, SAMPLES).tensors)
    scalar = torch.tensor(1.0, dtype=DTYPE)
    for batch, count in (
        ((scalar, inputs.T.contiguous(), targets), None),
        ({"step": torch.ones(1), "x": inputs, "names": ["a"] * len(inputs), "y": targets}, None),
        ((scalar, inputs.T.contiguous(), torch.eye(3)[:, :2], targets), lambda b: len(b[-1])),
    ):
        model = mlp().to(DTYPE)
        manager = manager_for(folder)
        manager.setup_training(
            model, data(DTYPE, 4), loss_fn=own_loss, optimizer=sgd, batch_size_fn=count
        )
        for _ in range(3):
            manager.trainer.train_step(batch)
        manager.finish()
        found.append(model.state_dict())
    return found


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return F.cross_entropy(model(batch["x"]), batch["y"])
    return F.cross_entropy(model(batch[1].T), batch[-1])


def test_labels_and_samples_are_counted_as_the_loss_sees_them(tmp_path: Path) -> None:
    reference = run_ranks(1, train_own, tmp_path)[0]
    for ours in run_ranks(2, train_own, tmp_path):
        assert all(same(mine, theirs) for mine, theirs in zip(ours, reference, strict=True))
