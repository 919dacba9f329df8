"""Data that live on the device come in the same batches as data that are loaded."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.loader import Feeding, ShareLoader
from multi_gpu_training.data.order import ShuffledBatches
from multi_gpu_training.data.resident import ResidentLoader

SAMPLES = 53


def data() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES).float().unsqueeze(1), torch.arange(SAMPLES) % 5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("batch", "micro"), [(8, 8), (12, 5), (2, 2)])
@pytest.mark.parametrize("evaluating", [False, True])
def test_resident_batches_are_those_that_are_loaded(
    ranks: int, batch: int, micro: int, evaluating: bool
) -> None:
    for rank in range(ranks):
        feeding = Feeding(micro_size=micro, seed=3, rank=rank, ranks=ranks, evaluating=evaluating)
        source = ShuffledBatches(SAMPLES, batch)
        loaded, resident = (
            ShareLoader(data(), source, feeding),
            ResidentLoader(data(), source, feeding),
        )
        for loader in (loaded, resident):
            loader.seek(2, start=1)
        for ours, theirs in zip(resident, loaded, strict=True):
            a, b = share_of(ours), share_of(theirs)
            assert a is not None
            assert b is not None
            assert (a.epoch, a.position, a.count, a.window_count, a.first, a.last) == (
                b.epoch,
                b.position,
                b.count,
                b.window_count,
                b.first,
                b.last,
            )
            assert (a.sample_seed, a.indices) == (b.sample_seed, b.indices)
            if a.count:
                assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
        assert loaded.epoch == resident.epoch


def test_a_resident_batch_is_gathered_only_where_it_is_used() -> None:
    loader = ResidentLoader(data(), ShuffledBatches(SAMPLES, 8), Feeding(micro_size=8, seed=0))
    lazy = [batch.gather(batch.index) for batch in loader.batches()]
    loader.seek(0)
    for whole, later in zip(loader, lazy, strict=True):
        assert torch.equal(whole[0], later[0])
