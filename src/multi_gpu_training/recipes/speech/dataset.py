"""Utterances as the loader wants them: read, varied, and padded to the shape of their bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from multi_gpu_training.recipes.speech.audio import read_sound
from multi_gpu_training.recipes.speech.buckets import BucketedBatches, Buckets
from multi_gpu_training.recipes.speech.features import DRAWS

SPEEDS = (0.85, 1.15)  # how much slower or faster an utterance may be trained on


@dataclass(frozen=True)
class Clip:
    """One utterance. `shortest` is how few samples its text can be read from.

    sound: int16 samples, or None where they are read from `path` when they are wanted.
    """

    labels: tuple[int, ...]
    samples: int
    shortest: int
    path: Path | None = None
    sound: Tensor | None = None

    @property
    def possible(self) -> bool:
        return self.samples >= self.shortest


class Utterance(NamedTuple):
    """`room` is how many samples it has at its slowest: its bucket must not depend on a draw."""

    sound: Tensor
    room: int
    labels: tuple[int, ...]
    draws: Tensor


class Batch(NamedTuple):
    """sound (batch, samples) int16, targets (batch, labels), and how much of each row counts.

    draws: random numbers of each utterance, for augmentation on the device.
    """

    sound: Tensor
    samples: Tensor
    targets: Tensor
    sizes: Tensor
    draws: Tensor


class Speech(Dataset[Utterance]):
    """Clips at `rate`; with `varied`, at another speed at each look.

    The draws come from torch's global generator, which the loader seeds for each utterance: they
    depend on (seed, epoch, utterance) and not on the rank that looks.
    """

    def __init__(self, clips: Sequence[Clip], rate: int, buckets: Buckets, varied: bool) -> None:
        self.clips = list(clips)
        self.rate = rate
        self.buckets = buckets
        self.varied = varied

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Utterance:
        clip = self.clips[index]
        sound = clip.sound
        if sound is None:
            assert clip.path is not None
            sound = read_sound(clip.path, self.rate)
        draws = torch.rand(DRAWS + 1)
        if self.varied:
            sound = at_speed(sound, float(draws[-1]), clip.shortest)
        return Utterance(sound, self.room(clip), clip.labels, draws[:-1])

    def room(self, clip: Clip) -> int:
        return longest(clip.samples, self.varied)

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
        return Batch(sound, torch.tensor(samples), targets, torch.tensor(sizes), draws)

    def subset(self, indices: Sequence[int]) -> Speech:
        return Speech([self.clips[i] for i in indices], self.rate, self.buckets, self.varied)


def at_speed(sound: Tensor, draw: float, shortest: int) -> Tensor:
    """The same at another speed and pitch, but never too short for its text."""
    slow, fast = SPEEDS
    samples = max(round(len(sound) / (slow + (fast - slow) * draw)), shortest, 1)
    if samples == len(sound) or len(sound) < 2:
        return sound
    moved = F.interpolate(sound.view(1, 1, -1).float(), size=samples, mode="linear")
    return moved.view(-1).round().to(torch.int16)


def longest(samples: int, varied: bool) -> int:
    """Samples of an utterance at its slowest."""
    return round(samples / SPEEDS[0]) if varied else samples
