"""Datasets and DataLoaders of PyTorch work as they are."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from multi_gpu_training import Callback, ConfigError, MultiGPUConfig, MultiGPUTrainingManager


def config(folder: Path, **settings: Any) -> MultiGPUConfig:
    defaults = {
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "epochs": 2,
        "enable_fault_tolerance": False,
    }
    return MultiGPUConfig(**{**defaults, **settings})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def tensors(samples: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3)


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def close(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> bool:
    return all(torch.allclose(ours[k], reference[k], rtol=1e-5, atol=1e-6) for k in reference)


class Stream(IterableDataset[tuple[Tensor, int]]):
    """Shuffles and augments at random, with torch's global generator."""

    def __init__(self, samples: int | None) -> None:
        self.samples = samples
        self.drawn = 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        number = 0
        while self.samples is None or number < self.samples:
            self.drawn += 1
            yield torch.randn(4), number % 3
            number += 1


def train_stream(folder: Path, samples: int | None, settings: dict[str, Any]) -> Any:
    net = model()
    stream = Stream(samples)
    manager = MultiGPUTrainingManager(config(folder, global_batch_size=8, **settings))
    result = manager.fit(net, stream, optimizer=sgd)
    return weights(net), result.steps, stream.drawn


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"gradient_accumulation_steps": 2}])
def test_a_stream_gives_the_same_result_on_any_number_of_ranks(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    reference, steps, _ = run_ranks(1, train_stream, tmp_path, 45, {})[0]
    assert steps == 12
    for world in (1, 2) if settings.get("num_workers") else (1, 2, 3):
        for ours, count, _ in run_ranks(world, train_stream, tmp_path, 45, settings):
            assert count == steps
            assert close(ours, reference)


def test_an_endless_stream_is_read_on_over_epochs(tmp_path: Path) -> None:
    for _, steps, drawn in run_ranks(
        2, train_stream, tmp_path, None, {"steps_per_epoch": 5, "epochs": 3}
    ):
        assert steps == 15
        assert drawn == 15 * 8  # nothing read twice, nothing read ahead


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.step:
            raise KeyError("stop")


def train_endless(folder: Path, name: str, stop: int | None, resume: str | None) -> Any:
    net = model()
    settings = config(
        folder,
        global_batch_size=8,
        steps_per_epoch=5,
        epochs=3,
        run_name=name,
        resume=resume,
        enable_fault_tolerance=True,
        checkpoint_frequency=1,
    )
    manager = MultiGPUTrainingManager(settings)
    try:
        hooks = [StopAt(stop)] if stop else []
        manager.fit(net, Stream(None), optimizer=sgd, callbacks=hooks)
    except KeyError:
        return None
    return weights(net)


@pytest.mark.parametrize("stop", [4, 6, 10])
def test_a_resumed_stream_goes_on_where_it_was(tmp_path: Path, stop: int) -> None:
    whole = run_ranks(2, train_endless, tmp_path, "whole", None, None)
    run_ranks(2, train_endless, tmp_path, "stopped", stop, None)
    resumed = run_ranks(2, train_endless, tmp_path, "stopped", None, "auto")
    for ours, reference in zip(resumed, whole, strict=True):
        assert all(torch.equal(ours[name], reference[name]) for name in reference)


class Heavy(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            yield torch.zeros(250_000), 0  # 1 MB


def train_heavy(folder: Path) -> int:
    net = nn.Linear(250_000, 2)
    manager = MultiGPUTrainingManager(
        config(folder, global_batch_size=4, steps_per_epoch=100, epochs=1)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    manager.fit(net, Heavy(), optimizer=sgd)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_an_endless_stream_trains_in_bounded_memory(tmp_path: Path) -> None:
    # 400 MB went through; two windows of 4 MB, the model and its gradient stay.
    assert run_ranks(1, train_heavy, tmp_path)[0] < 100_000


def train_loader(folder: Path, kind: str) -> Any:
    dataset = tensors()
    loaders = {
        "dataset": dataset,
        "shuffled": DataLoader(dataset, batch_size=12, shuffle=True),
        "collated": DataLoader(dataset, batch_size=12, shuffle=True, collate_fn=stack),
        "in-order": DataLoader(dataset, batch_size=12),
        "weighted": DataLoader(
            dataset, batch_size=12, sampler=WeightedRandomSampler([1.0] * 25 + [5.0] * 25, 50)
        ),
    }
    net = model()
    manager = MultiGPUTrainingManager(config(folder, global_batch_size=12))
    manager.fit(net, loaders[kind], optimizer=sgd)
    return weights(net)


def stack(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])


@pytest.mark.parametrize("kind", ["shuffled", "collated", "in-order", "weighted"])
def test_a_dataloader_gives_the_same_result_on_any_number_of_ranks(
    tmp_path: Path, kind: str
) -> None:
    reference = run_ranks(1, train_loader, tmp_path, kind)[0]
    for world in (2, 3):
        for ours in run_ranks(world, train_loader, tmp_path, kind):
            assert close(ours, reference)


def test_a_dataloader_means_what_its_dataset_means(tmp_path: Path) -> None:
    reference = run_ranks(1, train_loader, tmp_path, "dataset")[0]
    assert close(run_ranks(1, train_loader, tmp_path, "shuffled")[0], reference)
    assert not close(run_ranks(1, train_loader, tmp_path, "in-order")[0], reference)


def test_a_batch_of_the_loader_looks_as_it_was_collated(tmp_path: Path) -> None:
    class Named(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.ones(2) * index, "name": f"sample {index}"}

    manager = MultiGPUTrainingManager(config(tmp_path, batch_size=4))
    _, loader, nothing = manager.setup_training(
        model(), Named(), loss_fn=lambda m, b: m(torch.ones(1, 4)).sum()
    )
    assert nothing is None
    first = next(iter(loader))
    assert isinstance(first, dict) and first["x"].shape == (4, 2) and len(first["name"]) == 4
    assert len(loader) == 2
    manager.finish()


def own_batches(folder: Path, weighted: bool) -> Any:
    """A user who cuts batches from a rollout, of another size on every rank."""
    net = model()
    manager = MultiGPUTrainingManager(config(folder, gradient_accumulation_steps=2))
    manager.setup_training(net, tensors(), optimizer=sgd, loss_fn=None)
    inputs, targets = tensors().tensors
    rank, ranks = manager.placement.dp_rank, manager.placement.dp_size
    cuts = {1: [50], 2: [13, 37], 3: [3, 40, 7]}[ranks]
    start = sum(cuts[:rank])
    mine = slice(start, start + cuts[rank])
    inputs, targets = inputs[mine], targets[mine]
    half = len(inputs) // 2
    moved = []
    for _ in range(3):
        for part in (slice(0, half), slice(half, None)):
            moved.append(manager.trainer.train_step((inputs[part], targets[part])).moved)
    assert moved == [False, True] * 3
    manager.finish()
    return weights(net)


def test_own_batches_of_uneven_size_are_weighed_by_their_samples(tmp_path: Path) -> None:
    reference = run_ranks(1, own_batches, tmp_path, False)[0]
    for world in (2, 3):
        for ours in run_ranks(world, own_batches, tmp_path, False):
            assert close(ours, reference)


def test_a_stream_with_an_epoch_schedule_and_no_length_is_refused(tmp_path: Path) -> None:
    manager = MultiGPUTrainingManager(config(tmp_path, warmup_epochs=1))
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        manager.setup_training(model(), Stream(5), optimizer=sgd)


def test_tensors_in_memory_need_no_workers_on_a_cpu(tmp_path: Path) -> None:
    manager = MultiGPUTrainingManager(config(tmp_path, device="cpu", num_workers=2))
    _, loader, _ = manager.setup_training(model(), tensors(), optimizer=sgd)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    iterator = iter(loader)
    next(iterator)
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children
    assert sum(1 for _ in iterator) == 1
    manager.finish()


class Collecting(Dataset[Tensor]):
    """Collects garbage while it reads, as any dataset may that makes many objects."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        gc.collect()
        return torch.full((4,), float(index)), index % 3


def train_beside_an_old_group(folder: Path) -> int:
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    gc.collect()
    gc.disable()
    try:
        cycle: dict[str, Any] = {"group": dist.new_group(backend="gloo")}
        cycle["self"] = cycle
        dist.all_reduce(torch.ones(1), group=cycle["group"])
        dist.destroy_process_group(cycle["group"])
        del cycle
        manager = MultiGPUTrainingManager(config(folder, num_workers=1, epochs=1))
        return manager.fit(model(), Collecting(), optimizer=sgd).steps
    finally:
        gc.enable()
        multiprocessing.set_start_method(usual, force=True)


def test_workers_leave_the_garbage_of_their_rank_alone(tmp_path: Path) -> None:
    assert run_ranks(2, train_beside_an_old_group, tmp_path, timeout_s=60) == [1, 1]


HANDED_OVER = """
import threading, time
from multiprocessing import resource_sharer
from multi_gpu_training.data.loader import WorkerStart

WorkerStart(None)(0)
for error in (BrokenPipeError("nobody takes it"), ValueError("a real problem")):
    closed = threading.Event()

    def send(connection, process):
        raise error

    sharer = resource_sharer._resource_sharer
    with sharer.get_connection(sharer.register(send, closed.set)):
        closed.wait(10)
time.sleep(0.2)
"""


def test_a_worker_says_nothing_when_a_rank_that_stops_no_longer_takes_its_batch() -> None:
    found = subprocess.run(
        [sys.executable, "-c", HANDED_OVER], capture_output=True, text=True, timeout=60
    )
    assert "a real problem" in found.stderr, "other errors are shown"
    assert "nobody takes it" not in found.stderr
