"""Utterances as the loader wants them: read, varied, and padded to the shape of their bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.recipes.speech.audio import read_sound, trimmed
from multi_gpu_training.recipes.speech.features import DRAWS


@dataclass(frozen=True)
class SpeakerGroup:
    """Test utterances that are measured together: those of a speaker, who is trained on as well
    where `known` says so (see `corpora.divide`)."""

    speaker: str = ""
    known: bool = False


@dataclass(frozen=True)
class Clip:
    """One utterance. `shortest` is how few samples its text can be read from.

    sound: int16 samples, or None where they are read from `path` when they are wanted.
    group: in a test, the number of its group.
    """

    labels: tuple[int, ...]
    samples: int
    shortest: int
    path: Path | None = None
    sound: Tensor | None = None
    group: int = 0

    @property
    def possible(self) -> bool:
        return self.samples >= self.shortest


class Utterance(NamedTuple):
    """`room` is how many samples it has at its slowest: its bucket must not depend on a draw."""

    sound: Tensor
    room: int
    labels: tuple[int, ...]
    draws: Tensor
    group: int


class Batch(NamedTuple):
    """sound (batch, samples) int16, targets (batch, labels), and how much of each row counts.

    draws: random numbers of each utterance, for SpecAugment on the device.
    warps: (batch, 2) by which pitch and vocal tract scale its frequencies, ones where nothing does;
    while training, maybe followed by how fast each moment passes (see `features.at_pace`).
    groups: the group of each utterance, in a test.
    """

    sound: Tensor
    samples: Tensor
    targets: Tensor
    sizes: Tensor
    draws: Tensor
    warps: Tensor
    groups: Tensor


# Batches of utterances of about one length


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


# What the loader reads


@dataclass(frozen=True, eq=False)
class Speech(Dataset[Utterance]):
    """Clips at `rate`; at each look at another speed, up to `speed` slower or faster, and with up
    to `crop` seconds cut off each end.

    The draws come from torch's global generator, which the loader seeds for each utterance: they
    depend on (seed, epoch, utterance) and not on the rank that looks.
    """

    clips: Sequence[Clip]
    rate: int
    buckets: Buckets
    speed: float = 0.0
    trim: float = 0.0  # decibels, of sound that is read here
    crop: float = 0.0

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Utterance:
        clip = self.clips[index]
        sound = clip.sound
        if sound is None:
            assert clip.path is not None
            sound = read_sound(clip.path, self.rate)
            sound = trimmed(sound, self.rate, self.trim, clip.shortest)
        draws = torch.rand(DRAWS + 1)
        if self.speed:
            sound = at_speed(sound, self.speed, float(draws[DRAWS]), clip.shortest)
        if self.crop:
            ends = torch.rand(2).tolist()
            sound = cropped(sound, round(self.crop * self.rate), ends, clip.shortest)
        return Utterance(sound, self.room(clip), clip.labels, draws[:DRAWS], clip.group)

    def room(self, clip: Clip) -> int:
        return longest(clip.samples, self.speed)

    # What the loader asks a dataset that knows better than to take samples as they come.

    def global_batches(self, batch_size: int) -> BucketedBatches:
        """Batches of `batch_size` over all ranks, each of utterances of about one length."""
        numbers = [self.buckets.number(self.room(clip)) for clip in self.clips]
        return BucketedBatches(numbers, batch_size)

    def collate(self, utterances: Sequence[Utterance]) -> Batch:
        samples = [len(u.sound) for u in utterances]
        sizes = [len(u.labels) for u in utterances]
        room = max(*samples, *(u.room for u in utterances))
        bucket = self.buckets.fit(room, max(sizes))
        sound = torch.zeros(len(utterances), bucket.samples, dtype=torch.int16)
        targets = torch.zeros(len(utterances), bucket.labels, dtype=torch.int64)
        for i, utterance in enumerate(utterances):
            sound[i, : samples[i]] = utterance.sound
            targets[i, : sizes[i]] = torch.tensor(utterance.labels)
        draws = torch.stack([u.draws for u in utterances])
        warps = torch.ones(len(utterances), 2)
        groups = torch.tensor([u.group for u in utterances])
        lengths = torch.tensor(samples), torch.tensor(sizes)
        return Batch(sound, lengths[0], targets, lengths[1], draws, warps, groups)

    def subset(self, indices: Sequence[int]) -> Speech:
        return replace(self, clips=[self.clips[i] for i in indices])


def at_speed(sound: Tensor, speed: float, draw: float, shortest: int) -> Tensor:
    """The same at another speed and pitch, but never too short for its text."""
    slow, fast = 1 - speed, 1 + speed
    samples = max(round(len(sound) / (slow + (fast - slow) * draw)), shortest, 1)
    if samples == len(sound) or len(sound) < 2:
        return sound
    moved = F.interpolate(sound.view(1, 1, -1).float(), size=samples, mode="linear")
    return moved.view(-1).round().to(torch.int16)


def cropped(sound: Tensor, most: int, draws: Sequence[float], shortest: int) -> Tensor:
    """The same as a careless cut leaves it: every other time, each end loses up to `most` samples,
    or an eighth of all. Never too short for its text."""
    most = min(most, len(sound) // 8)
    start, end = (round(max(0.0, 2 * draw - 1) * most) for draw in draws)
    kept = sound[start : len(sound) - end]
    return kept if len(kept) >= max(shortest, 1) else sound


def longest(samples: int, speed: float) -> int:
    """Samples of an utterance at its slowest."""
    return round(samples / (1 - speed))
