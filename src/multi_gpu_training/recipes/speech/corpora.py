"""Folders of speech: which files, what is said in them, and which part they belong to.

fsdd          recordings/7_jackson_32.wav    the digit, who says it, and a number; 0-4 are tests
librispeech   train-clean-100/19/198/19-198-0001.flac and 19-198.trans.txt beside it
festvox       wav/NAME.wav and `( NAME "what is said" )` lines in etc/txt.done.data
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.speech.alphabet import plain
from multi_gpu_training.recipes.user_data import contents, existing_folder, listed, read_small_text

Layout = Literal["auto", "fsdd", "librispeech", "festvox"]
RATES = {"fsdd": 8000, "librispeech": 16000, "festvox": 16000}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FSDD_NAME = re.compile(r"(\d)_([^_]+)_(\d+)\.wav")
FESTVOX_LINE = re.compile(r'\(\s*(\S+)\s+"(.*)"\s*\)')
EVERY = 20  # without a test part of its own, every 20th utterance of a corpus is one


@dataclass(frozen=True)
class SpokenFile:
    """A file, what is said in it and who says it."""

    path: Path
    text: str
    speaker: str = ""


@dataclass(frozen=True)
class SpeechCorpus:
    name: str
    train: list[SpokenFile]
    test: list[SpokenFile]

    @property
    def rate(self) -> int:
        return RATES[self.name]


def read_corpus(folder: Path, layout: Layout, held_out: str | None) -> SpeechCorpus:
    """The utterances of a folder. `held_out` is a speaker who is tested on and not trained on."""
    existing_folder(folder, "one in the layout of FSDD, LibriSpeech or festvox")
    name = find_layout(folder) if layout == "auto" else layout
    readers = {"fsdd": read_fsdd, "librispeech": read_librispeech, "festvox": read_festvox}
    corpus = readers[name](folder)
    if held_out is not None:
        corpus = leave_out(corpus, held_out)
    silent = [str(e.path) for e in (*corpus.train, *corpus.test) if not e.text]
    if silent:
        raise without_transcript(silent, "write down what is said in it")
    for part, entries in (("training", corpus.train), ("test", corpus.test)):
        if not entries:
            raise DataError(
                f"data_dir={str(folder)!r} in the layout of {name} has no {part} utterance; "
                f"found {len(corpus.train)} for training and {len(corpus.test)} for testing: "
                "add some",
                code="MGT301",
            )
    return corpus


def find_layout(folder: Path) -> Literal["fsdd", "librispeech", "festvox"]:
    if (folder / "etc/txt.done.data").is_file():
        return "festvox"
    if next(folder.rglob("*.trans.txt"), None) is not None:
        return "librispeech"
    if any(FSDD_NAME.fullmatch(path.name) for path in recordings(folder).glob("*.wav")):
        return "fsdd"
    raise DataError(
        f"data_dir={str(folder)!r} holds {contents(folder)}: neither recordings/7_name_32.wav "
        "(FSDD), nor *.trans.txt beside .flac files (LibriSpeech), nor etc/txt.done.data "
        "(festvox); point to the folder that holds one of them",
        code="MGT301",
    )


def leave_out(corpus: SpeechCorpus, speaker: str) -> SpeechCorpus:
    """The corpus with one speaker's utterances as its test part, all others trained on."""
    everything = [*corpus.train, *corpus.test]
    speakers = sorted({entry.speaker for entry in everything})
    if speaker not in speakers:
        shown = ", ".join(speakers[:20]) if any(speakers) else "no speakers"
        raise ConfigError(f"held_out_speaker={speaker!r} is not in this corpus; it has {shown}")
    return SpeechCorpus(
        corpus.name,
        [entry for entry in everything if entry.speaker != speaker],
        [entry for entry in everything if entry.speaker == speaker],
    )


def recordings(folder: Path) -> Path:
    inner = folder / "recordings"
    return inner if inner.is_dir() else folder


def read_fsdd(folder: Path) -> SpeechCorpus:
    """Spoken digits, cut into the official parts: numbers 0-4 are tests."""
    train: list[SpokenFile] = []
    test: list[SpokenFile] = []
    strangers = []
    for path in sorted(recordings(folder).glob("*.wav")):
        match = FSDD_NAME.fullmatch(path.name)
        if match is None:
            strangers.append(str(path))
            continue
        entry = SpokenFile(path, DIGITS[int(match[1])], match[2])
        (test if int(match[3]) < 5 else train).append(entry)
    if strangers:
        raise without_transcript(strangers, "its name gives none, as 7_jackson_32.wav does")
    return SpeechCorpus("fsdd", train, test)


def read_librispeech(folder: Path) -> SpeechCorpus:
    """Chapters with their transcripts. Parts are by folder: train-..., test-... or dev-...."""
    entries: list[tuple[str, SpokenFile]] = []
    missing: list[str] = []
    files = sorted(folder.rglob("*.trans.txt"))
    for file in files:
        texts = dict(transcript_lines(file))
        part = file.relative_to(folder).parts[0]
        for path in sorted(file.parent.glob("*.flac")):
            if path.stem not in texts:
                missing.append(str(path))
                continue
            speaker = path.stem.split("-")[0]
            entries.append((part, SpokenFile(path, plain(texts[path.stem]), speaker)))
    known = {file.parent for file in files}
    missing += [str(p) for p in sorted(folder.rglob("*.flac")) if p.parent not in known]
    if missing:
        raise without_transcript(missing, "add its line to the .trans.txt beside it")
    train = [entry for part, entry in entries if part.startswith("train")]
    tests = [entry for part, entry in entries if part.startswith(("test", "dev"))]
    if not train and not tests:
        return every_nth("librispeech", [entry for _, entry in entries])
    if train and not tests:
        return every_nth("librispeech", train)
    return SpeechCorpus("librispeech", train, tests)


def transcript_lines(file: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_small_text(file).splitlines(), 1):
        name, _, text = line.strip().partition(" ")
        if not name:
            continue
        if not text.strip():
            raise DataError(
                f"{file}, line {number}: {line.strip()!r} has no text; write `NAME what is said`"
            )
        yield name, text


def read_festvox(folder: Path) -> SpeechCorpus:
    """One speaker's sentences, named in etc/txt.done.data."""
    listing = folder / "etc/txt.done.data"
    if not listing.is_file():
        raise DataError(
            f"layout=festvox, but there is no {listing}; it holds a line "
            '`( NAME "what is said" )` for each wav/NAME.wav'
        )
    entries, lost = [], []
    spoken = set()
    for number, line in enumerate(read_small_text(listing).splitlines(), 1):
        if not line.strip():
            continue
        match = FESTVOX_LINE.fullmatch(line.strip())
        if match is None:
            raise DataError(
                f"{listing}, line {number}: {line.strip()[:60]!r} is not "
                '`( NAME "what is said" )`; mend the line'
            )
        path = folder / "wav" / f"{match[1]}.wav"
        spoken.add(path)
        if path.is_file():
            entries.append(SpokenFile(path, plain(match[2])))
        else:
            lost.append(str(path))
    if lost:
        raise DataError(
            f"{listing} names {len(lost)} files that are not there: {listed(lost)}; add them, or "
            "take their lines out"
        )
    silent = [str(p) for p in sorted((folder / "wav").glob("*.wav")) if p not in spoken]
    if silent:
        raise without_transcript(silent, f"add its line to {listing}")
    return every_nth("festvox", entries)


def every_nth(name: str, entries: list[SpokenFile]) -> SpeechCorpus:
    return SpeechCorpus(
        name,
        [entry for i, entry in enumerate(entries) if i % EVERY != EVERY - 1],
        [entry for i, entry in enumerate(entries) if i % EVERY == EVERY - 1],
    )


def without_transcript(paths: list[str], hint: str) -> DataError:
    return DataError(
        f"{len(paths)} sound files have no transcript: {listed(paths)}; {hint}, or remove it"
    )
