"""Tables that name recordings and what is said in them, and the layout of Common Voice.

    path,text,speaker,split         CSV, TSV or JSON lines; speaker and split may be missing
    clips/a.wav,seven,ann,train

The path is relative to the table, or to `clips` beside it. Common Voice is a folder of clips with
train.tsv, dev.tsv and test.tsv.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.speech.alphabet import plain
from multi_gpu_training.recipes.tables import TABLES, Row, read_rows, read_text
from multi_gpu_training.recipes.user_data import contents, listed

# What others call the columns: Hugging Face, NeMo and Common Voice among them.
PATHS = ("path", "file", "file_name", "filename", "audio", "audio_filepath", "audio_path", "wav")
TEXTS = ("text", "transcript", "transcription", "sentence", "words")
SPEAKERS = ("speaker", "speaker_id", "client_id", "voice")
SPLITS = ("split", "part", "subset", "set")
PARTS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
PARTS |= dict.fromkeys(("dev", "val", "valid", "validation", "eval"), "dev")


@dataclass(frozen=True)
class Spoken:
    """A recording that a row names. `part` is train, dev, test, or empty where none is given."""

    path: Path
    text: str
    speaker: str
    part: str
    where: str


@dataclass
class SpeechManifest:
    """The rows of all tables, and everything that is wrong with them."""

    rows: list[Spoken] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def tables_of(folder: Path) -> list[Path]:
    """The tables of a folder: one for each part, or the only one there is."""
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in TABLES and p.is_file())
    parts = [path for path in found if path.stem.lower() in PARTS]
    if any(PARTS[path.stem.lower()] == "train" for path in parts):
        return parts
    return found


def is_common_voice(folder: Path) -> bool:
    return (folder / "clips").is_dir() and (folder / "train.tsv").is_file()


def read_manifest(place: Path) -> SpeechManifest:
    """The rows of a table, or of the tables of a folder."""
    tables = [place] if place.is_file() else tables_of(place)
    manifest = SpeechManifest()
    if not tables:
        raise DataError(
            f"data_dir={str(place)!r} holds {contents(place)}: no table of recordings; put "
            "manifest.csv (path,text,speaker,split) there, or one table per part (train.csv, "
            "test.csv)",
            code="MGT301",
        )
    if len(tables) > 1 and not all(table.stem.lower() in PARTS for table in tables):
        raise DataError(
            f"{place} holds {len(tables)} tables ({listed([t.name for t in tables])}); point "
            "data_dir to one of them, or name them train, dev and test"
        )
    for table in tables:
        _Reader(manifest, table, PARTS.get(table.stem.lower(), "")).read()
    _check_repeats(manifest)
    return manifest


class _Reader:
    """Takes the rows of one table into a manifest."""

    def __init__(self, manifest: SpeechManifest, table: Path, part: str) -> None:
        self.manifest, self.table, self.part = manifest, table, part

    def problem(self, text: str, line: int | None = None) -> None:
        where = self.table if line is None else f"{self.table}, line {line}"
        self.manifest.problems.append(f"{where}: {text}")

    def read(self) -> None:
        if self.table.suffix.lower() not in TABLES:
            self.problem(f"is not one of {', '.join(TABLES)}; save the table as one of them")
            return
        try:
            rows = self._rows()
        except DataError as error:
            self.manifest.problems += error.problems
            return
        names = list(dict.fromkeys(name for _, row in rows for name in row))
        path, text = _column(names, PATHS), _column(names, TEXTS)
        if path is None or text is None:
            self.problem(
                f"has the columns {', '.join(names) or 'of no row'}; it must name `path` and "
                "`text` (and may name `speaker` and `split`)"
            )
            return
        speaker, split = _column(names, SPEAKERS), _column(names, SPLITS)
        for line, row in rows:
            who, part = row.get(speaker or ""), row.get(split or "")
            self._take(line, row.get(path), row.get(text), who, part)

    def _rows(self) -> list[Row]:
        text = read_text(self.table)
        head = text.split("\n", 1)[0].split("\t")
        # Common Voice writes quotes as they are: there is no quoting to undo.
        if {"client_id", "path", "sentence"} <= {name.strip() for name in head}:
            return _plain_rows(self, text)
        rows = read_rows(self.table)
        return [(line, {str(k).strip().lower(): v for k, v in row.items()}) for line, row in rows]

    def _take(self, line: int, path: Any, text: Any, speaker: Any, split: Any) -> None:
        if not isinstance(path, str) or not path.strip():
            return self.problem("names no file in its column of paths", line)
        if not isinstance(text, str) or not plain(text):
            return self.problem(f"says nothing of what is spoken in {path}; write it down", line)
        part = self.part
        if split is not None and str(split).strip():
            asked = str(split).strip().lower()
            if asked not in PARTS:
                known = "train, dev (or val) and test"
                return self.problem(f"its split is {asked!r:.40}; there are {known}", line)
            part = PARTS[asked]
        found = self._find(path.strip())
        if found is None:
            return self.problem(f"{path} does not exist; add the file or take the line out", line)
        who = "" if speaker is None else str(speaker).strip()
        where = f"{self.table}, line {line}"
        self.manifest.rows.append(Spoken(found, plain(text), who, part, where))
        return None

    def _find(self, name: str) -> Path | None:
        places = (self.table.parent, self.table.parent / "clips")
        try:
            tried = (place / Path(name).expanduser() for place in places)
            return next((path for path in tried if path.is_file()), None)
        except (OSError, ValueError, RuntimeError):  # a name that no file can have
            return None


def _plain_rows(reader: _Reader, text: str) -> list[Row]:
    lines = text.replace("\r\n", "\n").split("\n")
    names = [name.strip() for name in lines[0].split("\t")]
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) > len(names):
            reader.problem(f"{len(cells)} cells, but {len(names)} columns", number)
            continue
        rows.append((number, dict(zip(names, cells, strict=False))))
    return rows


def _column(names: Sequence[str], known: Iterable[str]) -> str | None:
    return next((name for name in known if name in names), None)


def _check_repeats(manifest: SpeechManifest) -> None:
    """A recording that is named twice counts twice, or is tested on after it was trained on."""
    first: dict[Path, Spoken] = {}
    for row in manifest.rows:
        before = first.setdefault(row.path, row)
        if before is not row:
            manifest.problems.append(
                f"{row.where}: {row.path} is named before ({before.where}); take one of them out"
            )
