"""From sound to log-mel features, and SpecAugment: tensor operations that run where the model does.

No length is read on the host and no shape depends on values, so that a step can be one graph.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DRAWS = 8  # random numbers of a sample: place and width of two bands and two stretches of time
FLOOR = 1e-6  # power below which all sound is silence
QUIET = 1e-3  # of the loudness of an utterance: what lies below it tells of rooms, not of words
HEARD_BEFORE = 20.0  # frames
BENDS = 3  # of a mean spectrum that are a recording's: its level, its tilt, its curvature
HOP_S = 0.01  # from frame to frame
BEAT_S = 0.1  # of a varied utterance that pass at one pace
TICKS = 1024  # of a frame: whole numbers add up alike on every device
NormaliseName = Literal["auto", "tilt", "utterance", "running", "bands"]


class LogMel(nn.Module):
    """16-bit sound (batch, samples) -> features (batch, frames, mels) of mean 0 and spread 1.

    Each utterance is normalised by its own frames, with normalise=running by those up to now.
    Frames behind its end are zero; what was padded there changes nothing.
    """

    window: Tensor
    filters: Tensor
    bins: Tensor
    edges: Tensor

    def __init__(
        self,
        sample_rate: int,
        mels: int,
        normalise: str = "bands",
        window_s: float = 0.025,
        hop_s: float = HOP_S,
    ):
        super().__init__()
        self.normalise = normalise
        self.sample_rate = sample_rate
        self.mels = mels
        self.hop = round(hop_s * sample_rate)
        self.width = round(window_s * sample_rate)
        self.points = 1 << (self.width - 1).bit_length()
        window = torch.hann_window(self.width, periodic=True, dtype=torch.float64)
        self.register_buffer("window", window.float(), persistent=False)
        filters = mel_filters(sample_rate, self.points, mels)
        self.register_buffer("filters", filters.float(), persistent=False)
        bins, edges = mel_bins(sample_rate, self.points, mels)
        self.register_buffer("bins", bins.float(), persistent=False)
        self.register_buffer("edges", edges.float(), persistent=False)

    def lengths(self, samples: Tensor) -> Tensor:
        """Frames of utterances with so many samples."""
        return samples // self.hop + 1

    def forward(
        self, sound: Tensor, samples: Tensor, warps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features, and how many frames of each utterance are its own.

        `warps` (batch, 2) scale the frequencies of each utterance, as `warped_bins` says.
        """
        with torch.autocast(sound.device.type, enabled=False):
            wave = sound.to(self.window.dtype) / 32768.0
            wave = wave * inside(samples, sound.shape[1])
            # Frame t is centred on sample t * hop; the ends are silence.
            wave = F.pad(wave, (self.width // 2, self.width - self.width // 2))
            frames = wave.unfold(1, self.width, self.hop)[:, : sound.shape[1] // self.hop + 1]
            power = torch.fft.rfft(frames * self.window, n=self.points).abs().square()
            filters = self.filters if warps is None else self.warped_filters(warps)
            return self.normalised(power @ filters, samples)

    def normalised(self, power: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the power in each band, and how many frames count."""
        lengths = self.lengths(samples)
        if self.normalise == "bands":
            return normalise(power.clamp(min=FLOOR).log(), lengths), lengths
        ways = {
            "tilt": normalise_tilt,
            "utterance": normalise_utterance,
            "running": normalise_running,
        }
        return ways[self.normalise](power, lengths), lengths

    def warped_filters(self, warps: Tensor) -> Tensor:
        """(batch, points / 2 + 1, mels): what each band hears when the voice is another."""
        warps = warps.to(self.filters.dtype)
        nyquist = self.sample_rate / 2
        spacing = self.sample_rate / self.points
        bins = warped_bins(self.bins, nyquist, warps[:, :1], warps[:, 1:]).unsqueeze(2)
        left, centre, right = self.edges[:-2], self.edges[1:-1], self.edges[2:]
        # As in `mel_filters`, where bins now lie further apart.
        apart = (spacing * warps.prod(1)).view(-1, 1, 1)
        left, right = torch.minimum(left, centre - apart), torch.maximum(right, centre + apart)
        rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
        return torch.minimum(rising, falling).clamp(min=0.0)


def warped_bins(bins: Tensor, nyquist: float, pitch: Tensor, tract: Tensor) -> Tensor:
    """(batch, bins): where each frequency comes to lie.

    A vocal tract of another length scales frequencies up to a bend, and what lies above so that
    the highest one stays (VTLP, Jaitly and Hinton 2013). Pitch then scales all of them.
    """
    bend = 0.8 * nyquist * tract.clamp(max=1.0)  # where the bend comes to lie
    above = nyquist - (nyquist - bend) / (nyquist - bend / tract) * (nyquist - bins)
    return pitch * torch.where(bins <= bend / tract, bins * tract, above)


def normalise(levels: Tensor, lengths: Tensor) -> Tensor:
    """Mean 0 and spread 1 of each band over the frames of the utterance; zero behind its end."""
    mask = inside(lengths, levels.shape[1]).unsqueeze(2)
    count = lengths.view(-1, 1, 1).to(levels.dtype)
    mean = torch.where(mask, levels, 0.0).sum(1, keepdim=True) / count
    apart = torch.where(mask, levels - mean, 0.0)
    spread = (apart.square().sum(1, keepdim=True) / count).sqrt()
    return apart / (spread + 1e-2)


def normalise_utterance(power: Tensor, lengths: Tensor) -> Tensor:
    """Levels over the loudness of the utterance, down to QUIET; then by `normalise`.

    How loud it was recorded, and how quiet its pauses are, then tells nothing.
    """
    return normalise(levels_over_loudness(power, lengths), lengths)


def normalise_tilt(power: Tensor, lengths: Tensor) -> Tensor:
    """Levels over the loudness of the utterance, without the smooth part of their mean over time,
    and with spread 1 over all bands.

    A microphone shapes that smooth part. The rest of the mean tells what was said where words are
    short, and so does which bands change the most.
    """
    levels = levels_over_loudness(power, lengths)
    mask = inside(lengths, levels.shape[1]).unsqueeze(2)
    count = lengths.view(-1, 1, 1).to(levels.dtype)
    bands = levels.shape[2]
    places = (torch.arange(bands, device=levels.device, dtype=levels.dtype) + 0.5) / bands
    orders = torch.arange(BENDS, device=levels.device, dtype=levels.dtype)
    smooth = torch.cos(math.pi * orders[:, None] * places)
    smooth = smooth / smooth.square().sum(1, keepdim=True).sqrt()  # orthonormal rows
    mean = torch.where(mask, levels, 0.0).sum(1, keepdim=True) / count
    apart = torch.where(mask, levels - mean @ smooth.T @ smooth, 0.0)
    spread = (apart.square().sum((1, 2), keepdim=True) / (count * bands)).sqrt()
    return apart / (spread + 1e-2)


def levels_over_loudness(power: Tensor, lengths: Tensor) -> Tensor:
    mask = inside(lengths, power.shape[1]).unsqueeze(2)
    count = lengths.view(-1, 1, 1).to(power.dtype)
    loud = torch.where(mask, power, 0.0).sum(1, keepdim=True).mean(2, keepdim=True) / count
    return (power / loud.clamp(min=FLOOR) + QUIET).log()


def normalise_running(power: Tensor, lengths: Tensor) -> Tensor:
    """The same by what was heard up to each frame: no frame changes what came before it."""
    mask = inside(lengths, power.shape[1]).unsqueeze(2)
    heard = torch.arange(1, power.shape[1] + 1, device=power.device, dtype=power.dtype)
    heard = heard.view(1, -1, 1)
    loud = power.mean(2, keepdim=True).cumsum(1) / heard
    levels = (power / loud.clamp(min=FLOOR) + QUIET).log()
    apart = levels - levels.cumsum(1) / heard
    # As if HEARD_BEFORE frames of spread 1 had been heard: the first ones say little.
    spread = ((apart.square().cumsum(1) + HEARD_BEFORE) / (heard + HEARD_BEFORE)).sqrt()
    return torch.where(mask, apart / spread, 0.0)


def inside(lengths: Tensor, size: int) -> Tensor:
    """(batch, size): whether a place lies before the end of its utterance."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def mel_bins(sample_rate: int, points: int, mels: int) -> tuple[Tensor, Tensor]:
    """Hertz of each bin of a spectrum, and of the mels + 2 edges of the bands; float64."""

    def to_mel(hertz: float) -> float:
        return 2595.0 * math.log10(1.0 + hertz / 700.0)

    edges = torch.linspace(to_mel(20.0), to_mel(sample_rate / 2), mels + 2, dtype=torch.float64)
    hertz = 700.0 * (10.0 ** (edges / 2595.0) - 1.0)
    return torch.arange(points // 2 + 1, dtype=torch.float64) * sample_rate / points, hertz


def mel_filters(sample_rate: int, points: int, mels: int) -> Tensor:
    """(points / 2 + 1, mels): triangles that are evenly spaced on the mel scale; float64."""
    bins, hertz = mel_bins(sample_rate, points, mels)
    bins = bins[:, None]
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


def at_pace(features: Tensor, lengths: Tensor, paces: Tensor, beat: int) -> tuple[Tensor, Tensor]:
    """Features of which `beat` frames at a time pass at another pace (batch, moments), and how many
    there are then."""
    size = features.shape[1]
    speeds = (paces * TICKS).round().long()
    at = torch.arange(size, device=features.device)
    # The pace of a frame is how far it lies behind the one before.
    ticks = speeds[:, (at // beat).clamp(max=speeds.shape[1] - 1)].cumsum(1) - speeds[:, :1]
    last = TICKS * (lengths - 1).unsqueeze(1)
    kept = (ticks <= last).sum(1)
    ticks = torch.minimum(ticks, last.clamp(min=0))
    before = ticks // TICKS
    share = ((ticks - before * TICKS).to(features.dtype) / TICKS).unsqueeze(2)
    rows = torch.arange(len(features), device=features.device).unsqueeze(1)
    early, late = features[rows, before], features[rows, (before + 1).clamp(max=size - 1)]
    # No lerp: its rounding depends on where in a batch a value lies.
    moved = early + (late - early) * share
    return torch.where(inside(kept, size).unsqueeze(2), moved, 0.0), kept


def stretch(draws: Tensor, total: Tensor, share: float, size: int) -> Tensor:
    """(batch, size): True on a stretch of up to `share` of `total`, somewhere inside it."""
    width = draws[:, 0] * share * total
    start = draws[:, 1] * (total - width)
    places = torch.arange(size, device=draws.device)
    return (places >= start[:, None]) & (places < (start + width)[:, None])
