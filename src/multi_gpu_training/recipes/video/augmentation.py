"""Clips that are turned and shifted as a whole: what moves in them moves as before."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Augment = Literal["auto", "none", "shift", "turn"]
REACH = 8  # a clip moves by up to an eighth of its frame


class Uniform(Protocol):
    """Where the draws come from: numbers in [0, 1) of (batch, *shape)."""

    def uniform(self, *shape: int) -> Tensor: ...


def shift(clips: Tensor, random: Uniform) -> Tensor:
    """Each clip moved by up to an eighth of its frame; its edge pixels fill the gap."""
    size = clips.shape[-1]
    reach = size // REACH
    draws = random.uniform(2)
    moved = (draws * (2 * reach + 1)).long() - reach
    ticks = torch.arange(size, device=clips.device)
    rows, columns = (ticks + moved.unsqueeze(2)).clamp(0, size - 1).unbind(1)
    clips = clips.gather(2, rows[:, None, :, None].expand_as(clips))
    return clips.gather(3, columns[:, None, None, :].expand_as(clips))


def turn(clips: Tensor, random: Uniform) -> Tensor:
    """Each clip turned by 0 to 3 quarters. Left turns stay left turns: nothing is mirrored."""
    quarter, half = (random.uniform(2) < 0.5).view(-1, 2, 1, 1, 1).unbind(1)
    clips = torch.where(quarter, clips.transpose(2, 3).flip(3), clips)
    return torch.where(half, clips.flip(2, 3), clips)


class AugmentClips:
    """Moves the clips of a `(clips, labels)` batch."""

    def __init__(self, kind: Literal["shift", "turn"]) -> None:
        self.kind = kind

    def __call__(self, batch: Any, random: Uniform) -> Any:
        clips, labels = batch
        if self.kind == "turn":
            clips = turn(clips, random)
        return [shift(clips, random), labels]
