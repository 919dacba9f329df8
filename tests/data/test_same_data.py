"""Ranks that hold different data are refused before the first step, and no others are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from multi_gpu_training import ConfigError, MultiGPUConfig, MultiGPUTrainingManager


class Words(Dataset[Tensor]):
    """A class of the user's, about which nothing is known but its length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(4)  # noise, as in an augmentation


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def datasets(kind: str, rank: int) -> Any:
    """On rank 0 and on all others."""
    x = drawn(0, 60, 4)
    if kind == "tensors":
        return TensorDataset(drawn(rank, 60, 4))
    if kind == "labels alone":
        return TensorDataset(x, torch.arange(60) % (3 + rank))
    if kind == "half precision":
        return TensorDataset(drawn(rank, 60, 4).bfloat16())
    if kind == "few values beside zeros":
        sparse = torch.zeros(60, 4)
        sparse[7 + rank] = 1.0
        return TensorDataset(sparse)
    if kind == "larger than what is looked at":
        return TensorDataset(drawn(rank, 3000, 40))
    if kind == "a split without a generator":
        torch.manual_seed(rank)
        return random_split(Words(80), [60, 20])[0]
    if kind == "one part of several":
        return ConcatDataset([TensorDataset(x), Subset(TensorDataset(drawn(rank, 60, 4)), [3, 4])])
    if kind == "another length":
        return Words(60 + rank)
    if kind == "other shapes":
        return TensorDataset(torch.zeros(60, 4 + rank))
    assert kind == "parts by rank"
    return TensorDataset(x[rank::2])


def same(kind: str, rank: int) -> Any:
    """What is not the same object or bits on every rank, and yet the same data."""
    x = drawn(0, 60, 4)
    if kind == "rounding":
        return TensorDataset((x - x.mean()) * (1 + rank * 1e-6))
    if kind == "rounding in half precision":
        return TensorDataset((x * (1 + rank * 1e-3)).half())
    if kind == "nan, infinity and signed zeros":
        x[3], x[4], x[5] = math.nan, math.inf, -0.0 if rank else 0.0
        return TensorDataset(x)
    if kind == "many types":
        generator = torch.Generator().manual_seed(1)
        made = [torch.randint(0, 2, (60, 200), generator=generator).to(kind) for kind in TYPES]
        return TensorDataset(*made, torch.complex(x, x), x.requires_grad_())
    if kind == "views that are not contiguous":
        return TensorDataset(drawn(0, 40, 3000).T, torch.zeros(1).expand(3000, 50))
    if kind == "noise in each sample":
        return Words(60)
    assert kind == "no values"
    return TensorDataset(torch.zeros(60, 0), x[:, :0])


TYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.bfloat16]
TYPES += [torch.float16, torch.complex64, torch.uint16, torch.float8_e4m3fn]
DIFFERENT = ["tensors", "labels alone", "half precision", "few values beside zeros"]
DIFFERENT += ["larger than what is looked at", "a split without a generator", "parts by rank"]
DIFFERENT += ["one part of several", "other shapes"]
SAME = ["rounding", "rounding in half precision", "nan, infinity and signed zeros", "many types"]
SAME += ["views that are not contiguous", "noise in each sample", "no values"]


def refusals(folder: Path, train: Any, val: Any = None) -> tuple[str, str] | None:
    """The code and text of what setting up says; None where it says nothing."""
    config = MultiGPUConfig(
        progress="off", save_dir=str(folder), tensorboard=False, enable_fault_tolerance=False
    )
    manager = MultiGPUTrainingManager(config)
    try:
        manager.setup_training(
            nn.Linear(4, 2), train, val, loss_fn=lambda model, batch: model(batch[0]).mean()
        )
    except ConfigError as error:
        return error.code, str(error)
    manager.finish()
    return None


def refused(folder: Path, kind: str) -> Any:
    import torch.distributed as dist

    return refusals(folder, datasets(kind, dist.get_rank()))


def accepted(folder: Path) -> list[Any]:
    import torch.distributed as dist

    return [refusals(folder, same(kind, dist.get_rank())) for kind in SAME]


def refused_validation(folder: Path) -> Any:
    import torch.distributed as dist

    sets = {"clean": datasets("tensors", 0), "noisy": datasets("tensors", dist.get_rank())}
    return refusals(folder, datasets("tensors", 0), sets)


def alone(folder: Path) -> Any:
    return refusals(folder, datasets("tensors", 7))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_data_are_refused_on_every_rank(tmp_path: Path, kind: str) -> None:
    found = run_ranks(2, refused, tmp_path, kind)
    assert all(found) and len(set(found)) == 1
    code, text = found[0]
    assert code == "MGT305" and "on rank 1" in text and "torch.manual_seed(0)" in text


def test_a_length_that_differs_is_told_with_its_numbers(tmp_path: Path) -> None:
    (code, text), *_ = run_ranks(3, refused, tmp_path, "another length")
    assert code == "MGT305" and "on ranks 1, 2 it has more samples (61, not 60)" in text


def test_a_validation_set_is_named(tmp_path: Path) -> None:
    (code, text), _ = run_ranks(2, refused_validation, tmp_path)
    assert code == "MGT305" and "validation set 'noisy'" in text and "tensor 0" in text


def test_equal_data_of_all_kinds_are_accepted(tmp_path: Path) -> None:
    for found in run_ranks(2, accepted, tmp_path):
        assert dict(zip(SAME, found, strict=True)) == dict.fromkeys(SAME)


def test_one_rank_may_hold_what_it_likes(tmp_path: Path) -> None:
    assert run_ranks(1, alone, tmp_path) == [None]
