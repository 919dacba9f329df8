"""A dataset may say which of its samples meet in a step, and how they become a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.feeding import training_loader, validation_loader
from multi_gpu_training.data.samplers import BatchSamplerBatches
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.measure.recorder import shorten


class Pairs(Dataset[int]):
    """Numbers, of which even and odd ones never meet."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]

    def global_batches(self, batch_size: int) -> BatchSamplerBatches:
        kinds = [[i for i, n in enumerate(self.numbers) if n % 2 == kind] for kind in (0, 1)]
        return BatchSamplerBatches(
            [kind[i : i + batch_size] for kind in kinds for i in range(0, len(kind), batch_size)]
        )

    def collate(self, numbers: list[int]) -> Tensor:
        return torch.tensor([100 + n for n in numbers])

    def subset(self, indices: Sequence[int]) -> Pairs:
        return Pairs([self.numbers[i] for i in indices])


def test_its_batches_are_the_steps_and_its_collate_makes_them() -> None:
    config = MultiGPUConfig(batch_size=2, gradient_accumulation_steps=2)
    loader, sizes = training_loader(Pairs(range(10)), config, Placement(), 1)
    assert (loader.steps, sizes.global_batch) == (4, 4)
    steps: dict[int, list[int]] = {}
    for batch in loader:
        share = share_of(batch)
        assert share is not None and len(batch) <= 2
        steps.setdefault(share.position, []).extend(batch.tolist())
    assert list(steps.values()) == [
        [100, 102, 104, 106], [108], [101, 103, 105, 107], [109]
    ]  # fmt: skip


def test_validation_goes_through_it_in_order_with_its_collate() -> None:
    config = MultiGPUConfig(batch_size=4)
    dataset = Pairs(range(6))
    _, sizes = training_loader(dataset, config, Placement(), 1)
    loader = validation_loader(dataset, config, Placement(), sizes)
    assert [batch.tolist() for batch in loader] == [[100, 101, 102, 103], [104, 105]]


def test_verify_shortens_it_to_one_of_its_kind() -> None:
    short = shorten(Pairs(range(100)), steps=4, global_batch=6)
    assert isinstance(short, Pairs)
    assert short.numbers == list(range(14))
