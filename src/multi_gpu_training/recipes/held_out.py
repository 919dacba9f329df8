"""Which samples are held out for validation where the data do not say: drawn by the seed, of every
class alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def held_out(
    count: int, share: float, seed: int, labels: Sequence[Hashable] | None = None
) -> Tensor:
    """True for the samples to validate with, at least one of two and more.

    With `labels`, that share of each class; a class of one sample is for training. It depends on
    nothing but the arguments: every rank and every resume draws the same.
    """
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(count, dtype=torch.bool)
    groups: dict[Hashable, list[int]] = {}
    for index in range(count):
        groups.setdefault(labels[index] if labels is not None else None, []).append(index)
    for members in groups.values():
        wanted = min(max(1, round(len(members) * share)), len(members) - 1)
        drawn = torch.randperm(len(members), generator=generator)[:wanted]
        held[torch.tensor(members)[drawn]] = True
    return held
