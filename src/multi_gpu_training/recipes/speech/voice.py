"""The built-in synthetic voice: letters as tones, for trying the recipe without any download.

It is no speech. Each letter is a chord of its own, in the pitch and the tempo of the utterance,
with noise under it: enough to learn from and to see a recogniser work in a minute.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.recipes.speech.alphabet import ENGLISH
from multi_gpu_training.recipes.speech.corpora import DIGITS

RATE = 8000
TRAIN, TEST = 384, 64


def speak_all(count: int, seed: int) -> list[tuple[Tensor, str]]:
    """`count` utterances as (sound, text); another seed says other things."""
    return [speak(derive_seed(seed, i)) for i in range(count)]


def speak(seed: int) -> tuple[Tensor, str]:
    """One to four digits as int16 samples at RATE, and their words."""
    random = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 5, (), generator=random))
    words = [DIGITS[int(d)] for d in torch.randint(0, 10, (count,), generator=random)]
    text = " ".join(words)
    pitch, tempo = (0.9 + 0.2 * torch.rand(2, generator=random)).tolist()
    lengths = 0.05 + 0.04 * torch.rand(len(text), generator=random)
    parts = [
        letter(c, round(float(s) * tempo * RATE), pitch) for c, s in zip(text, lengths, strict=True)
    ]
    pause = torch.zeros(round(0.06 * RATE))
    sound = torch.cat([pause, *parts, pause])
    sound = sound + 0.02 * torch.randn(len(sound), generator=random)
    return (sound * 8000).round().clamp(-32768, 32767).to(torch.int16), text


def letter(character: str, samples: int, pitch: float) -> Tensor:
    """Two tones that belong to the character, fading in and out; silence for a space."""
    number = ENGLISH.index(character)
    if character == " ":
        return torch.zeros(samples)
    time = torch.arange(samples) / RATE
    low, high = 220.0 * 1.14 ** (number % 7), 1000.0 * 1.24 ** (number // 7)
    tones = sum(torch.sin(2 * math.pi * pitch * f * time) for f in (low, high))
    fade = torch.sin(math.pi * (torch.arange(samples) + 0.5) / samples).sqrt()
    return 0.4 * fade * tones
