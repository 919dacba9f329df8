"""The speech to train on: a folder, or the built-in synthetic voice; checked before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
    trimmed,
)
from multi_gpu_training.recipes.speech.corpora import (
    Division,
    Layout,
    SpeechCorpus,
    SpokenFile,
    read_corpus,
)
from multi_gpu_training.recipes.speech.dataset import Clip, SpeakerGroup
from multi_gpu_training.recipes.speech.synthetic import Synthesis, speak_with, version
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
        group: int = 0,
    ) -> Clip:
        labels = tuple(alphabet.encode(text))
        return Clip(labels, samples, self.shortest(labels), path, sound, group)


@dataclass(frozen=True)
class SpeechData:
    name: str
    rate: int
    alphabet: Alphabet
    train: list[Clip]
    test: list[Clip]
    notes: list[str]
    groups: list[SpeakerGroup] = field(default_factory=lambda: [SpeakerGroup()])
    speakers: int = 0  # recorded ones that are trained on; 0: not known

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
    return _without_impossible(name, voice.RATE, chosen, train, test, [], [SpeakerGroup()])


def from_folder(
    folder: Path,
    layout: Layout,
    division: Division,
    timing: Timing,
    alphabet: str,
    rate: int | None,
    trim: float = 0.0,
    synthesis: Synthesis | None = None,
) -> SpeechData:
    """What a folder or a table holds, every file's head read and every problem named."""
    corpus = read_corpus(folder, layout, division)
    rate = rate or corpus.rate
    entries = [*corpus.train, *corpus.test]
    headers, problems = read_headers(entries)
    chosen = None
    try:
        texts = [(entry.where or str(entry.path), entry.text) for entry in entries]
        chosen = choose_alphabet(alphabet, texts)
    except DataError as error:
        if not corpus.problems and not problems:
            raise
        problems += error.problems
    refuse([*corpus.problems, *problems])
    assert chosen is not None
    rates = {header.rate: str(e.path) for header, e in zip(headers, entries, strict=True)}
    cannot = {path: resampling_problem(found, rate) for found, path in rates.items()}
    refuse([f"{path}: {problem}" for path, problem in cannot.items() if problem is not None])
    seconds = sum(header.samples / header.rate for header in headers)
    # What is small is read once; the rest by the loader's workers, epoch after epoch.
    sounds: list[Tensor | None] = [None] * len(entries)
    if seconds <= IN_MEMORY_S:
        with ThreadPoolExecutor(READERS) as pool:
            sounds = list(pool.map(lambda entry: read_sound(entry.path, rate), entries))
    groups = test_groups(corpus)
    numbers = {group: number for number, group in enumerate(groups)}
    clips = []
    for entry, header, sound in zip(entries, headers, sounds, strict=True):
        if sound is not None:
            sound = trimmed(sound, rate, trim, timing.shortest(chosen.encode(entry.text)))
        samples = header.samples_at(rate) if sound is None else len(sound)
        group = numbers.get(SpeakerGroup(entry.speaker, entry.known), 0)
        clips.append(timing.clip(chosen, entry.text, samples, entry.path, sound, group))
    name: str = corpus.name
    if division.held_out is not None:
        name += f", speaker {division.held_out} held out"
    cut = len(corpus.train)
    train, test = clips[:cut], clips[cut:]
    notes = [*corpus.notes, *conversions(headers, rate)]
    if synthesis is not None:
        said = speak_with(synthesis, [entry.text for entry in corpus.train], rate)
        train += [timing.clip(chosen, text, len(sound), sound=sound) for sound, text in said]
        notes.append(
            f"trained on {cut:,} recordings, and on {len(said):,} utterances of "
            f"{synthesis.voices:,} synthetic voices ({version()})"
        )
    found = _without_impossible(name, rate, chosen, train, test, notes, groups)
    return replace(found, speakers=len({entry.speaker for entry in corpus.train} - {""}))


def test_groups(corpus: SpeechCorpus) -> list[SpeakerGroup]:
    """Whose utterances the test holds, in a fixed order."""
    found = {SpeakerGroup(entry.speaker, entry.known) for entry in corpus.test}
    return sorted(found, key=lambda group: (group.known, group.speaker))


def read_headers(entries: Sequence[SpokenFile]) -> tuple[list[Header], list[str]]:
    """What every file says about itself, and what is wrong with those that are no audio."""

    def look(entry: SpokenFile) -> Header | str:
        try:
            return read_header(entry.path)
        except DataError as error:
            return f"{entry.where}: {error.problems[0]}" if entry.where else error.problems[0]

    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(look, entries))
    return (
        [item for item in found if isinstance(item, Header)],
        [item for item in found if isinstance(item, str)],
    )


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
    name: str,
    rate: int,
    alphabet: Alphabet,
    train: list[Clip],
    test: list[Clip],
    notes: list[str],
    groups: list[SpeakerGroup],
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
    ordered = sorted(test, key=lambda clip: clip.samples)
    return SpeechData(name, rate, alphabet, kept, ordered, notes, groups)
