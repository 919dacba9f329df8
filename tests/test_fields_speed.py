"""What each setting of speed does. Where only a GPU shows it, see also test_gpu_execution.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import line, manager_for, points, quiet, sgd, squares
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training.data import resident
from multi_gpu_training.data.loader import Feeding
from multi_gpu_training.errors import DataError
from multi_gpu_training.training import fast_defaults, precision
from multi_gpu_training.training.fast_defaults import FastDefaults, choose_fast_defaults

GPU = torch.device("cuda", 0)  # only named, never used


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))


def chosen(
    folder: Path, model: nn.Module, device: torch.device = GPU, **settings: Any
) -> FastDefaults:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_defaults, "_computes_bf16", lambda: True)
        return choose_fast_defaults(quiet(folder, **settings), model, device)


def test_step_execution_eager_never_records(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, step_execution="eager")
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    assert manager.trainer.execution.reason == "step_execution=eager"
    other = manager_for(tmp_path, step_execution="graph")
    other.fit(line(), points(), loss_fn=squares, optimizer=sgd)
    assert other.trainer.execution.reason == "there is no GPU"
    assert other.trainer.execution.mode == "eager"


def test_fast_defaults_turn_everything_on_and_off(tmp_path: Path) -> None:
    assert chosen(tmp_path, convolutional()) == FastDefaults(True, True, True)
    assert chosen(tmp_path, convolutional(), fast_defaults=False) == FastDefaults(
        False, False, False
    )
    assert chosen(tmp_path, convolutional(), torch.device("cpu")) == FastDefaults(
        False, False, False
    )
    # A small perceptron: the casts would cost more than 16 bits save.
    assert chosen(tmp_path, line()) == FastDefaults(False, False, True)
    large = nn.Linear(1000, 1000)
    assert chosen(tmp_path, large).mixed_precision
    assert chosen(tmp_path, large, use_mixed_precision=False).mixed_precision is False


def test_channels_last_lays_out_the_weights_and_learns_the_same(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 2, 8, 8, generator=generator), torch.arange(24) % 5)
    weights = []
    for wanted in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
        manager_for(tmp_path, channels_last=wanted, batch_size=8).fit(model, data, optimizer=sgd)
        laid_out = model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert laid_out == wanted
        weights.append(model[0].weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


def test_fused_optimizer_is_one_kernel_where_it_was_left_open(tmp_path: Path) -> None:
    assert chosen(tmp_path, line(), fused_optimizer=False).fused_optimizer is False
    assert chosen(tmp_path, line(), torch.device("cpu"), fused_optimizer=True).fused_optimizer
    model = line()
    open_one = torch.optim.AdamW(model.parameters())
    fast_defaults.fuse(open_one)  # on the CPU nothing is to be gained: it stays as it is
    assert open_one.param_groups[0]["fused"] is None


def test_cudnn_benchmark_is_on_where_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for settings, expected in (({}, False), ({"cudnn_benchmark": True}, True), ({}, False)):
        precision.set_arithmetic(quiet(tmp_path, **settings))
        assert torch.backends.cudnn.benchmark is expected
    torch.backends.cudnn.benchmark = True
    precision.set_arithmetic(quiet(tmp_path))
    assert torch.backends.cudnn.benchmark, "what the user's script has set stays"


def fits(folder: Path, monkeypatch: pytest.MonkeyPatch, free_gb: float, **settings: Any) -> bool:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gb * 2**30), 2**40))
    data = TensorDataset(torch.zeros(2**18, 1024, dtype=torch.uint8))  # a quarter of a GB
    return resident.fits_on_gpu(data, Feeding(8, 0, device=GPU), quiet(folder, **settings))


def test_data_on_gpu_says_where_a_dataset_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fits(tmp_path, monkeypatch, free_gb=2)
    assert not fits(tmp_path, monkeypatch, free_gb=2, data_on_gpu=False)
    assert not fits(tmp_path, monkeypatch, free_gb=2, fast_defaults=False)
    with pytest.raises(DataError, match="data_on_gpu=true, but TensorDataset cannot live on cpu"):
        manager_for(tmp_path, data_on_gpu=True).fit(line(), points(), loss_fn=squares)


def test_gpu_data_gb_bounds_the_memory_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not fits(tmp_path, monkeypatch, free_gb=0.9)  # a quarter of what is free
    assert fits(tmp_path, monkeypatch, free_gb=0.9, gpu_data_gb=0.3)
    assert not fits(tmp_path, monkeypatch, free_gb=2, gpu_data_gb=0.2)
