"""Data cut for simulated clients: every sample once, the same parts for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from multi_gpu_training.data.partitions import labels_of, partition
from multi_gpu_training.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(1000, 2), torch.randint(0, 10, (1000,), generator=random))


@pytest.mark.parametrize("how", ["iid", "dirichlet:0.3"])
def test_every_sample_belongs_to_exactly_one_client(data: TensorDataset, how: str) -> None:
    parts = [partition(data, how, 7, part, seed=3) for part in range(7)]
    chosen = sorted(index for part in parts for index in part.indices)
    assert chosen == list(range(1000))
    again = partition(data, how, 7, 2, seed=3)
    assert list(again.indices) == list(parts[2].indices)
    assert list(partition(data, how, 7, 2, seed=4).indices) != list(parts[2].indices)


def test_a_smaller_alpha_gives_clients_fewer_classes(data: TensorDataset) -> None:
    def largest_share(how: str) -> float:
        shares = []
        for part in range(10):
            labels = labels_of(partition(data, how, 10, part, seed=0))
            shares.append(np.bincount(labels, minlength=10).max() / len(labels))
        return float(np.mean(shares))

    assert largest_share("iid") < 0.25 < largest_share("dirichlet:0.1")


def test_labels_are_found_in_any_dataset(data: TensorDataset) -> None:
    expected = data.tensors[1].numpy()
    plain = [(x, int(y)) for x, y in data]
    assert (labels_of(plain) == expected).all()
    assert (labels_of(Subset(data, [5, 1])) == expected[[5, 1]]).all()


@pytest.mark.parametrize("how", ["", "dirichlet", "dirichlet:0", "dirichlet:nan", "shards:2"])
def test_an_unknown_partition_is_refused(data: TensorDataset, how: str) -> None:
    with pytest.raises(ConfigError, match="use iid or dirichlet"):
        partition(data, how, 2, 0, seed=0)


def test_targets_without_classes_are_refused_for_dirichlet() -> None:
    regression = TensorDataset(torch.rand(20, 2), torch.rand(20))
    with pytest.raises(DataError, match="use iid"):
        partition(regression, "dirichlet:1", 2, 0, seed=0)
    with pytest.raises(DataError, match="too few"):
        partition(regression, "iid", 11, 0, seed=0)
