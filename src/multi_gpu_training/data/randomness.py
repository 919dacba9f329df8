"""Random numbers that belong to a sample, drawn on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Odd 64-bit constants, those of splitmix64 among them, as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_DRAW = 0xD1342543DE82EF95 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_24_BITS = 2**24


class SampleRandom:
    """Draws for the samples of a batch: each a pure function of (seed, epoch, sample, draw).

    What a sample meets does not depend on the rank that holds it, on the batch around it or on
    what was drawn before a resume. Everything is tensor arithmetic, without a generator's state,
    so that it can be part of a CUDA graph.

    samples: the numbers of the batch's samples in the dataset, int64 of (batch,).
    key: what (seed, epoch) became; a whole number, or an int64 tensor of one element.
    """

    def __init__(self, samples: Tensor, key: Tensor | int) -> None:
        self._base = samples * _STEP + key
        self._draws = 0

    def uniform(self, *shape: int) -> Tensor:
        """float32 of (batch, *shape), evenly spread over [0, 1)."""
        return self._bits(shape).to(torch.float32).mul_(1 / _24_BITS)

    def normal(self, *shape: int) -> Tensor:
        """float32 of (batch, *shape), with mean 0 and spread 1."""
        # 1 - u lies in (0, 1]: the logarithm of zero never occurs.
        radius = self.uniform(*shape).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
        return radius * self.uniform(*shape).mul_(2 * math.pi).cos_()

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 of (batch, *shape), each of low, ..., high - 1 equally likely."""
        # 24 bits against a span of thousands: the largest unevenness is span / 2^24.
        return low + self._bits(shape).mul_(high - low).floor_divide_(_24_BITS)

    def _bits(self, shape: tuple[int, ...]) -> Tensor:
        """24 random bits an element, as int64 of (batch, *shape)."""
        count = math.prod(shape)
        places = torch.arange(count, device=self._base.device)
        mixed = _mixed(self._base.unsqueeze(1) + (places + self._draws) * _DRAW)
        self._draws += count
        return ((mixed >> 40) & (_24_BITS - 1)).view(len(self._base), *shape)


def _mixed(value: Tensor) -> Tensor:
    """splitmix64's finish but for its last fold, which only the low bits need: each of the upper
    bits depends on every bit of `value`. Shifts keep the sign, so what comes in is masked."""
    value = (value ^ ((value >> 30) & (2**34 - 1))) * _MIX_1
    return (value ^ ((value >> 27) & (2**37 - 1))) * _MIX_2
