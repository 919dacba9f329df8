"""The recogniser: log-mel features, subsampling, LMU blocks, one character a frame."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from multi_gpu_training.recipes.speech.features import (
    BEAT_S,
    HOP_S,
    LogMel,
    at_pace,
    inside,
    spec_augment,
)
from multi_gpu_training.recipes.speech.lmu import LMU

SizeName = Literal["small", "base"]
NormName = Literal["layer", "batch"]


@dataclass(frozen=True)
class Size:
    """What a recogniser is made of. theta counts frames after subsampling.

    subsampling: how many frames of 10 ms become one, a power of two.
    """

    width: int
    blocks: int
    channels: int
    order: int
    theta: float
    subsampling: int
    kernel: int
    mels: int
    dropout: float


SIZES: dict[SizeName, Size] = {
    # Words of half a second: few frames, and one of every two is kept.
    "small": Size(112, 3, 8, 16, 24.0, 2, 5, 40, 0.1),
    # Sentences: 7.17 million parameters.
    "base": Size(256, 8, 32, 32, 64.0, 4, 3, 80, 0.1),
}


class Recogniser(nn.Module):
    """16-bit sound (batch, samples) -> logits (batch, frames, classes) and their lengths."""

    def __init__(
        self,
        size: Size,
        classes: int,
        sample_rate: int,
        norm: NormName = "layer",
        streaming: bool = False,
        normalise: str = "bands",
    ) -> None:
        super().__init__()
        self.size = size
        self.features = LogMel(sample_rate, size.mels, normalise)
        halvings = size.subsampling.bit_length() - 1
        widths = [size.mels] + [size.width] * halvings
        self.subsampling = nn.ModuleList(
            Halving(a, b, size.kernel, norm) for a, b in pairwise(widths)
        )
        self.blocks = nn.ModuleList(Block(size, streaming) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, classes)

    def forward(
        self,
        sound: Tensor,
        samples: Tensor,
        draws: Tensor | None = None,
        masks: tuple[float, float] = (0.0, 0.0),
        warps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`draws` are the random numbers of SpecAugment, `masks` its shares of bands and time;
        `warps` (batch, 2 and more) makes other voices (see `LogMel`), at other paces."""
        x, lengths = self.features(sound, samples, None if warps is None else warps[:, :2])
        if warps is not None and warps.shape[1] > 2:
            x, lengths = at_pace(x, lengths, warps[:, 2:], round(BEAT_S / HOP_S))
        if draws is not None:
            x = spec_augment(x, lengths, draws, *masks)
        for halving in self.subsampling:
            x, lengths = halving(x, lengths)
        mask = inside(lengths, x.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)), lengths

    def lengths(self, samples: Tensor) -> Tensor:
        """Output frames of utterances with so many samples."""
        frames = self.features.lengths(samples)
        for _ in self.subsampling:
            frames = halved(frames)
        return frames


class Halving(nn.Module):
    """Half the frames: a convolution over time. Frames behind the end of an utterance are zero
    before and after, so that padding changes nothing."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: NormName) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(inputs, outputs, kernel, stride=2, padding=kernel // 2)
        self.norm: nn.Module
        self.norm = nn.BatchNorm1d(outputs) if norm == "batch" else nn.LayerNorm(outputs)
        self.activation = nn.GELU()

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.convolution(x.transpose(1, 2))
        # LayerNorm wants the channels last, BatchNorm in the middle.
        if isinstance(self.norm, nn.LayerNorm):
            x = self.norm(x.transpose(1, 2))
        else:
            x = self.norm(x).transpose(1, 2)
        lengths = halved(lengths)
        mask = inside(lengths, x.shape[1]).unsqueeze(2)
        return torch.where(mask, self.activation(x), 0.0), lengths


class Block(nn.Module):
    """An LMU and a feed-forward part, each beside a shortcut. Half of what the LMU remembers is
    to come, or with `streaming` nothing."""

    def __init__(self, size: Size, streaming: bool) -> None:
        super().__init__()
        width = size.width
        self.norm_memory = nn.LayerNorm(width)
        self.lmu = LMU(
            width,
            width,
            size.order,
            size.theta,
            size.channels,
            nn.GELU(),
            ahead=0 if streaming else size.channels // 2,
        )
        self.norm_forward = nn.LayerNorm(width)
        self.forward_part = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.lmu(self.norm_memory(x), mask))
        out: Tensor = x + self.dropout(self.forward_part(self.norm_forward(x)))
        return out


def halved(frames: Tensor) -> Tensor:
    """Frames that a convolution with stride 2 leaves."""
    return (frames + 1) // 2
