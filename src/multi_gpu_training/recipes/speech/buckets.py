"""Batches of utterances of about one length, in an order that (seed, epoch, position) decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from multi_gpu_training.data.order import derive_seed


@dataclass(frozen=True)
class Bucket:
    """What everything in a batch is padded to, so that few shapes occur in a training."""

    samples: int
    labels: int


class Buckets:
    """Utterances sorted into `count` parts of about equal size by their length in samples."""

    def __init__(
        self, samples: Sequence[int], labels: Sequence[int], count: int, multiple: int
    ) -> None:
        order = sorted(zip(samples, labels, strict=True))
        found: dict[int, int] = {}
        most = 0
        for part in range(count):
            inside = order[part * len(order) // count : (part + 1) * len(order) // count]
            if inside:
                limit = -(-max(1, inside[-1][0]) // multiple) * multiple
                most = max(most, *(n for _, n in inside), 1)
                found[limit] = most
        self.all = [Bucket(limit, labels) for limit, labels in found.items()]

    def number(self, samples: int) -> int:
        """Which bucket an utterance belongs to; one that is longer than all belongs to the last."""
        fitting = (i for i, bucket in enumerate(self.all) if samples <= bucket.samples)
        return next(fitting, len(self.all) - 1)

    def fit(self, samples: int, labels: int) -> Bucket:
        """What to pad to so that this many samples and labels fit."""
        bucket = self.all[self.number(samples)]
        return Bucket(max(bucket.samples, samples), max(bucket.labels, labels))


class BucketedBatches:
    """Every utterance once an epoch, each batch out of one bucket, short where a bucket ends.

    A batch depends on (seed, epoch, position) alone, and not on the ranks that share it. With
    another batch size the batches are others, in another order.
    """

    def __init__(self, numbers: Sequence[int], batch_size: int) -> None:
        self.samples = len(numbers)
        self.batch_size = batch_size
        self.members = [
            [i for i, n in enumerate(numbers) if n == bucket] for bucket in sorted(set(numbers))
        ]

    def __len__(self) -> int:
        return sum(-(-len(members) // self.batch_size) for members in self.members)

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        found: list[list[int]] = []
        for members in self.members:
            order = torch.randperm(len(members), generator=generator).tolist()
            for start in range(0, len(members), self.batch_size):
                found.append([members[i] for i in order[start : start + self.batch_size]])
        for i in torch.randperm(len(found), generator=generator).tolist():
            yield found[i]
