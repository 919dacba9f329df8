"""From videos with labelled frames to training and validation clips, split by video."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.video.annotations import Trial

SHUFFLES = 200
Augment = Literal["auto", "none", "shift", "turn"]
REACH = 8  # a clip moves by up to an eighth of its frame


@dataclass(frozen=True)
class Video:
    """Grey frames, uint8 of (count, size, size) in memory or on disk, and what is seen in them."""

    name: str
    frames: Any
    trials: Sequence[Trial]

    def class_counts(self, classes: int) -> list[int]:
        """Clips of each class."""
        labels = Counter(label for trial in self.trials for label in trial.labels)
        return [labels[label] for label in range(classes)]


@dataclass(frozen=True)
class VideoData:
    """Videos with the names of their classes; `notes` are lines to print before training."""

    videos: Sequence[Video]
    classes: Sequence[str]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Parts:
    """Training and validation videos: no video is in both."""

    train: Sequence[Video]
    val: Sequence[Video]


def split_by_video(data: VideoData, val_share: float, seed: int) -> Parts:
    """Training and validation videos whose classes are spread alike.

    Of many shuffles that `seed` gives, the one is taken that leaves no class out of training,
    then none out of validation, and whose shares come closest to those of all videos.
    """
    videos = data.videos
    if len(videos) < 2:
        raise DataError(
            f"{len(videos)} video cannot be split into training and validation; clips of one "
            "video must not be in both: add videos",
            code="MGT302",
        )
    counts = np.array([video.class_counts(len(data.classes)) for video in videos])
    total = counts.sum(0)
    occurs = total > 0
    val_count = min(len(videos) - 1, max(1, round(val_share * len(videos))))
    random = np.random.default_rng(seed)
    best: tuple[float, ...] | None = None
    chosen = np.arange(val_count)
    # Trying many shuffles is simpler than an exact split, and good enough for rare classes.
    for _ in range(SHUFFLES):
        picked = random.permutation(len(videos))[:val_count]
        val = counts[picked].sum(0)
        missing_train = int((occurs & (total == val)).sum())
        missing_val = int((occurs & (val == 0)).sum())
        share = val[occurs] / total[occurs]
        score = (missing_train, missing_val, float(np.abs(share - val.sum() / total.sum()).sum()))
        if best is None or score < best:
            best, chosen = score, picked
    held_out = set(chosen.tolist())
    return Parts(
        train=[video for number, video in enumerate(videos) if number not in held_out],
        val=[video for number, video in enumerate(videos) if number in held_out],
    )


def class_counts(videos: Sequence[Video], classes: int) -> Tensor:
    """Clips of each class over all videos."""
    return torch.tensor([video.class_counts(classes) for video in videos]).sum(0)


def class_weights(counts: Tensor, names: Sequence[str], cap: float) -> Tensor:
    """N / (C n) of each class, at most `cap`. A class without a clip is an error."""
    absent = [name for name, count in zip(names, counts.tolist(), strict=True) if count == 0]
    if absent:
        raise DataError(
            f"no training clip shows {', '.join(absent)}; annotate it in more videos (one of them "
            "must be left for training), or take it out of the annotations and classes.txt"
        )
    return (counts.sum() / (len(counts) * counts.double())).clamp(max=cap).float()


def frames_around(centre: int, trial: Trial, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`count` frame numbers with `centre` in the middle.

    Beyond an end of the trial its last frame on that side is repeated.
    """
    first = centre - count // 2
    return np.arange(first, first + count).clip(trial.first, trial.last)


class Clips(Dataset[tuple[Tensor, int]]):
    """A clip around every labelled frame, uint8 of (frames, size, size), with its label."""

    def __init__(self, videos: Sequence[Video], count: int) -> None:
        self.videos = videos
        self.count = count
        self.places = [
            (number, trial, centre, label)
            for number, video in enumerate(videos)
            for trial in video.trials
            for centre, label in zip(trial.frames, trial.labels, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number, trial, centre, label = self.places[index]
        frames = self.videos[number].frames[frames_around(centre, trial, self.count)]
        return torch.as_tensor(frames), label

    def in_memory(self) -> TensorDataset:
        """The same clips as tensors, which are gathered without a Python loop."""
        clips = torch.stack([self[index][0] for index in range(len(self))])
        return TensorDataset(clips, torch.tensor([label for *_, label in self.places]))


def as_dataset(clips: Clips, memory_gib: float) -> Dataset[Any]:
    """Clips as tensors where they fit into `memory_gib`, else read one by one by the workers."""
    bytes_each = clips[0][0].numel() if len(clips) else 0
    return clips.in_memory() if len(clips) * bytes_each <= memory_gib * 2**30 else clips


# Clips are turned and shifted as a whole: what moves in them moves as before


def shift(clips: Tensor, random: SampleRandom) -> Tensor:
    """Each clip moved by up to an eighth of its frame; its edge pixels fill the gap."""
    size = clips.shape[-1]
    reach = size // REACH
    draws = random.uniform(2)
    moved = (draws * (2 * reach + 1)).long() - reach
    ticks = torch.arange(size, device=clips.device)
    rows, columns = (ticks + moved.unsqueeze(2)).clamp(0, size - 1).unbind(1)
    clips = clips.gather(2, rows[:, None, :, None].expand_as(clips))
    return clips.gather(3, columns[:, None, None, :].expand_as(clips))


def turn(clips: Tensor, random: SampleRandom) -> Tensor:
    """Each clip turned by 0 to 3 quarters. Left turns stay left turns: nothing is mirrored."""
    quarter, half = (random.uniform(2) < 0.5).view(-1, 2, 1, 1, 1).unbind(1)
    clips = torch.where(quarter, clips.transpose(2, 3).flip(3), clips)
    return torch.where(half, clips.flip(2, 3), clips)


@dataclass(frozen=True)
class AugmentClips:
    """Moves the clips of a `(clips, labels)` batch."""

    kind: Literal["shift", "turn"]

    def __call__(self, batch: Any, random: SampleRandom) -> Any:
        clips, labels = batch
        if self.kind == "turn":
            clips = turn(clips, random)
        return [shift(clips, random), labels]
