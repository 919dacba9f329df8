"""Training utterances as other voices, rooms and microphones would give them.

Tensor operations on the device, keyed by (seed, epoch, utterance): the number of ranks changes
nothing, and a step with them can be one graph. Speed is changed in `dataset`, since it moves the
length; pitch and the vocal tract are warps of the frequency axis, and rhythm is one of time, which
`features` applies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.recipes.speech.ctc import frames_needed
from multi_gpu_training.recipes.speech.dataset import Batch
from multi_gpu_training.recipes.speech.features import BEAT_S, inside

ROOM_S = 0.3  # of an impulse response; what comes later is below hearing here
REVERB_S = (0.1, 0.6)  # time until a room is 60 dB quieter
DIRECT_DB = (0.0, 15.0)  # how much louder the voice is than its room
NOISE_DB = (5.0, 35.0)  # how much louder the voice is than the noise
CURVES = 6  # cosines that a frequency response is drawn from, the k-th 2 / (k + 1) as strong
CONTOUR_S = 0.08  # between two points of a loudness contour
QUIETEST_DB = -30.0  # a moment, beside the whole: below it a compressor does no more
STEEPEST = 2.0  # of a noise: power falls with frequency to this exponent, 0 (white) or more


@dataclass(frozen=True)
class Augmentation:
    """`augment` of a training.

    pitch, vocal_tract: by how much frequencies are scaled at most, as a share.
    noise, reverb: the share of utterances that get some. gain: at most so many decibels.
    equaliser: how many decibels the first curve of a microphone's response takes or adds at most.
    contour: how many decibels each moment is quieter or louder at most, changing smoothly: how
    loud consonants are beside vowels differs from voice to voice.
    compression: by up to this share, differences in loudness become smaller, or larger.
    rhythm: by which share the whole, and each moment of it, lasts longer or shorter at most.
    frame: samples of one output frame, since a text needs so many of them.
    """

    rate: int
    pitch: float
    vocal_tract: float
    noise: float
    reverb: float
    gain: float
    equaliser: float = 0.0
    contour: float = 0.0
    compression: float = 0.0
    rhythm: float = 0.0
    frame: int = 1

    def __call__(self, batch: Batch, random: SampleRandom) -> Batch:
        # What is drawn comes in one piece, so that one switch changes no other's numbers.
        u = random.uniform(9)
        warps = torch.stack([spread(u[:, 0], self.pitch), spread(u[:, 1], self.vocal_tract)], 1)
        sound = batch.sound
        if self.noise or self.reverb or self.gain or self.equaliser:
            sound = self.heard(sound.float(), batch.samples, u[:, 2:], random)
        if self.contour or self.compression:
            sound = self.shaped(sound.float(), batch.samples, random)
        if self.rhythm:
            warps = torch.cat([warps, self.paces(batch, random)], 1)
        return batch._replace(sound=sound, warps=warps)

    def heard(self, sound: Tensor, samples: Tensor, u: Tensor, random: SampleRandom) -> Tensor:
        """Sound as a microphone in a room hears it."""
        taps = round(ROOM_S * self.rate)
        size = sound.shape[1]
        points = even(size + taps + 1)
        mask = inside(samples, size)
        loud = (sound.square() * mask).sum(1, keepdim=True) / samples.clamp(min=1).unsqueeze(1)
        spectrum = torch.fft.rfft(sound * mask, n=points)
        if self.reverb:
            room = self.room(taps, u[:, 0:3], random)
            spectrum = spectrum * (1 + torch.fft.rfft(room, n=points))
        if self.noise:
            spectrum = spectrum + self.hiss(points, loud, u[:, 3:6], random)
        louder = 10 ** ((2 * u[:, 6:7] - 1) * self.gain / 20)
        if self.equaliser:
            louder = louder * self.response(points, random)
        heard: Tensor = torch.fft.irfft(spectrum * louder, n=points)[:, :size]
        return heard

    def response(self, points: int, random: SampleRandom) -> Tensor:
        """(batch, points / 2 + 1): how a microphone weakens or strengthens each frequency, smooth
        on the mel scale."""
        u = 2 * random.uniform(CURVES) - 1
        hertz = torch.arange(points // 2 + 1, device=u.device) * (self.rate / points)
        place = (1 + hertz / 700).log() / math.log1p(self.rate / 2 / 700)
        decibels = torch.zeros_like(u[:, :1] * place)
        # No matrix product: its rounding would depend on how many ranks share the batch.
        for order in range(1, CURVES + 1):
            decibels += u[:, order - 1, None] * torch.cos(math.pi * order * place) * 2 / (order + 1)
        return 10 ** (self.equaliser * decibels / 20)

    def shaped(self, sound: Tensor, samples: Tensor, random: SampleRandom) -> Tensor:
        """Sound whose loudness over time is another."""
        moment = self.rate // 100
        power = F.avg_pool1d(sound.square().unsqueeze(1), moment, ceil_mode=True).squeeze(1)
        size = power.shape[1]
        mask = inside(-(-samples // moment), size)
        mean = torch.where(mask, power, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        level = 10 * (power / mean.clamp(min=1e-6)).clamp(min=10 ** (QUIETEST_DB / 10)).log10()
        decibels = (2 * random.uniform(1) - 1) * self.compression * level
        points = (2 * random.uniform(int(size * 0.01 / CONTOUR_S) + 2) - 1) * self.contour
        at = torch.arange(size, device=sound.device) * (moment / self.rate / CONTOUR_S)
        decibels = decibels + between_points(points, at)
        # From moments to samples, without steps between them.
        at = (torch.arange(sound.shape[1], device=sound.device) + 0.5) / moment - 0.5
        decibels = between_points(F.pad(decibels, (0, 1)), at.clamp(0, size - 1))
        return sound * (decibels * (math.log(10) / 20)).exp()

    def paces(self, batch: Batch, random: SampleRandom) -> Tensor:
        """(batch, moments): how fast each moment passes. No utterance outgrows its row, or becomes
        too short for its text."""
        size = batch.sound.shape[1]
        moments = -(-size // round(BEAT_S * self.rate))
        u = random.uniform(1 + moments)
        paces = spread(u[:, :1], self.rhythm) * spread(u[:, 1:], self.rhythm)
        samples = batch.samples.unsqueeze(1).to(paces.dtype)
        needed = (frames_needed(batch.targets, batch.sizes) * self.frame).clamp(min=1).unsqueeze(1)
        fastest = (samples / needed).clamp(min=1.0)
        return torch.minimum(paces.maximum(samples / size), fastest)

    def room(self, taps: int, u: Tensor, random: SampleRandom) -> Tensor:
        """(batch, taps + 1): what follows the direct sound; all zero where there is no room."""
        at = torch.arange(1, taps + 1, device=u.device) / self.rate
        fading = (-math.log(1000) / between(u[:, 0], REVERB_S).unsqueeze(1) * at).exp()
        echo = random.normal(taps) * fading
        echo = echo / echo.square().sum(1, keepdim=True).sqrt()
        level = 10 ** (-between(u[:, 1], DIRECT_DB) / 20) * (u[:, 2] < self.reverb)
        return F.pad(echo * level.unsqueeze(1), (1, 0))

    def hiss(self, points: int, loud: Tensor, u: Tensor, random: SampleRandom) -> Tensor:
        """The spectrum of noise of a random colour, so much quieter than the voice."""
        waves = points // 2 + 1
        at = torch.arange(waves, device=u.device).clamp(min=points // 256)
        size = (at.log() * (-STEEPEST / 2 * u[:, :1])).exp()
        power = 2 * size.square().sum(1, keepdim=True) / points**2
        wanted = loud * 10 ** (-between(u[:, 1:2], NOISE_DB) / 10) * (u[:, 2:3] < self.noise)
        angle = 2 * math.pi * random.uniform(waves)
        return torch.polar(size * (wanted / power).sqrt(), angle)


def spread(u: Tensor, share: float) -> Tensor:
    """Factors from 1 / (1 + share) to 1 + share, as often above 1 as below."""
    return ((2 * u - 1) * math.log1p(share)).exp()


def between_points(points: Tensor, at: Tensor) -> Tensor:
    """(batch, places): lines from point to point. No lerp and no interpolate: their rounding
    depends on where in a batch a value lies."""
    before = at.long()
    return points[:, before] + points.diff(dim=1)[:, before] * (at - before)


def between(u: Tensor, ends: tuple[float, float]) -> Tensor:
    return ends[0] + (ends[1] - ends[0]) * u


def even(size: int) -> int:
    """A length that Fourier transforms are quick at."""
    return -(-size // 512) * 512
