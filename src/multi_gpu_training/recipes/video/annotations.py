"""What was seen in a video: one CSV a video, a row for each labelled frame.

    frame,class,trial
    8,walk,1
    9,walk,1

`frame` counts from 0. `trial` may be left out: then the whole video is one trial. A trial runs
from its first to its last labelled frame, and no clip looks beyond it.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import is_number, read_small_text, refuse

CLASSES_FILE = "classes.txt"


@dataclass(frozen=True)
class Trial:
    """Labelled frames of one stretch of a video; `first` and `last` are its ends, inclusive."""

    first: int
    last: int
    frames: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    line: int
    frame: int
    name: str
    trial: str


@dataclass(frozen=True)
class Annotation:
    """The rows of one file; `by_trial` says whether it had a column for trials."""

    path: Path
    rows: tuple[Row, ...]
    by_trial: bool

    @property
    def last_frame(self) -> Row:
        return max(self.rows, key=lambda row: row.frame)

    def past_the_end(self, video: Path, frames: int, seconds: float) -> list[str]:
        """Labels that the video cannot hold; 0 stands for a number that is not known."""
        row = self.last_frame
        if not frames or row.frame < frames:
            return []
        return [
            f"{self.path}, line {row.line}: frame {row.frame}, but {video} has {frames} frames, "
            f"0 to {frames - 1}; correct the number, or check that they belong together"
        ]

    def trials(self, frame_count: int, classes: Sequence[str]) -> list[Trial]:
        """The trials, in the order in which they appear. Every name must be in `classes`."""
        number = {name: label for label, name in enumerate(classes)}
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.trial, []).append(row)
        found = []
        for rows in groups.values():
            rows.sort(key=lambda row: row.frame)
            ends = (rows[0].frame, rows[-1].frame) if self.by_trial else (0, frame_count - 1)
            frames = tuple(row.frame for row in rows)
            found.append(Trial(*ends, frames, tuple(number[row.name] for row in rows)))
        return found


def read_annotation(path: Path) -> Annotation:
    """The rows of a CSV; everything wrong with it in one DataError."""
    try:
        lines = list(csv.reader(read_small_text(path).splitlines()))
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); write it as text") from None
    header = [name.strip().lower() for name in lines[0]] if lines else []
    if not {"frame", "class"} <= set(header):
        raise DataError(
            f"{path} begins with {','.join(header) or 'nothing'!r}; its first line must name the "
            "columns frame,class (and trial, where a video has several)"
        )
    frame_at, class_at = header.index("frame"), header.index("class")
    trial_at = header.index("trial") if "trial" in header else None
    problems, rows = [], []
    for line, cells in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            problems.append(f"{path}, line {line}: {len(cells)} cells, but {len(header)} columns")
            continue
        text, name = cells[frame_at].strip(), cells[class_at].strip()
        if not is_number(text) or not name:
            problems.append(
                f"{path}, line {line}: frame {text[:40]!r} with class {name[:80]!r}; give a whole "
                "number from 0 on and a name"
            )
            continue
        trial = cells[trial_at].strip() if trial_at is not None else ""
        rows.append(Row(line, int(text), name, trial))
    problems += label_clashes(path, rows)
    if not rows and not problems:
        problems.append(f"{path} labels no frame; add rows, or remove it with its video")
    refuse(problems)
    return Annotation(path, tuple(rows), trial_at is not None)


def label_clashes(path: Path, rows: list[Row]) -> list[str]:
    """Frames with two labels, and trials that overlap."""
    problems = []
    labelled: dict[int, Row] = {}
    spans: dict[str, tuple[int, int]] = {}
    for row in rows:
        before = labelled.setdefault(row.frame, row)
        if before is not row:
            problems.append(
                f"{path}: frame {row.frame} is labelled on lines {before.line} and {row.line}; "
                "keep one"
            )
        first, last = spans.get(row.trial, (row.frame, row.frame))
        spans[row.trial] = (min(first, row.frame), max(last, row.frame))
    if not problems:
        ordered = sorted(spans.items(), key=lambda item: item[1])
        for (one, (_, end)), (two, (start, _)) in pairwise(ordered):
            if start <= end:
                problems.append(
                    f"{path}: trial {two!r} begins at frame {start}, before trial {one!r} ends "
                    f"at {end}; trials must not overlap"
                )
    return problems


class LabelSource(Protocol):
    """What frames and events by time have in common: rows with a name, from a file."""

    @property
    def path(self) -> Path: ...

    @property
    def rows(self) -> Sequence[LabelRow]: ...


class LabelRow(Protocol):
    @property
    def line(self) -> int: ...

    @property
    def name(self) -> str: ...


def class_names(
    folder: Path, annotations: Sequence[LabelSource], also: Sequence[str] = ()
) -> list[str]:
    """The classes in their order: those of classes.txt, else every name found, sorted.

    With classes.txt, a name that is not in it is an error, and so is one that nobody uses. `also`
    are names given by something else than an annotation.
    """
    used = {row.name for annotation in annotations for row in annotation.rows} | set(also)
    path = folder / CLASSES_FILE
    if not path.is_file():
        return sorted(used, key=lambda name: (int(name), "") if is_number(name) else (0, name))
    names = [line.strip() for line in read_small_text(path).splitlines()]
    names = [name for name in names if name]
    if len(set(names)) != len(names) or not names:
        raise DataError(f"{path} must list each class once, one a line; it holds {names}")
    problems = []
    for annotation in annotations:
        unknown = {row.name: row for row in reversed(annotation.rows) if row.name not in names}
        for name, row in unknown.items():
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"{path} has {', '.join(names)}"
            problems.append(f"{annotation.path}, line {row.line}: unknown class {name!r}; {hint}")
    problems += [f"{path} lacks the class {name!r}; add it" for name in also if name not in names]
    idle = [name for name in names if name not in used]
    if idle and not problems:
        problems.append(
            f"nothing is labelled {', '.join(idle)}, which {path} lists; annotate it, or take it "
            "out of the list"
        )
    if problems:
        raise DataError(problems)
    return names
