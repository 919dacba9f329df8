"""Folders of speech: which files, what is said in them, and which part they belong to.

fsdd          recordings/7_jackson_32.wav    the digit, who says it, and a number; 0-4 are tests
librispeech   train-clean-100/19/198/19-198-0001.flac and 19-198.trans.txt beside it
festvox       wav/NAME.wav and `( NAME "what is said" )` lines in etc/txt.done.data
common_voice  clips/ beside train.tsv, dev.tsv and test.tsv
manifest      a CSV, TSV or JSONL table, see `manifests`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.held_out import held_out
from multi_gpu_training.recipes.speech.alphabet import plain
from multi_gpu_training.recipes.speech.manifests import is_common_voice, read_manifest, tables_of
from multi_gpu_training.recipes.user_data import contents, existing_folder, listed, read_small_text

Found = Literal["fsdd", "librispeech", "festvox", "common_voice", "manifest"]
Layout = Literal["auto", "fsdd", "librispeech", "festvox", "common_voice", "manifest"]
SplitName = Literal["auto", "official", "speaker"]
RATES: dict[str, int] = {
    "fsdd": 8000,
    "librispeech": 16000,
    "festvox": 16000,
    "common_voice": 16000,
    "manifest": 16000,
}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FSDD_NAME = re.compile(r"(\d)_([^_]+)_(\d+)\.wav")
FESTVOX_LINE = re.compile(r'\(\s*(\S+)\s+"(.*)"\s*\)')
EVERY = 20  # without a test part of its own, every 20th utterance of a corpus is one
SPEAKERS_HELD = 0.1  # of all, where the test is one of speakers that are not trained on


@dataclass(frozen=True)
class SpokenFile:
    """A file, what is said in it and who says it.

    where: the line that names it. known: in a test by speaker, one whose speaker is trained on.
    """

    path: Path
    text: str
    speaker: str = ""
    where: str = ""
    known: bool = False


@dataclass(frozen=True)
class SpeechCorpus:
    """What is trained and tested on. `official` where the corpus itself says which is which,
    `problems` is all that is wrong with its tables, `notes` what the user should know."""

    name: Found
    train: list[SpokenFile]
    test: list[SpokenFile]
    official: bool = True
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> int:
        return RATES[self.name]


@dataclass(frozen=True)
class Division:
    """How a corpus is divided. held_out: a speaker who is tested on, and not trained on; `seed`
    draws speakers where `split` asks for some."""

    split: SplitName = "official"
    held_out: str | None = None
    seed: int = 0


def read_corpus(place: Path, layout: Layout, division: Division) -> SpeechCorpus:
    """The utterances of a folder or a table, with every problem of its tables."""
    if not place.is_file():
        wanted = "one in the layout of FSDD, LibriSpeech, festvox or Common Voice, or to a table"
        existing_folder(place, wanted)
    name = find_layout(place) if layout == "auto" else layout
    if place.is_file() and name != "manifest":
        raise ConfigError(f"layout={layout} is for a folder, and data_dir={str(place)!r} is a file")
    readers = {"fsdd": read_fsdd, "librispeech": read_librispeech, "festvox": read_festvox}
    corpus = readers[name](place) if name in readers else read_tables(place, name)
    if corpus.problems:
        return corpus
    corpus = divide(corpus, division)
    silent = [str(e.path) for e in (*corpus.train, *corpus.test) if not e.text]
    if silent:
        raise without_transcript(silent, "write down what is said in it")
    for part, entries in (("training", corpus.train), ("test", corpus.test)):
        if not entries:
            raise DataError(
                f"data_dir={str(place)!r} in the layout of {name} has no {part} utterance; "
                f"found {len(corpus.train)} for training and {len(corpus.test)} for testing: "
                "add some",
                code="MGT301",
            )
    return corpus


def find_layout(place: Path) -> Found:
    if place.is_file():
        return "manifest"
    if is_common_voice(place):
        return "common_voice"
    if (place / "etc/txt.done.data").is_file():
        return "festvox"
    if next(place.rglob("*.trans.txt"), None) is not None:
        return "librispeech"
    if any(FSDD_NAME.fullmatch(path.name) for path in recordings(place).glob("*.wav")):
        return "fsdd"
    if tables_of(place):
        return "manifest"
    raise DataError(
        f"data_dir={str(place)!r} holds {contents(place)}: neither recordings/7_name_32.wav "
        "(FSDD), nor *.trans.txt beside .flac files (LibriSpeech), nor etc/txt.done.data "
        "(festvox), nor clips/ and train.tsv (Common Voice), nor a .csv, .tsv or .jsonl of "
        "path,text; point to the folder that holds one of them, or to the table",
        code="MGT301",
    )


# Who is tested on


def divide(corpus: SpeechCorpus, division: Division) -> SpeechCorpus:
    """The corpus as `division` says."""
    everything = [*corpus.train, *corpus.test]
    speakers = sorted({entry.speaker for entry in everything} - {""})
    if division.split != "speaker" and division.held_out is not None:
        return leave_out(corpus, division.held_out)
    apart = not {e.speaker for e in corpus.train} & {e.speaker for e in corpus.test}
    # Two speakers must be left to train on: one voice says nothing about another.
    wanted = len(speakers) >= 3 and not apart and "" not in {e.speaker for e in everything}
    if division.split == "official" or (division.split == "auto" and not wanted):
        return corpus
    if len(speakers) < 2:
        raise ConfigError(
            f"split=speaker, but this corpus names {len(speakers)} speakers; use split=official"
        )
    if division.held_out is not None:
        _check_speaker(division.held_out, speakers)
        chosen = {division.held_out}
    else:
        drawn = held_out(len(speakers), SPEAKERS_HELD, division.seed).tolist()
        chosen = {name for name, is_held in zip(speakers, drawn, strict=True) if is_held}
    # The corpus's own test of the others is kept out of training: it is the measure beside.
    known = corpus.test if corpus.official else []
    trained = corpus.train if corpus.official else everything
    return replace(
        corpus,
        train=[entry for entry in trained if entry.speaker not in chosen],
        test=[entry for entry in everything if entry.speaker in chosen]
        + [replace(entry, known=True) for entry in known if entry.speaker not in chosen],
        notes=(*corpus.notes, _by_speaker(sorted(chosen), bool(known))),
    )


def _by_speaker(chosen: Sequence[str], known: bool) -> str:
    beside = " (wer), and on the test part of those who are (wer_known)" if known else ""
    others = "split=official trains on everybody" if known else "split=official draws utterances"
    return (
        f"split by speaker: tested on {listed(list(chosen), 5)}, not trained on{beside}; {others}"
    )


def _check_speaker(speaker: str, speakers: Sequence[str]) -> None:
    if speaker not in speakers:
        shown = ", ".join(speakers[:20]) or "no speakers"
        raise ConfigError(f"held_out_speaker={speaker!r} is not in this corpus; it has {shown}")


def leave_out(corpus: SpeechCorpus, speaker: str) -> SpeechCorpus:
    """The corpus with one speaker's utterances as its test part, all others trained on."""
    everything = [*corpus.train, *corpus.test]
    _check_speaker(speaker, sorted({entry.speaker for entry in everything} - {""}))
    return replace(
        corpus,
        train=[entry for entry in everything if entry.speaker != speaker],
        test=[entry for entry in everything if entry.speaker == speaker],
    )


# Layouts


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


def read_tables(place: Path, name: Found) -> SpeechCorpus:
    """The rows of a manifest or of Common Voice. Without a split, every 20th row is a test."""
    manifest = read_manifest(place)
    entries = [
        (row.part, SpokenFile(row.path, row.text, row.speaker, row.where)) for row in manifest.rows
    ]
    problems, notes = tuple(manifest.problems), []
    parts = {part for part, _ in entries}
    if not problems and "" in parts and len(parts) > 1:
        bare = next(row.where for row in manifest.rows if not row.part)
        problems = (f"{bare}: has no split, but other rows have one; fill it in",)
    if problems or parts <= {""}:
        corpus = every_nth(name, [entry for _, entry in entries])
        return replace(corpus, problems=problems)
    # A test that chooses the checkpoint is none: with a dev part, the test part is left alone.
    tested = "dev" if "dev" in parts else "test"
    if {"dev", "test"} <= parts:
        count = sum(part == "test" for part, _ in entries)
        notes.append(
            f"left alone: {count:,} utterances of the test part, since there is a dev part"
        )
    train = [entry for part, entry in entries if part == "train"]
    test = [entry for part, entry in entries if part == tested]
    return SpeechCorpus(name, train, test, problems=problems, notes=tuple(notes))


def every_nth(name: Found, entries: list[SpokenFile]) -> SpeechCorpus:
    return SpeechCorpus(
        name,
        [entry for i, entry in enumerate(entries) if i % EVERY != EVERY - 1],
        [entry for i, entry in enumerate(entries) if i % EVERY == EVERY - 1],
        official=False,
    )


def without_transcript(paths: list[str], hint: str) -> DataError:
    return DataError(
        f"{len(paths)} sound files have no transcript: {listed(paths)}; {hint}, or remove it"
    )
