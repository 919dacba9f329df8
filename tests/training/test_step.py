"""The step itself: what it costs, what it sends, what it computes."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import ConfigError, DivergenceError, ModelError


def config(folder: Path, **settings: Any) -> MultiGPUConfig:
    defaults = {
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "epochs": 1,
        "enable_fault_tolerance": False,
    }
    return MultiGPUConfig(**{**defaults, **settings})


def data(samples: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def frames(folder: Path) -> int:
    found: list[int] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        names = [frame.function for frame in inspect.stack()]
        found.append(names.index("fit") - 1)
        return F.cross_entropy(model(batch[0]), batch[1])

    manager = MultiGPUTrainingManager(config(folder))
    manager.fit(nn.Linear(4, 3), data(), loss_fn=loss_fn)
    return max(found)


@pytest.mark.parametrize("world", [1, 2])
def test_eight_frames_at_most_stand_between_fit_and_the_loss(tmp_path: Path, world: int) -> None:
    assert max(run_ranks(world, frames, tmp_path)) <= 8


COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
    "reduce",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "all_gather_object",
    "broadcast_object_list",
]


def collectives(folder: Path, weighted: bool) -> Counter[str]:
    """Collectives that Python code asks for during ordinary steps; DDP's own are in C++."""
    counts: Counter[str] = Counter()
    watching = False

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if watching:
                counts[name] += 1
            return original(*args, **kwargs)

        return call

    class Watch(Callback):
        def on_step_end(self, manager: Any, result: Any) -> None:
            step = result.step
            nonlocal watching
            watching = 2 <= step < 9

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return (loss, len(batch[1])) if weighted else loss

    patches = [mock.patch.object(dist, n, counted(n, getattr(dist, n))) for n in COLLECTIVES]
    for patch in patches:
        patch.start()
    try:
        # log_every is beyond the run: logging is where the ranks do talk.
        settings = config(folder, global_batch_size=6, log_every=1000, max_grad_norm=1.0)
        manager = MultiGPUTrainingManager(settings)
        manager.fit(nn.Linear(4, 3), data(), loss_fn=loss_fn, optimizer=sgd, callbacks=[Watch()])
    finally:
        for patch in patches:
            patch.stop()
    return counts


@pytest.mark.parametrize("weighted", [False, True])
def test_an_ordinary_step_has_no_collective_beyond_those_of_ddp(
    tmp_path: Path, weighted: bool
) -> None:
    for counts in run_ranks(2, collectives, tmp_path, weighted):
        assert not counts, counts


def exchanges(folder: Path, accumulation: int) -> int:
    """All-reduces that DDP asks for in one step, counted by a communication hook."""
    sent = 0

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal sent
        sent += 1
        return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(state, bucket)

    hook.__annotations__.clear()  # DDP wants the types themselves, not their names
    settings = config(folder, global_batch_size=16, gradient_accumulation_steps=accumulation)
    manager = MultiGPUTrainingManager(settings)
    _, loader, _ = manager.setup_training(nn.Linear(4, 3), data(16), optimizer=sgd)
    manager.trainer.wrapped.register_comm_hook(None, hook)  # type: ignore[operator]
    manager.trainer.strategy.settled = True
    moved = [manager.trainer.train_step(batch).moved for batch in loader]
    assert moved == [False] * (accumulation - 1) + [True]
    return sent


@pytest.mark.parametrize("accumulation", [1, 4])
def test_ranks_talk_once_a_step_however_many_micro_batches(
    tmp_path: Path, accumulation: int
) -> None:
    assert run_ranks(2, exchanges, tmp_path, accumulation) == [1, 1]


def diverge(folder: Path) -> str:
    class Meddle(Callback):
        def on_step_end(self, manager: Any, result: Any) -> None:
            step = result.step
            if step == 2 and manager.placement.dp_rank == 1:
                with torch.no_grad():
                    manager.model.weight[0, 0] += 1e-7

    manager = MultiGPUTrainingManager(config(folder, consistency_check_every=3, batch_size=4))
    with pytest.raises(DivergenceError) as caught:
        manager.fit(nn.Linear(4, 3), data(), optimizer=sgd, callbacks=[Meddle()])
    return str(caught.value)


def test_a_replica_that_drifted_is_named(tmp_path: Path) -> None:
    for message in run_ranks(2, diverge, tmp_path):
        assert "after step 3" in message and "weight" in message and "ranks [1]" in message


def test_a_loss_that_is_no_scalar_says_so(tmp_path: Path) -> None:
    manager = MultiGPUTrainingManager(config(tmp_path))
    with pytest.raises(ModelError, match=r"shape \(32,\); return a scalar"):
        manager.fit(
            nn.Linear(4, 3),
            data(),
            loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
        )


def test_training_metrics_of_a_loss_function_are_reported(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        hits = (output.argmax(1) == batch[1]).sum()
        return F.cross_entropy(output, batch[1]), None, {"hits": (hits, len(batch[1]))}

    manager = MultiGPUTrainingManager(config(tmp_path))
    result = manager.fit(nn.Linear(4, 3), data(), loss_fn=loss_fn)
    assert 0 <= result.metrics["hits"] <= 1


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"hits": 3.0}, "returned the metric 'hits': 3.0, which is not a sum and its weight"),
        ({"hits": (1, 2, 3)}, r"returned the metric 'hits': \(1, 2, 3\), which is not a sum and"),
        ({"hits": ("many", 1)}, "metric 'hits' is str 'many', not a number"),
        ({"loss": (1, 1)}, "a metric called 'loss', which is the mean of its first result"),
        ([1, 2], "returned list as its metrics; return .mean_loss, weight, {name: .sum, weight"),
    ],
)
def test_metrics_of_a_loss_function_that_are_none_say_so(
    tmp_path: Path, metrics: Any, said: str
) -> None:
    manager = MultiGPUTrainingManager(config(tmp_path))
    with pytest.raises(ConfigError, match=said):
        manager.fit(
            nn.Linear(4, 3),
            data(),
            loss_fn=lambda m, b: (F.cross_entropy(m(b[0]), b[1]), None, metrics),
        )
    assert manager.step == 0


def test_training_accuracy_counts_every_sample(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    inputs, targets = data().tensors
    with torch.no_grad():
        expected = int((model(inputs).argmax(1) == targets).sum()) / 64
    manager = MultiGPUTrainingManager(config(tmp_path, batch_size=7))
    freeze = lambda parameters: torch.optim.SGD(parameters, lr=1e-30)  # noqa: E731
    assert manager.fit(model, data(), optimizer=freeze).metrics["accuracy"] == expected


def step_past_the_trainer(folder: Path) -> str:
    model = nn.Linear(4, 3)
    optimizer = sgd(model.parameters())
    manager = MultiGPUTrainingManager(config(folder))
    model, loader, _ = manager.setup_training(model, data(), optimizer=optimizer)
    batch = next(iter(loader))
    manager.trainer.train_step(batch)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    with pytest.raises(ModelError) as caught:
        optimizer.step()
    manager.finish()
    return str(caught.value)


def test_a_step_past_the_trainer_is_an_error_and_not_a_drift(tmp_path: Path) -> None:
    for message in run_ranks(2, step_past_the_trainer, tmp_path):
        assert "train_step(batch)" in message
