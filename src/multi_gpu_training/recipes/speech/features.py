"""From sound to log-mel features, and SpecAugment: tensor operations that run where the model does.

No length is read on the host and no shape depends on values, so that a step can be one graph.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DRAWS = 8  # random numbers of a sample: place and width of two bands and two stretches of time
FLOOR = 1e-6  # power below which all sound is silence


class LogMel(nn.Module):
    """16-bit sound (batch, samples) -> features (batch, frames, mels) of mean 0 and spread 1.

    Each utterance is normalised by its own frames. Frames behind its end are zero; what was
    padded there changes nothing.
    """

    window: Tensor
    filters: Tensor

    def __init__(self, sample_rate: int, mels: int, window_s: float = 0.025, hop_s: float = 0.01):
        super().__init__()
        self.sample_rate = sample_rate
        self.mels = mels
        self.hop = round(hop_s * sample_rate)
        self.width = round(window_s * sample_rate)
        self.points = 1 << (self.width - 1).bit_length()
        window = torch.hann_window(self.width, periodic=True, dtype=torch.float64)
        self.register_buffer("window", window.float(), persistent=False)
        filters = mel_filters(sample_rate, self.points, mels)
        self.register_buffer("filters", filters.float(), persistent=False)

    def lengths(self, samples: Tensor) -> Tensor:
        """Frames of utterances with so many samples."""
        return samples // self.hop + 1

    def forward(self, sound: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and how many frames of each utterance are its own."""
        with torch.autocast(sound.device.type, enabled=False):
            wave = sound.to(self.window.dtype) / 32768.0
            wave = wave * inside(samples, sound.shape[1])
            # Frame t is centred on sample t * hop; the ends are silence.
            wave = F.pad(wave, (self.width // 2, self.width - self.width // 2))
            frames = wave.unfold(1, self.width, self.hop)[:, : sound.shape[1] // self.hop + 1]
            power = torch.fft.rfft(frames * self.window, n=self.points).abs().square()
            levels = (power @ self.filters).clamp(min=FLOOR).log()
            lengths = self.lengths(samples)
            return normalise(levels, lengths), lengths


def normalise(levels: Tensor, lengths: Tensor) -> Tensor:
    """Mean 0 and spread 1 of each band over the frames of the utterance; zero behind its end."""
    mask = inside(lengths, levels.shape[1]).unsqueeze(2)
    count = lengths.view(-1, 1, 1).to(levels.dtype)
    mean = torch.where(mask, levels, 0.0).sum(1, keepdim=True) / count
    apart = torch.where(mask, levels - mean, 0.0)
    spread = (apart.square().sum(1, keepdim=True) / count).sqrt()
    return apart / (spread + 1e-2)


def inside(lengths: Tensor, size: int) -> Tensor:
    """(batch, size): whether a place lies before the end of its utterance."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def mel_filters(sample_rate: int, points: int, mels: int) -> Tensor:
    """(points / 2 + 1, mels): triangles that are evenly spaced on the mel scale; float64."""

    def to_mel(hertz: float) -> float:
        return 2595.0 * math.log10(1.0 + hertz / 700.0)

    edges = torch.linspace(to_mel(20.0), to_mel(sample_rate / 2), mels + 2, dtype=torch.float64)
    hertz = 700.0 * (10.0 ** (edges / 2595.0) - 1.0)
    bins = torch.arange(points // 2 + 1, dtype=torch.float64)[:, None] * sample_rate / points
    left, centre, right = hertz[:-2], hertz[1:-1], hertz[2:]
    # A triangle may be narrower than a bin; then its nearest bin still hears it.
    left = torch.minimum(left, centre - sample_rate / points)
    right = torch.maximum(right, centre + sample_rate / points)
    rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
    return torch.minimum(rising, falling).clamp(min=0.0)


def spec_augment(
    features: Tensor, lengths: Tensor, draws: Tensor, bands: float, time: float
) -> Tensor:
    """Features with two bands and two stretches of time set to zero, their mean.

    `draws` are DRAWS numbers in [0, 1) for each utterance, `bands` and `time` how much of all
    bands and of its frames one mask may take at most. After Park et al. 2019, without warping.
    """
    draws = draws.to(features.dtype)
    mels = features.new_full((features.shape[0],), features.shape[2])
    hidden = torch.zeros_like(features, dtype=torch.bool)
    for mine in draws.split(4, 1):  # of one mask over bands and one over time
        band = stretch(mine[:, :2], mels, bands, features.shape[2])
        frames = stretch(mine[:, 2:], lengths.to(features.dtype), time, features.shape[1])
        hidden |= band[:, None] | frames[:, :, None]
    return torch.where(hidden, 0.0, features)


def stretch(draws: Tensor, total: Tensor, share: float, size: int) -> Tensor:
    """(batch, size): True on a stretch of up to `share` of `total`, somewhere inside it."""
    width = draws[:, 0] * share * total
    start = draws[:, 1] * (total - width)
    places = torch.arange(size, device=draws.device)
    return (places >= start[:, None]) & (places < (start + width)[:, None])
