"""More voices for training, spoken by espeak-ng: a formant synthesiser with many of them.

It says what the training transcripts say. Each voice is an accent of the language, a speaker of
espeak-ng's, a pitch and a pace, drawn by the seed: every rank gets the same.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.speech.audio import resample
from multi_gpu_training.recipes.user_data import listed

PROGRAM = "espeak-ng"
MOST_TEXTS = 20  # that one voice says
PITCHES, PACES = (20, 80), (130, 240)  # of 0 to 99; words a minute
# Effects, not people.
STRANGE = re.compile(r"robo|whisper|half-life|fast|demonic|tweaky|storm|croak", re.IGNORECASE)
SPEAKING = 8  # programs at a time
MOST_S = 120
EDGE = 0.01  # of the loudest sample: what is quieter at the ends is cut off
MARGIN_S = 0.02


@dataclass(frozen=True)
class SyntheticVoice:
    """What espeak-ng is told."""

    name: str
    pitch: int
    pace: int


@dataclass(frozen=True)
class Synthesis:
    """How many voices, of which language of espeak-ng, drawn by which seed."""

    voices: int
    language: str = "en"
    seed: int = 0


def speak_with(asked: Synthesis, texts: Sequence[str], rate: int) -> list[tuple[Tensor, str]]:
    """Utterances as (sound, text), int16 at `rate`; each voice says up to MOST_TEXTS texts."""
    distinct = sorted(set(texts))
    jobs = []
    for number, voice in enumerate(choose_voices(asked)):
        generator = torch.Generator().manual_seed(derive_seed(asked.seed, 1, number))
        chosen = torch.randperm(len(distinct), generator=generator)[:MOST_TEXTS].tolist()
        jobs += [(voice, distinct[place]) for place in sorted(chosen)]
    with ThreadPoolExecutor(SPEAKING) as pool:
        sounds = pool.map(lambda job: spoken(job[0], job[1], rate), jobs)
        return [(sound, text) for sound, (_, text) in zip(sounds, jobs, strict=True)]


def choose_voices(asked: Synthesis) -> list[SyntheticVoice]:
    """Accents and speakers in an order that the seed draws, the same ones again where they end."""
    _program(asked.voices)
    accents = [name for name in _names(asked.language) if not name.startswith(("mb/", "!v/"))]
    if not accents:
        languages = sorted({line.split()[1] for line in _listing("")})
        raise ConfigError(
            f"synthetic_language={asked.language!r}: espeak-ng does not speak it; it speaks "
            f"{listed(languages, 20)}"
        )
    people = [name.removeprefix("!v/") for name in _names("variant") if not STRANGE.search(name)]
    pairs = list(product(accents, people or [""]))
    generator = torch.Generator().manual_seed(derive_seed(asked.seed, 0))
    order = torch.randperm(len(pairs), generator=generator).tolist()
    voices = []
    for number in range(asked.voices):
        accent, person = pairs[order[number % len(order)]]
        pitch, pace = (
            int(torch.randint(low, high + 1, (), generator=generator))
            for low, high in (PITCHES, PACES)
        )
        voices.append(SyntheticVoice(f"{accent}+{person}" if person else accent, pitch, pace))
    return voices


def version() -> str:
    return _output("--version").decode(errors="replace").partition("Data at")[0].strip()


def spoken(voice: SyntheticVoice, text: str, rate: int) -> Tensor:
    """A text as int16 samples at `rate`, without the silence around it."""
    pitch, pace = str(voice.pitch), str(voice.pace)
    wav = _output("-z", "-v", voice.name, "-p", pitch, "-s", pace, "--stdout", text)
    at = wav.find(b"data")
    if not wav.startswith(b"RIFF") or at < 0:
        raise DataError(f"espeak-ng -v {voice.name} {text!r:.60} gave no sound; install it anew")
    [found] = struct.unpack_from("<I", wav, 24)
    body = wav[at + 8 :]  # a stream's header does not know its length
    sound = torch.frombuffer(bytearray(body[: len(body) // 2 * 2]), dtype=torch.int16).float()
    loud = (sound.abs() > EDGE * sound.abs().max().clamp(min=1)).nonzero().flatten()
    if not len(loud):
        raise DataError(f"espeak-ng -v {voice.name} says nothing for {text!r:.60}")
    margin = round(MARGIN_S * found)
    sound = sound[max(0, int(loud[0]) - margin) : int(loud[-1]) + margin]
    if found != rate:
        sound = resample(sound, found, rate)
    return sound.round().clamp(-32768, 32767).to(torch.int16)


@lru_cache(maxsize=8)
def _listing(language: str) -> list[str]:
    shown = _output("--voices" + (f"={language}" if language else ""))
    return shown.decode(errors="replace").splitlines()[1:]


def _names(language: str) -> list[str]:
    """The files of the voices, as -v takes them, in a fixed order."""
    return sorted({line.split()[4] for line in _listing(language) if len(line.split()) > 4})


def _program(voices: int) -> str:
    found = shutil.which(PROGRAM)
    if found is None:
        raise DataError(
            f"synthetic_voices={voices} are spoken by espeak-ng, which is not installed; install "
            "the package espeak-ng (Debian: apt install espeak-ng; macOS: brew install "
            "espeak-ng), or drop the option",
            code="MGT105",
        )
    return found


def _output(*words: str) -> bytes:
    try:
        ran = subprocess.run(
            [PROGRAM, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=MOST_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"espeak-ng {' '.join(words)!r:.100} failed: {error!s:.200}") from None
    if ran.returncode:
        told = ran.stderr.decode(errors="replace").strip()
        raise DataError(f"espeak-ng {' '.join(words)!r:.100} failed: {told:.200}")
    return ran.stdout
