"""Sound files as 16-bit mono samples of one rate."""

from __future__ import annotations

import math
import wave
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import library

# What an utterance may be. 2**26 values are 70 minutes of one channel at 16 kHz.
SLOWEST, FASTEST, MOST_CHANNELS, MOST_VALUES = 1_000, 768_000, 64, 2**26
MARGIN = 2  # hundredths of a second that stay before and behind the voice
MOST_KERNELS = 2**23  # numbers in the filters of a resampling


@dataclass(frozen=True)
class Header:
    """What a sound file says about itself."""

    rate: int
    channels: int
    samples: int

    def samples_at(self, rate: int) -> int:
        """Samples after resampling to `rate`."""
        return -(-self.samples * rate // self.rate)

    def problem(self) -> str | None:
        """What no utterance is like; its samples would fill the memory."""
        if not (SLOWEST <= self.rate <= FASTEST and 1 <= self.channels <= MOST_CHANNELS):
            return (
                f"{self.channels} channels of {self.rate:,} Hz; use up to {MOST_CHANNELS} of "
                f"{SLOWEST:,} to {FASTEST:,} Hz"
            )
        if self.samples * self.channels > MOST_VALUES:
            return (
                f"{self.samples / self.rate / 60:,.0f} minutes in {self.channels} channels of "
                f"{self.rate:,} Hz are too long for one utterance; cut it into shorter ones"
            )
        return None


def read_header(path: Path) -> Header:
    """Rate, channels and length of a sound file, without its samples."""
    header = _read_header(path)
    problem = header.problem()
    if problem is not None:
        raise DataError(f"{path}: {problem}")
    return header


def _read_header(path: Path) -> Header:
    if not path.is_file():  # opening a FIFO would wait for whoever is at its other end
        raise DataError(f"{path} is not a regular file; remove it")
    plain = _read_plain_wav(path, samples=False)
    if plain is not None:
        return plain[0]
    soundfile = _soundfile(path)
    try:
        info = soundfile.info(str(path))
    except RuntimeError as error:  # libsndfile's errors are subclasses of it
        raise no_audio(path, error) from None
    return Header(int(info.samplerate), int(info.channels), int(info.frames))


def read_sound(path: Path, rate: int) -> Tensor:
    """The whole file as int16 of (samples,), channels averaged, at `rate` samples a second."""
    read_header(path)  # it may have changed since it was looked at
    plain = _read_plain_wav(path, samples=True)
    if plain is not None:
        found, values = plain[0].rate, plain[1]
    else:
        values, found = _decoded(path)
    sound = torch.from_numpy(np.array(values, dtype=np.int16))
    if sound.shape[1] == 1 and found == rate:
        return sound[:, 0]
    mono = sound.float().mean(1)
    if found != rate:
        mono = resample(mono, int(found), rate)
    return mono.round().clamp(-32768, 32767).to(torch.int16)


def _decoded(path: Path) -> tuple[Any, int]:
    """The samples of any sound file as int16, and their rate."""
    soundfile = _soundfile(path)
    try:
        # Floats between -1 and 1 are not scaled when they are read as integers: all would be 0.
        floats = soundfile.info(str(path)).subtype in ("FLOAT", "DOUBLE")
        kind = "float32" if floats else "int16"
        values, rate = soundfile.read(str(path), dtype=kind, always_2d=True)
    except RuntimeError as error:  # libsndfile's errors are subclasses of it
        raise no_audio(path, error) from None
    if floats:
        if not np.isfinite(values).all():
            raise DataError(f"{path} has samples that are NaN or infinite; remove it")
        values = np.round(np.clip(values, -1.0, 32767 / 32768) * 32768.0)
    return values, int(rate)


def trimmed(sound: Tensor, rate: int, decibels: float, shortest: int = 0) -> Tensor:
    """(samples,) without the silence at both ends: what lies so far below the loudest moment.

    Sound that would become shorter than `shortest` is left as it is.
    """
    size = max(1, rate // 100)
    moments = len(sound) // size
    if not decibels or moments < 2:
        return sound
    power = sound[: moments * size].view(moments, size).double().square().mean(1)
    loud = (power > power.max() * 10 ** (-decibels / 10)).nonzero().flatten()
    if not len(loud):  # silence alone
        return sound
    start = max(0, int(loud[0]) - MARGIN) * size
    kept = sound[start : (int(loud[-1]) + 1 + MARGIN) * size]
    return kept if len(kept) >= max(shortest, 2 * size) else sound


def _read_plain_wav(path: Path, samples: bool) -> tuple[Header, Any] | None:
    """A WAV of 16-bit samples needs no library; None for everything else."""
    if path.suffix.lower() != ".wav":
        return None
    try:
        with wave.open(str(path)) as file:
            header = Header(file.getframerate(), file.getnchannels(), file.getnframes())
            if file.getsampwidth() != 2 or not header.channels or not header.rate:
                return None
            room = path.stat().st_size // (2 * header.channels)
            if header.samples > room:  # the head is not believed
                raise DataError(
                    f"{path} announces {header.samples:,} samples, but has room for {room:,} at "
                    "most; fetch it again or remove it"
                )
            raw = file.readframes(header.samples) if samples else b""
    except (wave.Error, EOFError, MemoryError, ValueError):
        return None
    except OSError as error:
        raise no_audio(path, error) from None
    return header, np.frombuffer(raw, dtype="<i2").reshape(-1, header.channels)


def _soundfile(path: Path) -> Any:
    needed = f"{path} is not a 16-bit WAV file; soundfile reads other formats"
    return library("soundfile", needed, extra="speech")


def no_audio(path: Path, error: Exception) -> DataError:
    reason = str(error).splitlines()[0].rstrip(".")
    return DataError(f"{path} cannot be read as audio ({reason}); fetch it again or remove it")


def resampling_problem(found: int, wanted: int) -> str | None:
    """Why sound of one rate cannot become one of another; its filters would fill the memory."""
    common = math.gcd(found, wanted)
    up, down = wanted // common, found // common
    if up * down <= MOST_KERNELS:
        return None
    return (
        f"sound of {found:,} Hz cannot be resampled to {wanted:,} Hz: as {up:,} to {down:,} that "
        f"takes too many filters; convert the files first, as in ffmpeg -i IN -ar {wanted} OUT"
    )


def resample(sound: Tensor, found: int, wanted: int) -> Tensor:
    """(samples,) at another rate, through a low-pass filter that keeps both rates honest."""
    common = math.gcd(found, wanted)
    up, down = wanted // common, found // common
    kernels, reach = _resampling_kernels(up, down)
    padded = F.pad(sound.view(1, 1, -1).float(), (reach, reach + down))
    phases = F.conv1d(padded, kernels, stride=down)  # one output phase a kernel
    return phases[0].T.reshape(-1)[: -(-len(sound) * up // down)]


@lru_cache(maxsize=16)
def _resampling_kernels(up: int, down: int, zeros: int = 12) -> tuple[Tensor, int]:
    """A windowed sinc for each of the `up` places that an output sample can have."""
    cutoff = 0.97 * min(1.0, up / down)  # below the limit: no filter is infinitely steep
    reach = math.ceil(zeros / cutoff)
    at = torch.arange(-reach, reach + down + 1, dtype=torch.float64)
    phase = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    distance = (at - phase) * cutoff
    window = torch.cos(distance.clamp(-zeros, zeros) * math.pi / (2 * zeros)).square()
    kernels = torch.sinc(distance) * window * cutoff
    return kernels.float().unsqueeze(1), reach
