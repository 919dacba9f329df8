"""How much at a time and from where: batch sizes, epochs, workers, order."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import flat, fork_workers, line, manager_for, points, sgd, squares, watching
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from multi_gpu_training import Callback, MultiGPUTrainingManager


class Steps(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[int] = []

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.steps.append(step)

    def on_epoch_end(self, manager: MultiGPUTrainingManager, epoch: int, metrics: Any) -> None:
        self.epochs.append(epoch)


def train_sizes(folder: Path, settings: dict[str, Any], samples: int = 16) -> dict[str, Any]:
    """Sizes of the micro-batches that this rank computed, and the steps that were taken."""
    sizes: list[int] = []
    hook, model = Steps(), line()
    loss_fn = watching(lambda _, batch: len(batch[0]), sizes)
    manager = manager_for(folder, **settings)
    manager.fit(model, points(samples), loss_fn=loss_fn, optimizer=sgd, callbacks=[hook])
    return {"sizes": sizes, "steps": hook.steps, "epochs": hook.epochs, "weights": flat(model)}


def test_batch_size_is_what_a_rank_computes_at_a_time(tmp_path: Path) -> None:
    for size, steps in ((2, 4), (4, 2)):
        for got in run_ranks(2, train_sizes, tmp_path, {"batch_size": size}):
            assert got["sizes"] == [size] * steps
            assert len(got["steps"]) == steps


def test_global_batch_size_is_kept_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone = run_ranks(1, train_sizes, tmp_path, {"global_batch_size": 8})[0]
    assert alone["sizes"] == [8, 8]
    for got in run_ranks(2, train_sizes, tmp_path, {"global_batch_size": 8}):
        assert got["sizes"] == [4, 4]
        assert len(got["steps"]) == 2
        assert torch.allclose(got["weights"], alone["weights"], rtol=0, atol=1e-6)


def test_global_batch_size_keeps_to_what_a_gpu_may_hold(tmp_path: Path) -> None:
    settings = {"global_batch_size": 16, "batch_size": 3}
    for got in run_ranks(2, train_sizes, tmp_path, settings):
        assert max(got["sizes"]) <= 3 and sum(got["sizes"]) == 8
        assert len(got["steps"]) == 1


def test_gradient_accumulation_steps_make_one_step(tmp_path: Path) -> None:
    whole = run_ranks(1, train_sizes, tmp_path, {"batch_size": 8})[0]
    parts = {"batch_size": 2, "gradient_accumulation_steps": 4}
    got = run_ranks(1, train_sizes, tmp_path, parts)[0]
    assert got["sizes"] == [2] * 8 and len(got["steps"]) == 2
    # The same sums in another order: float32 rounds at 6e-8.
    assert torch.allclose(got["weights"], whole["weights"], rtol=0, atol=1e-6)


def step_by_hand(folder: Path, accumulation: int) -> list[bool]:
    manager = manager_for(folder, gradient_accumulation_steps=accumulation)
    manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    inputs, targets = points().tensors
    own = [(inputs[i : i + 2], targets[i : i + 2]) for i in range(0, 12, 2)]
    return [manager.trainer.train_step(batch).moved for batch in own]


def test_gradient_accumulation_steps_count_own_batches(tmp_path: Path) -> None:
    assert run_ranks(1, step_by_hand, tmp_path, 3)[0] == [False, False, True] * 2


def test_epochs_says_how_often_the_data_are_seen(tmp_path: Path) -> None:
    for epochs in (1, 3):
        got = run_ranks(1, train_sizes, tmp_path, {"batch_size": 8, "epochs": epochs})[0]
        assert got["epochs"] == list(range(epochs))
        assert sum(got["sizes"]) == 16 * epochs


def test_max_steps_ends_a_run_inside_an_epoch(tmp_path: Path) -> None:
    settings = {"batch_size": 2, "epochs": 5, "max_steps": 11}
    for got in run_ranks(2, train_sizes, tmp_path, settings):
        assert got["steps"] == list(range(1, 12))


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that never ends, and remembers how much of it was drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Any:
        inputs, targets = points().tensors
        while True:
            yield inputs[self.drawn % 16], targets[self.drawn % 16]
            self.drawn += 1


def train_stream(folder: Path, settings: dict[str, Any]) -> tuple[list[int], list[int], int]:
    dataset, hook = Endless(), Steps()
    manager = manager_for(folder, batch_size=2, **settings)
    manager.fit(line(), dataset, optimizer=sgd, callbacks=[hook])
    return hook.steps, hook.epochs, dataset.drawn


def test_steps_per_epoch_gives_an_endless_stream_epochs(tmp_path: Path) -> None:
    settings = {"epochs": 3, "steps_per_epoch": 4}
    for steps, epochs, drawn in run_ranks(2, train_stream, tmp_path, settings, timeout_s=30):
        assert steps == list(range(1, 13)) and epochs == [0, 1, 2]
        # 12 steps of 2 x 2 samples; a batch more may be read ahead, never the stream.
        assert 47 <= drawn <= 52


def train_on(folder: Path, settings: dict[str, Any]) -> list[int]:
    hook = Steps()
    kept = {"enable_fault_tolerance": True, "run_name": "stream", "batch_size": 2}
    manager_for(folder, **kept, **settings).fit(line(), Endless(), optimizer=sgd, callbacks=[hook])
    return hook.steps


def test_max_steps_can_be_raised_for_a_stream(tmp_path: Path) -> None:
    assert run_ranks(1, train_on, tmp_path, {"max_steps": 3}) == [[1, 2, 3]]
    further = {"max_steps": 6, "resume": "auto"}
    assert run_ranks(1, train_on, tmp_path, further) == [[4, 5, 6]]


class Places(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Each sample says which process read it; `read` counts over all processes."""

    def __init__(self, samples: int = 16) -> None:
        self.inputs, self.targets = points(samples).tensors
        self.read = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        self.read += 1
        return self.inputs[index], torch.tensor(os.getpid()), self.targets[index]


def where(model: nn.Module, batch: list[Tensor]) -> set[int]:
    return set(batch[1].tolist())


def readers(
    folder: Path, settings: dict[str, Any], brought: dict[str, Any] | None = None
) -> tuple[int, list[set[int]]]:
    """This process, and the processes that read each epoch's samples."""
    fork_workers()
    manager = manager_for(folder, batch_size=2, **settings)
    data = Places() if brought is None else DataLoader(Places(), batch_size=2, **brought)
    _, loader, _ = manager.setup_training(line(), data, optimizer=sgd)
    return os.getpid(), [set().union(*(where(line(), b) for b in loader)) for _ in range(2)]


def test_num_workers_read_the_samples_in_processes_of_their_own(tmp_path: Path) -> None:
    own, epochs = run_ranks(1, readers, tmp_path, {})[0]
    assert epochs == [{own}, {own}]
    own, epochs = run_ranks(1, readers, tmp_path, {"num_workers": 2})[0]
    assert all(len(pids) == 2 and own not in pids for pids in epochs)


def test_persistent_workers_stay_from_epoch_to_epoch(tmp_path: Path) -> None:
    _, (first, second) = run_ranks(1, readers, tmp_path, {"num_workers": 1})[0]
    assert first.isdisjoint(second)
    staying = {"num_workers": 1, "persistent_workers": True}
    _, (first, second) = run_ranks(1, readers, tmp_path, staying)[0]
    assert first == second


def test_persistent_workers_of_a_brought_loader_stay(tmp_path: Path) -> None:
    brought = {"num_workers": 1, "persistent_workers": True}
    _, (first, second) = run_ranks(1, readers, tmp_path, {}, brought)[0]
    assert first == second


def read_ahead(folder: Path, factor: int, expected: int) -> int:
    """How many batches are read, once the first is taken and the workers rest."""
    fork_workers()
    dataset = Places(32)
    manager = manager_for(folder, batch_size=1, num_workers=1, prefetch_factor=factor)
    _, loader, _ = manager.setup_training(line(), dataset, optimizer=sgd)
    iterator = iter(loader)
    next(iterator)
    deadline = time.monotonic() + 20
    while int(dataset.read) < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    return int(dataset.read)


def test_prefetch_factor_says_how_many_batches_are_read_ahead(tmp_path: Path) -> None:
    for factor in (1, 5):
        # One that training computes on, and `factor` that wait.
        assert run_ranks(1, read_ahead, tmp_path, factor, factor + 1) == [factor + 1]


def order(folder: Path, settings: dict[str, Any]) -> list[list[int]]:
    """The indices of each epoch's samples, in the order in which training sees them."""
    known = {float(value): i for i, value in enumerate(points().tensors[0][:, 0])}
    manager = manager_for(folder, batch_size=4, **settings)
    _, loader, _ = manager.setup_training(line(), points(), optimizer=sgd)
    return [[known[float(v)] for batch in loader for v in batch[0][:, 0]] for _ in range(2)]


def test_shuffle_mixes_the_samples_anew_each_epoch(tmp_path: Path) -> None:
    ordered = list(range(16))
    assert run_ranks(1, order, tmp_path, {"shuffle": False})[0] == [ordered, ordered]
    first, second = run_ranks(1, order, tmp_path, {})[0]
    assert sorted(first) == sorted(second) == ordered
    assert ordered != first != second != ordered


class Pinnable:
    """A batch that knows whether the loader has pinned it."""

    def __init__(self, samples: list[Any]) -> None:
        self.parts = [torch.stack(column) for column in zip(*samples, strict=True)]
        self.pinned = False

    def pin_memory(self) -> Pinnable:
        self.parts = [part.pin_memory() for part in self.parts]
        self.pinned = all(part.is_pinned() for part in self.parts)
        return self

    def to(self, device: torch.device) -> Pinnable:
        self.parts = [part.to(device, non_blocking=True) for part in self.parts]
        return self


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [True, False])
def test_pin_memory_pins_what_is_copied_to_the_gpu(tmp_path: Path, wanted: bool) -> None:
    pinned: list[bool] = []

    def loss_fn(model: nn.Module, batch: Pinnable) -> Tensor:
        pinned.append(batch.pinned)
        assert batch.parts[0].is_cuda
        return squares(model, batch.parts)

    loader = DataLoader(points(), batch_size=4, collate_fn=Pinnable)
    manager = manager_for(tmp_path, training_mode="single", device="cuda", pin_memory=wanted)
    manager.fit(line(), loader, loss_fn=loss_fn, optimizer=sgd)
    assert pinned == [wanted] * 4


def train_unequal(folder: Path, settings: dict[str, Any]) -> list[int]:
    """Sizes of the shares of a run in which rank 1 takes four times as long a sample."""
    sizes: list[int] = []
    manager = manager_for(folder, batch_size=8, **settings)
    sample_s = (1e-3, 4e-3)[manager.placement.dp_rank]

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        sizes.append(len(batch[0]))
        time.sleep(sample_s * len(batch[0]))
        return squares(model, batch)

    manager.fit(line(), points(32), loss_fn=loss_fn, optimizer=sgd)
    return sizes[-2:]


def test_balance_gives_a_slow_rank_less(tmp_path: Path) -> None:
    for settings in ({}, {"balance": "equal"}):  # auto: ranks without GPUs are taken as equal
        assert run_ranks(2, train_unequal, tmp_path, settings) == [[8, 8], [8, 8]]
    fast, slow = run_ranks(2, train_unequal, tmp_path, {"balance": "measured"})
    assert fast[0] > 2 * slow[0] and fast[0] + slow[0] == 16


def test_share_weights_say_how_much_each_rank_computes(tmp_path: Path) -> None:
    given = {"share_weights": [3, 1]}
    assert run_ranks(2, train_unequal, tmp_path, given) == [[12, 12], [4, 4]]
