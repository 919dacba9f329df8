"""Strategies: the one place that knows how a model is replicated."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import manager_for, points, sgd
from torch import Tensor, nn

import multi_gpu_training
from multi_gpu_training import (
    DataParallelTrainer,
    DistributedDataParallelTrainer,
    MultiGPUConfig,
    MultiGPUTrainer,
    SingleDeviceTrainer,
)
from multi_gpu_training.distributed.placement import Placement


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def states(folder: Path, mode: str) -> tuple[list[str], list[str]]:
    """Names in the model, and in the whole state."""
    manager = manager_for(folder, training_mode=mode)
    own, *_ = manager.setup_training(model(), points(), optimizer=sgd)
    strategy = manager.trainer.strategy
    whole: dict[str, Tensor] = strategy.full_state()
    for name, value in own.state_dict().items():
        assert torch.equal(whole[name], value)
    manager.finish()
    return list(own.state_dict()), list(whole)


@pytest.mark.parametrize(
    ("world", "mode"),
    [(1, "single"), (1, "data_parallel"), (2, "distributed_data_parallel")],
)
def test_the_whole_state_has_the_names_of_the_users_model_whatever_wraps_it(
    tmp_path: Path, world: int, mode: str
) -> None:
    ranks = run_ranks(world, states, tmp_path, mode)
    assert all(whole == names for names, whole in ranks)


def sum_of_squares(model: nn.Module, batch: Any) -> Any:
    """A loss with weights other than the sample count."""
    error = (model(batch[0]).flatten() - batch[1].flatten()) ** 2
    return (error.sum() / 3, 3) if len(error) > 1 else (error.sum(), 1)


def weighed(folder: Path, mode: str, settings: dict[str, Any]) -> list[float]:
    manager = manager_for(folder, training_mode=mode, max_grad_norm=0.1, **settings)
    torch.manual_seed(0)
    line = nn.Linear(4, 1).double()
    data = points(16)
    data.tensors = tuple(t.double() for t in data.tensors)
    manager.fit(line, data, loss_fn=sum_of_squares, optimizer=sgd)
    return [*line.weight.flatten().tolist(), *line.bias.tolist()]


def test_every_strategy_weighs_and_clips_alike(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, weighed, tmp_path, "single", {"global_batch_size": 8})
    (threads,) = run_ranks(1, weighed, tmp_path, "data_parallel", {"global_batch_size": 8})
    assert threads == pytest.approx(expected, rel=1e-12)
    # Both micro-batches weigh 3, on whichever rank: two of them halve the weight of each.
    settings = {"global_batch_size": 8, "gradient_accumulation_steps": 2}
    (accumulated,) = run_ranks(1, weighed, tmp_path, "single", settings)
    mode = "distributed_data_parallel"
    for found in run_ranks(2, weighed, tmp_path, mode, {"global_batch_size": 8}):
        assert found == pytest.approx(accumulated, rel=1e-12)


def obstacles(folder: Path, mode: str) -> tuple[str | None, str | None]:
    manager = manager_for(folder, training_mode=mode)
    manager.setup_training(model(), points(), optimizer=sgd)
    strategy = manager.trainer.strategy
    found = strategy.recording_obstacle(), strategy.compile_obstacle()
    manager.finish()
    return found


def test_a_strategy_says_why_its_steps_cannot_be_recorded(tmp_path: Path) -> None:
    assert run_ranks(1, obstacles, tmp_path, "single") == [(None, None)]
    (recording, compiling), *_ = run_ranks(1, obstacles, tmp_path, "data_parallel")
    assert recording == compiling == "DataParallel runs its GPUs from one process"
    for recording, compiling in run_ranks(2, obstacles, tmp_path, "distributed_data_parallel"):
        assert recording == "the ranks talk over gloo" and compiling is None


def test_trainers_differ_in_their_strategy_only() -> None:
    assert inspect.isabstract(MultiGPUTrainer)
    kinds = (SingleDeviceTrainer, DataParallelTrainer, DistributedDataParallelTrainer)
    for kind in kinds:
        own = {name for name in vars(kind) if not name.startswith("_")}
        assert own == {"make_strategy"}
    made = {type(kind(MultiGPUConfig(), Placement()).strategy) for kind in kinds}
    assert len(made) == len(kinds)


ASKS = re.compile(
    r"isinstance\([^)]*DataParallel|isinstance\([^)]*Trainer\b|"
    r"type\([\w.]*(trainer|strategy)\)\.__name__|training_mode (is|==|!=|in) "
)


def test_no_other_code_asks_which_strategy_it_is() -> None:
    package = Path(multi_gpu_training.__file__).parent
    for part in ("training", "monitoring", "checkpoint", "faults", "data"):
        for path in (package / part).rglob("*.py"):
            if path.parent.name != "strategy":
                assert not ASKS.search(path.read_text()), path


def local_gradients(folder: Path, local: bool) -> tuple[list[float], list[int], bool]:
    """Weights after a step, sizes of the exchanged pieces, and whether times were logged."""
    # Replicas that drift apart on purpose are not compared.
    manager = manager_for(folder, batch_size=4, consistency_check_every=0)
    line = nn.Linear(4, 1)
    _, loader, _ = manager.setup_training(line, points(), optimizer=sgd)
    strategy = manager.trainer.strategy
    if local:
        strategy.keep_gradients_local()
    for batch in loader:
        manager.trainer.train_step(batch)
    found = line.weight.flatten().tolist(), strategy.bucket_bytes(), bool(strategy.logged_times())
    manager.finish()
    return found


def test_gradients_stay_local_only_where_that_is_asked_for(tmp_path: Path) -> None:
    first, second = run_ranks(2, local_gradients, tmp_path, False)
    assert first == second
    assert sum(first[1]) == (4 + 1 + 1) * 4  # weight, bias and the step's weight
    first, second = run_ranks(2, local_gradients, tmp_path, True)
    assert first[0] != second[0]
