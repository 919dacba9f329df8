"""What is remembered from save to save never stands in for what has changed since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import manager_for, points, squares
from torch import Tensor, nn

from multi_gpu_training.checkpoint.store import load
from multi_gpu_training.state_dicts import optimizer_state

SETTINGS = {"batch_size": 4, "run_name": "run", "training_mode": "single", "keep_last": 99}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.dtype == other.dtype
        return alike and torch.equal(one.detach().cpu(), other.detach().cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def exchange_memory(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)


def change_type(model: Any, optimizer: Any) -> None:
    model.double()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()


def change_in_place(model: Any, optimizer: Any) -> None:
    model[0].weight.data = model[0].weight.data.t()  # the same memory and shape
    for state in optimizer.state.values():
        state["exp_avg"].data = torch.randn(7).double()  # the same object, of another shape


def tie(model: Any, optimizer: Any) -> None:
    model[2].weight.data = model[0].weight.data


def untie(model: Any, optimizer: Any) -> None:
    model[2].weight.data = model[0].weight.data.clone()


def add_tensors(model: Any, optimizer: Any) -> None:
    model.register_buffer("mean", torch.ones(3))
    extra = nn.Parameter(torch.randn(5))
    optimizer.add_param_group({"params": [extra], "lr": torch.tensor(0.5)})
    optimizer.state[extra] = {"step": 3, "exp_avg": torch.randn(5)}


def change_numbers(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.125
    for group in optimizer.param_groups[1:]:
        group["lr"].fill_(0.25)
        optimizer.state[group["params"][0]]["step"] = 4


def move_keys(model: Any, optimizer: Any) -> None:
    states = list(optimizer.state.values())
    states[0]["max"] = states[0].pop("exp_avg_sq")
    states[-1].pop("exp_avg")


def keep_lists(model: Any, optimizer: Any) -> None:
    next(iter(optimizer.state.values()))["old"] = [torch.randn(2), torch.randn(2)]


def change_lists(model: Any, optimizer: Any) -> None:
    next(iter(optimizer.state.values()))["old"].append(torch.randn(3))


def replace_layer(model: Any, optimizer: Any) -> None:
    model[0] = nn.Linear(4, 4, bias=False)


def test_a_save_holds_what_is_there_whatever_was_exchanged_since_the_last(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **SETTINGS)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1))
    manager.setup_training(model, points(), loss_fn=squares)
    for batch in manager.train_loader:
        manager.trainer.train_step(batch)
    optimizer = manager.trainer.optimizer
    changes: list[Callable[[Any, Any], None]] = [
        *(exchange_memory, tie, untie, change_type, change_in_place, add_tensors, change_numbers),
        *(change_numbers, move_keys, keep_lists, change_lists, replace_layer),
    ]
    for change in changes:
        change(model, optimizer)
        for _ in range(2):  # the second finds everything as it was
            found = load(manager.save_checkpoint())
            whole = found.model | {name: found.model[of] for name, of in found.aliases.items()}
            assert same(whole, dict(model.state_dict())), change.__name__
            assert same(found.optimizer, optimizer_state(model, optimizer)), change.__name__
        assert bool(found.aliases) == (change is tie), change.__name__
    manager.finish()
