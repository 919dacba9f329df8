"""The speech to train on: a folder, or the built-in synthetic voice; checked before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.speech import voice
from multi_gpu_training.recipes.speech.alphabet import Alphabet, choose_alphabet
from multi_gpu_training.recipes.speech.audio import (
    Header,
    read_header,
    read_sound,
    resampling_problem,
)
from multi_gpu_training.recipes.speech.corpora import Layout, SpokenFile, read_corpus
from multi_gpu_training.recipes.speech.dataset import Clip
from multi_gpu_training.recipes.user_data import refuse

IN_MEMORY_S = 7200  # a corpus of up to two hours is read once: 230 MB at 16 kHz
READERS = 8  # threads: reading waits for the disk, not for Python


@dataclass(frozen=True)
class Timing:
    """How samples become output frames."""

    hop: int
    subsampling: int

    def shortest(self, labels: Sequence[int]) -> int:
        """Samples below which CTC cannot spell the labels: a frame each, and a blank between two
        alike."""
        repeats = sum(a == b for a, b in pairwise(labels))
        frames = max(1, len(labels) + repeats)
        return (frames - 1) * self.subsampling * self.hop

    def clip(
        self,
        alphabet: Alphabet,
        text: str,
        samples: int,
        path: Path | None = None,
        sound: Tensor | None = None,
    ) -> Clip:
        labels = tuple(alphabet.encode(text))
        return Clip(labels, samples, self.shortest(labels), path, sound)


@dataclass(frozen=True)
class SpeechData:
    name: str
    rate: int
    alphabet: Alphabet
    train: list[Clip]
    test: list[Clip]
    notes: list[str]

    def describe(self) -> str:
        hours = sum(clip.samples for clip in self.train) / self.rate / 3600
        length = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
        return (
            f"speech: {self.name}, {len(self.train):,} utterances ({length}) for training and "
            f"{len(self.test):,} for testing, {self.rate:,} Hz, "
            f"{self.alphabet.classes - 1} characters"
        )


def built_in(timing: Timing, alphabet: str, rate: int | None) -> SpeechData:
    """The synthetic voice. What it says in training and in testing differs."""
    if rate not in (None, voice.RATE):
        raise ConfigError(
            f"sample_rate={rate}, but the built-in synthetic voice has {voice.RATE}; drop it, or "
            "set data_dir"
        )
    parts = [voice.speak_all(voice.TRAIN, seed=0), voice.speak_all(voice.TEST, seed=1)]
    chosen = choose_alphabet(alphabet, [("the built-in voice", t) for p in parts for _, t in p])
    train, test = (
        [timing.clip(chosen, text, len(sound), sound=sound) for sound, text in part]
        for part in parts
    )
    name = "built-in synthetic voice (letters as tones, no real speech)"
    return _without_impossible(name, voice.RATE, chosen, train, test, [])


def from_folder(
    folder: Path,
    layout: Layout,
    held_out: str | None,
    timing: Timing,
    alphabet: str,
    rate: int | None,
) -> SpeechData:
    """What a folder holds, every file's head read and every problem named."""
    corpus = read_corpus(folder, layout, held_out)
    rate = rate or corpus.rate
    entries = [*corpus.train, *corpus.test]
    headers = read_headers(entries)
    rates = {header.rate: str(e.path) for header, e in zip(headers, entries, strict=True)}
    problems = {path: resampling_problem(found, rate) for found, path in rates.items()}
    refuse([f"{path}: {problem}" for path, problem in problems.items() if problem is not None])
    chosen = choose_alphabet(alphabet, [(str(entry.path), entry.text) for entry in entries])
    seconds = sum(header.samples / header.rate for header in headers)
    # What is small is read once; the rest by the loader's workers, epoch after epoch.
    sounds: list[Tensor | None] = [None] * len(entries)
    if seconds <= IN_MEMORY_S:
        with ThreadPoolExecutor(READERS) as pool:
            sounds = list(pool.map(lambda entry: read_sound(entry.path, rate), entries))
    clips = []
    for entry, header, sound in zip(entries, headers, sounds, strict=True):
        samples = header.samples_at(rate) if sound is None else len(sound)
        clips.append(timing.clip(chosen, entry.text, samples, entry.path, sound))
    name = corpus.name + (f", speaker {held_out} held out" if held_out else "")
    cut = len(corpus.train)
    notes = conversions(headers, rate)
    return _without_impossible(name, rate, chosen, clips[:cut], clips[cut:], notes)


def read_headers(entries: Sequence[SpokenFile]) -> list[Header]:
    """What every file says about itself; all files that are no audio are named at once."""

    def look(entry: SpokenFile) -> Header | DataError:
        try:
            return read_header(entry.path)
        except DataError as error:
            return error

    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(look, entries))
    refuse([item.problems[0] for item in found if isinstance(item, DataError)])
    return [item for item in found if isinstance(item, Header)]


def conversions(headers: Sequence[Header], rate: int) -> list[str]:
    """One line for files of another rate, one for those with several channels."""
    notes = []
    rates = Counter(header.rate for header in headers if header.rate != rate)
    if rates:
        found = ", ".join(f"{n:,} of {hertz:,} Hz" for hertz, n in rates.most_common())
        notes.append(f"resampled to {rate:,} Hz: {found}")
    several = sum(header.channels > 1 for header in headers)
    if several:
        notes.append(f"mixed down to mono: {several:,} files with several channels")
    return notes


def _without_impossible(
    name: str, rate: int, alphabet: Alphabet, train: list[Clip], test: list[Clip], notes: list[str]
) -> SpeechData:
    """Training without clips that are too short for their text. Tests keep theirs: an utterance
    that cannot be read is an error of the recogniser, not of the test."""
    short = [clip for clip in train if not clip.possible]
    kept = [clip for clip in train if clip.possible]
    if short:
        worst = min(short, key=lambda clip: clip.samples - clip.shortest)
        notes = notes + [
            f"left out of training: {len(short):,} of {len(train):,} clips, too short for their "
            f"text (worst: {worst.path}, {worst.samples / rate:.2f} s of "
            f"{worst.shortest / rate:.2f} s)"
        ]
    if not kept:
        raise DataError(
            f"all {len(train)} training clips of {name} are too short for their text; check that "
            "transcripts belong to their files, or use size=small, which needs fewer frames"
        )
    unread = sum(not clip.possible for clip in test)
    if unread:
        notes = notes + [
            f"in the test part {unread:,} of {len(test):,} clips are too short for their text; "
            "they count as errors and have no loss"
        ]
    # Neighbours of one length need little padding; the order of a test does not matter.
    return SpeechData(name, rate, alphabet, kept, sorted(test, key=lambda c: c.samples), notes)
