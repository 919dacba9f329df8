"""Recognisers after training: from a sound file to text, with how sure the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.pipeline import Pipeline, Result, TensorSpec
from multi_gpu_training.recipes.recipe import Job, Options
from multi_gpu_training.recipes.speech.alphabet import Alphabet
from multi_gpu_training.recipes.speech.audio import (
    read_header,
    read_sound,
    resample,
    resampling_problem,
    trimmed,
)
from multi_gpu_training.recipes.speech.convolution_program import without_fourier
from multi_gpu_training.recipes.speech.lexicon import Lexicon
from multi_gpu_training.recipes.speech.objective import Decoder, surest_frames
from multi_gpu_training.recipes.speech.speech_model import Recogniser, Size

EXPORTED_S = 10  # of sound that an exported recogniser takes, where the user sets no length
SOUND_ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".aiff", ".aif", ".opus")


def describe_speech(
    model: Recogniser,
    alphabet: Alphabet,
    rate: int,
    norm: str,
    streaming: bool,
    normalise: str,
    trim: float,
    decoder: str,
    beam_width: int,
    lexicon: list[str] | None,
) -> dict[str, Any]:
    return {
        "recipe": "speech",
        "alphabet": alphabet.characters,
        "model": {
            **asdict(model.size),
            "norm": norm,
            "streaming": streaming,
            "normalise": normalise,
        },
        "preprocessing": {
            "sample_rate": rate,
            "channels": 1,
            "dtype": "int16",
            **({"trim_db": trim} if trim else {}),  # up to version 0.1 nothing was cut off
        },
        "decoder": decoder,
        "beam_width": beam_width,
        "lexicon": lexicon,
    }


class SpeechPipeline(Pipeline):
    """Raw input: a sound file, samples at the model's rate (int16, or real numbers from -1 to 1),
    or samples of another rate as (array, rate)."""

    recipe = "speech"
    batch_size = 16

    @property
    def alphabet(self) -> Alphabet:
        return Alphabet(self.description["alphabet"])

    @property
    def rate(self) -> int:
        return int(self.preprocessing["sample_rate"])

    def build_model(self) -> Recogniser:
        given = self.arguments
        size = Size(**{field.name: given[field.name] for field in fields(Size)})
        return Recogniser(
            size,
            self.alphabet.classes,
            self.rate,
            given["norm"],
            bool(given["streaming"]),
            given.get("normalise", "bands"),  # up to version 0.1
        )

    @cached_property
    def decoder(self) -> Decoder:
        """As tests were read in the training."""
        words = self.description.get("lexicon")
        lexicon = None if words is None else Lexicon(words, self.alphabet)
        name = self.description.get("decoder", "greedy")
        return Decoder(name, int(self.description.get("beam_width", 8)), lexicon)

    def export_program(
        self, model: nn.Module, length: int | None
    ) -> tuple[nn.Module, tuple[int, int] | None]:
        assert isinstance(model, Recogniser)
        samples, shortest = length or EXPORTED_S * self.rate, 2 * model.features.hop
        if samples <= shortest:
            raise ConfigError(f"--length {samples}: use more than {shortest} samples")
        return without_fourier(model, samples), (shortest, samples)

    def inputs(self) -> list[TensorSpec]:
        return [
            TensorSpec("sound", "int16", ("batch", "samples"), f"mono at {self.rate} Hz, padded"),
            TensorSpec("samples", "int64", ("batch",), "how many samples of each row count"),
        ]

    def outputs(self) -> list[TensorSpec]:
        shape = ("batch", "frames", self.alphabet.classes)
        return [
            TensorSpec("scores", "float32", shape, "CTC, before softmax; class 0 is the blank"),
            TensorSpec("lengths", "int64", ("batch",), "how many frames of each row count"),
        ]

    def sample(self, raw: Any) -> Tensor:
        if isinstance(raw, (str, Path)):
            path = Path(raw)
            problem = resampling_problem(read_header(path).rate, self.rate)
            if problem is not None:
                raise DataError(f"{path}: {problem}")
            return self._not_empty(read_sound(path, self.rate), path)
        found = self.rate
        if isinstance(raw, tuple) and len(raw) == 2:
            raw, found = raw[0], int(raw[1])
        if not isinstance(raw, (Tensor, np.ndarray)) or raw.ndim != 1:
            raise DataError("that is not sound; give a file, or the samples of one channel")
        sound = torch.as_tensor(raw)
        if sound.is_floating_point():
            sound = (sound * 32767).round().clamp(-32768, 32767)
        elif sound.dtype != torch.int16:
            raise DataError(f"samples are {sound.dtype}; give int16, or real numbers in -1 to 1")
        if found != self.rate:
            problem = resampling_problem(found, self.rate)
            if problem is not None:
                raise DataError(problem)
            sound = resample(sound.float(), found, self.rate).round().clamp(-32768, 32767)
        return self._not_empty(sound.to(torch.int16), "the sound")

    def _not_empty(self, sound: Tensor, named: Any) -> Tensor:
        if not len(sound):
            raise DataError(f"{named} holds no sample; give a recording")
        return sound

    def shorten(self, sample: Any, longest: int) -> Any:
        return sample[:longest]

    def takes(self, path: Path) -> bool:
        return path.suffix.lower() in SOUND_ENDINGS

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, ...]:
        decibels = float(self.preprocessing.get("trim_db", 0.0))
        voices = [trimmed(sound, self.rate, decibels) for sound in samples]
        lengths = torch.tensor([len(voice) for voice in voices])
        padded = torch.nn.utils.rnn.pad_sequence(voices, batch_first=True)
        return padded, lengths

    def read(self, outputs: tuple[Tensor, ...], samples: Sequence[Any]) -> list[Result]:
        scores, lengths = outputs
        chances = scores.double().log_softmax(2)
        texts = self.decoder(chances, lengths)
        rows = zip(chances, lengths.tolist(), texts, samples, strict=True)
        return [
            {**self._result(row[:length], text), "seconds": len(sound) / self.rate}
            for row, length, text, sound in rows
        ]

    def _result(self, log_probs: Tensor, labels: Sequence[int]) -> Result:
        """A text and how sure it is. A character is as sure as its surest frame, a word and the
        text as the mean of their characters."""
        words: list[tuple[str, list[float]]] = []
        fresh = True
        for label, chance in zip(labels, surest_frames(log_probs, labels), strict=True):
            character = self.alphabet.characters[label - 1]
            if character == " ":
                fresh = True
                continue
            if fresh:
                words.append(("", []))
            word, sure = words[-1]
            words[-1] = word + character, [*sure, chance]
            fresh = False
        sure = [chance for _, chances_of in words for chance in chances_of]
        return {
            "text": " ".join(word for word, _ in words),
            "confidence": sum(sure) / len(sure) if sure else 0.0,
            "words": [{"word": word, "confidence": sum(each) / len(each)} for word, each in words],
        }

    def synthetic(self, count: int) -> list[Any]:
        noise = torch.Generator().manual_seed(0)
        lengths = [self.rate // 2 + 317 * number for number in range(count)]
        return [
            torch.randint(-3000, 3000, (length,), dtype=torch.int16, generator=noise)
            for length in lengths
        ]

    # Data of the run

    def run_options(self, data_dir: str | None = None) -> Options:
        """Other sound is resampled to the rate that the model knows."""
        found = super().run_options(data_dir)
        if data_dir is None:
            return found
        # Other data have a layout and speakers of their own.
        other = {"layout": "auto", "split": "official", "held_out_speaker": None}
        return found.model_copy(update={**other, "sample_rate": self.rate})

    @classmethod
    def checked_options(cls, given: Mapping[str, Any], trust: bool) -> Options:
        from multi_gpu_training.recipes.speech import BEFORE, VARIATIONS

        known = {**BEFORE, **given}
        if not known.get("augment", True):
            known = {name: value for name, value in known.items() if name not in VARIATIONS}
        return super().checked_options(known, trust)

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        return super(SpeechPipeline, self._recorded()).evaluate(*given, **named)

    def examples(self, count: int) -> list[Any]:
        return super(SpeechPipeline, self._recorded()).examples(count)

    def _recorded(self) -> SpeechPipeline:
        """The same without synthetic voices: no test has any, and their program may be missing."""
        none = {"synthetic_voices": 0, "synthetic_language": "en"}
        return type(self)(self.description, {**self.options, **none}, self.seed, self.trust)

    def parts(self, job: Job, part: str) -> list[Dataset[Any]]:
        if (job.description or {}).get("alphabet") != self.description["alphabet"]:
            raise DataError(
                "the data are spelled with other characters than the model knows "
                f"({self.description['alphabet']!r:.80}); give data of the same alphabet"
            )
        found = super().parts(job, part)
        # Training data are varied in speed and cut; here they are as they were spoken.
        return (
            found if part == "val" else [replace(job.dataset, speed=0.0, crop=0.0), job.val_dataset]
        )


PIPELINE = SpeechPipeline
