"""Tables of behaviours: when each begins and ends, written by hand or exported from BORIS.

    file,start_s,end_s,label        one table for all videos; start_frame,end_frame where it counts
    mouse01.mp4,4.0,6.5,walk        frames; plain start,end needs time_unit=seconds or frames

BORIS writes its tabular events (a START and a STOP row for each state) and its aggregated events
(one row each) as CSV or TSV; both give seconds.

In seconds, an event labels the frames from its start up to, not including, its end; in frames, the
end is the last frame labelled. Seconds become frames by the timestamps of the video, so a frame
rate that varies moves no label.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import is_number, read_small_text
from multi_gpu_training.recipes.video.annotations import Annotation, Row, label_clashes
from multi_gpu_training.recipes.video.frames import VIDEO_ENDINGS

Unit = Literal["seconds", "frames"]

FILE_COLUMNS = ("file", "video", "filename", "file name", "media file name", "media file")
BORIS_FILE_COLUMNS = ("media file name", "media file", "media file path", "source")
BORIS_LENGTH_COLUMNS = ("media duration (s)", "total length")
LABEL_COLUMNS = ("label", "class", "behaviour", "behavior")
# `start`, `start_s`, `Start (s)`, `start frame`, `start_seconds` ...
EDGE = re.compile(r"(start|begin|end|stop)[\s_(\[]*(s|sec|seconds|frames?)?[)\]]*")
UNITS: dict[str, Unit] = {"s": "seconds", "sec": "seconds", "seconds": "seconds"}
UNITS |= {"frame": "frames", "frames": "frames"}
# Players and BORIS round times to milliseconds: a frame at 0.06667 s is written as 0.067.
ROUNDING = 0.51e-3
# Players report the end of the file, which lies behind the last frame.
PAST_THE_END = 1.0


@dataclass(frozen=True)
class Event:
    """One row of a table. A moment, such as a point event of BORIS, ends where it starts."""

    line: int
    start: float
    end: float
    name: str
    trial: str = ""


@dataclass(frozen=True)
class EventList:
    """The events of one video. `length` is the video's length as the table gives it, or None."""

    path: Path
    unit: Unit
    rows: tuple[Event, ...]
    by_trial: bool = False
    length: float | None = None

    def past_the_end(self, video: Path, frames: int, seconds: float) -> list[str]:
        """Events that the video cannot hold; 0 stands for a number that is not known."""
        last = max(self.rows, key=lambda row: row.end)
        if self.unit == "frames":
            if not frames or last.end < frames:
                return []
            return [
                f"{self.path}, line {last.line}: frame {last.end:.0f}, but {video} has {frames} "
                f"frames, 0 to {frames - 1}; correct the number, or check that they belong together"
            ]
        if not seconds or last.end <= seconds + PAST_THE_END:
            return []
        return [
            f"{self.path}, line {last.line}: ends at {last.end:g} s, but {video} is "
            f"{seconds:.3f} s long; correct the time, or check that they belong together"
        ]

    def wrong_length(self, video: Path, seconds: float) -> list[str]:
        """A length in the table that is not the video's: its times then count something else."""
        if not seconds or not self.length or abs(self.length - seconds) <= PAST_THE_END:
            return []
        return [
            f"{self.path} gives {video.name} a length of {self.length:g} s, but it is "
            f"{seconds:.3f} s long; an observation of several media files counts its time "
            "through all of them: export one observation per video"
        ]

    def in_frames(self, times: NDArray[np.float64] | None, stride: int) -> Annotation:
        """Every `stride`-th frame of each event as a labelled frame. Seconds need `times`."""
        rows = [
            Row(event.line, frame, event.name, event.trial)
            for event in self.rows
            for frame in self._frames(event, times)[::stride]
        ]
        problems = label_clashes(self.path, rows)
        if problems:
            raise DataError(problems)
        return Annotation(self.path, tuple(rows), self.by_trial)

    def _frames(self, event: Event, times: NDArray[np.float64] | None) -> range:
        if self.unit == "frames":
            return range(int(event.start), int(event.end) + 1)
        assert times is not None
        gaps = np.diff(times)
        slack = min(ROUNDING, float(gaps.min()) / 4) if len(gaps) else ROUNDING
        first, stop = np.searchsorted(times, [event.start - slack, event.end - slack])
        if first < stop:
            return range(int(first), int(stop))
        # A moment, or an event between two frames: the frame that is on the screen then.
        shown = max(0, int(np.searchsorted(times, event.start + slack, "right")) - 1)
        return range(shown, shown + 1)


@dataclass
class EventTable:
    """The events of a file by the name of their video, and everything that is wrong with it."""

    path: Path
    by_video: dict[str, EventList] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    subjects: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Selection:
    """Which rows of a table count. `unit` is for headers that do not say theirs."""

    unit: Unit | None = None
    subject: str | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Sheet:
    """The header of a file in lower case, and its rows with their line numbers."""

    header: list[str]
    rows: list[tuple[int, dict[str, str]]]
    preamble: list[list[str]]
    problems: list[str]

    def first(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self.header), None)


def is_event_table(path: Path) -> bool:
    """Whether a file has other columns than the frame,class of one video."""
    try:
        sheet = _read(path)
    except DataError:
        return False
    return not {"frame", "class"} <= set(sheet.header) or sheet.first(FILE_COLUMNS) is not None


def read_event_table(path: Path, selection: Selection, video: str | None = None) -> EventTable:
    """The events of a file. `video` names the only video it is about, if it has no such column."""
    try:
        sheet = _read(path)
    except DataError as error:
        return EventTable(path, problems=list(error.problems))
    table = EventTable(path, problems=list(sheet.problems))
    if _is_aggregated(sheet.header):
        found = _Rows(table, sheet, selection, "seconds", video, BORIS_FILE_COLUMNS)
        found.aggregated()
    elif _is_tabular(sheet.header):
        found = _Rows(table, sheet, selection, "seconds", video, BORIS_FILE_COLUMNS)
        found.tabular()
    else:
        found = _Rows(table, sheet, selection, "frames", video, FILE_COLUMNS)
        found.by_hand()
    found.finish()
    return table


def _is_aggregated(header: Sequence[str]) -> bool:
    return {"behavior", "start (s)", "stop (s)"} <= set(header)


def _is_tabular(header: Sequence[str]) -> bool:
    return {"behavior", "time"} <= set(header) and bool({"status", "behavior type"} & set(header))


def _read(path: Path) -> _Sheet:
    try:
        text = read_small_text(path)
        sample = text[:20_000]
        # Excel writes semicolons in half of Europe.
        mark = max("\t;,", key=sample.count) if path.suffix.lower() != ".tsv" else "\t"
        reader = csv.reader(text.splitlines(keepends=True), delimiter=mark)
        # A quoted cell may hold a line break: the reader knows where each row ended.
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); write it as text") from None
    # Older versions of BORIS put facts about the observation above the header.
    at = 0
    if lines and lines[0][1][:1] == ["Observation id"]:
        for number, (_, cells) in enumerate(lines):
            names = [cell.strip().lower() for cell in cells]
            if _is_tabular(names) or _is_aggregated(names):
                at = number
                break
    header = [cell.strip().lower() for cell in lines[at][1]] if lines else []
    rows, problems = [], []
    for line, cells in lines[at + 1 :]:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            problems.append(f"{path}, line {line}: {len(cells)} cells, but {len(header)} columns")
            continue
        values = (cell.strip() for cell in cells)
        # Of columns that share a name the first one counts.
        row = dict(reversed(list(zip(header, values, strict=True))))
        rows.append((line, row))
    return _Sheet(header, rows, [cells for _, cells in lines[:at]], problems)


def seconds(text: str) -> float:
    """`12.5`, or `0:00:12.5` as BORIS shows it; NaN where it is neither."""
    try:
        value = 0.0
        for part in text.split(":"):
            value = 60 * value + float(part)
    except ValueError:
        return math.nan
    return value if 0 <= value < 1e9 and text.count(":") <= 2 else math.nan


def file_stem(text: str) -> str:
    """The name of a video without folders and ending, whatever system its path comes from."""
    text = re.sub(r"^player #\d+:\s*", "", text.strip(), flags=re.IGNORECASE)
    name = PureWindowsPath(text).name if "\\" in text else PurePosixPath(text).name
    ending = PurePosixPath(name).suffix
    return name.removesuffix(ending) if ending.lower() in VIDEO_ENDINGS else name


class _Rows:
    """Takes the rows of a sheet into a table, one way for each kind of sheet."""

    def __init__(
        self,
        table: EventTable,
        sheet: _Sheet,
        selection: Selection,
        unit: Unit,
        video: str | None,
        files: Sequence[str],
    ) -> None:
        self.table, self.sheet, self.selection, self.unit = table, sheet, selection, unit
        self.video = video
        self.file_column = sheet.first(files)
        self.found: dict[str, list[Event]] = {}
        self.lengths: dict[str, float] = {}

    def problem(self, line: int | None, text: str) -> None:
        where = self.table.path if line is None else f"{self.table.path}, line {line}"
        self.table.problems.append(f"{where}: {text}")

    # The three kinds

    def by_hand(self) -> None:
        """`file,start,end,label` with a unit in the header, or one row per frame."""
        edges = {}
        for name in self.sheet.header:
            matched = EDGE.fullmatch(name)
            if matched:
                edges["end" if matched[1] in ("end", "stop") else "start"] = (name, matched[2])
        if not edges and "frame" in self.sheet.header:
            edges = {"start": ("frame", "frame"), "end": ("frame", "frame")}
        label = self.sheet.first(LABEL_COLUMNS)
        if set(edges) != {"start", "end"} or label is None or not self._names_a_video():
            self.problem(
                None,
                f"begins with {','.join(self.sheet.header) or 'nothing'!r}; its first line must "
                "name the columns file,start_s,end_s,label (or start_frame,end_frame), "
                "file,frame,label, or be that of an export of BORIS",
            )
            return
        said = {UNITS[unit] for _, unit in edges.values() if unit}
        asked = {self.selection.unit} if self.selection.unit else set()
        if len(said | asked) != 1:
            self.problem(
                None,
                f"its columns {edges['start'][0]} and {edges['end'][0]} do not say whether they "
                "count seconds or frames; call them start_s,end_s or start_frame,end_frame, or "
                "set time_unit=seconds or time_unit=frames"
                if not said
                else f"counts {' and '.join(sorted(said))} by its header"
                + (f", but time_unit={self.selection.unit} was asked for" if asked else "")
                + "; make them agree",
            )
            return
        [self.unit] = said | asked
        for line, row in self.sheet.rows:
            start, end = row[edges["start"][0]], row[edges["end"][0]]
            self._add(line, row, start, end, row[label])

    def aggregated(self) -> None:
        """BORIS, one row per event."""
        self._check_export()
        for line, row in self.sheet.rows:
            point = row.get("behavior type", "").upper() == "POINT"
            stop = row["start (s)"] if point else row["stop (s)"]
            self._add(line, row, row["start (s)"], stop, row["behavior"])

    def tabular(self) -> None:
        """BORIS, a START and a STOP row per state, one row per point event."""
        self._check_export()
        status = "status" if "status" in self.sheet.header else "behavior type"
        open_rows: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {}
        for line, row in self.sheet.rows:
            kind = row[status].upper()
            key = tuple(row.get(c, "") for c in ("observation id", "subject", "behavior"))
            key += (row.get("modifiers", ""), self._video(row) or "")
            if kind == "START" and key not in open_rows:
                open_rows[key] = (line, row)
            elif kind == "STOP" and key in open_rows:
                began, first = open_rows.pop(key)
                self._add(began, first, first["time"], row["time"], row["behavior"])
            elif kind == "POINT":
                self._add(line, row, row["time"], row["time"], row["behavior"])
            else:
                self.problem(
                    line,
                    f"{kind or 'no status'} of {row['behavior']!r}, which "
                    f"{'has begun already' if kind == 'START' else 'has not begun'}; pair the "
                    "state events in BORIS and export again",
                )
        for line, row in open_rows.values():
            self.problem(line, f"{row['behavior']!r} has no STOP; add it in BORIS, export again")

    def _check_export(self) -> None:
        """What BORIS adds to its times."""
        if self.selection.unit == "frames":
            self.problem(None, "BORIS exports seconds, but time_unit=frames; drop time_unit")
        if not self._names_a_video():
            self.problem(None, "no column names the media file; export it with the events")
        offsets: list[tuple[int | None, str]] = [
            (None, cells[1]) for cells in self.sheet.preamble if _is_offset(cells)
        ]
        offsets += [(line, row.get("time offset (s)", "")) for line, row in self.sheet.rows]
        for line, text in offsets:
            if text and seconds(text.removeprefix("-")) != 0:
                self.problem(
                    line,
                    f"a time offset of {text} s was added to the times; set it to 0 in BORIS and "
                    "export again",
                )
                break

    # A row

    def _names_a_video(self) -> bool:
        return self.video is not None or self.file_column is not None

    def _video(self, row: dict[str, str]) -> str | None:
        return file_stem(row[self.file_column]) if self.file_column else self.video

    def _add(self, line: int, row: dict[str, str], start: str, end: str, name: str) -> None:
        subject = row.get("subject", "")
        self.table.subjects.add(subject)
        if name in self.selection.ignore or self.selection.subject not in (None, subject):
            return
        video = self._video(row)
        if not video or not name:
            self.problem(line, f"label {name!r} of video {video or ''!r}; both must be given")
            return
        if self.file_column and re.search(r"[;|]", row[self.file_column]):
            self.problem(
                line,
                f"{row[self.file_column]!r} are several media files, whose times BORIS counts "
                "through all of them; export one observation per video",
            )
            return
        if self.unit == "frames":
            first, last = ((float(t) if is_number(t) else math.nan) for t in (start, end))
        else:
            first, last = seconds(start), seconds(end)
        if math.isnan(first) or math.isnan(last) or last < first:
            wanted = "whole numbers from 0 on" if self.unit == "frames" else "seconds from 0 on"
            self.problem(line, f"from {start!r} to {end!r}; give {wanted}, the end not first")
            return
        trial = row.get("trial", "")
        self.found.setdefault(video, []).append(Event(line, first, last, name, trial))
        length = self.sheet.first(BORIS_LENGTH_COLUMNS) if self.unit == "seconds" else None
        given = seconds(row[length]) if length else math.nan
        if given > 0:
            self.lengths[video] = given

    def finish(self) -> None:
        """Hand the rows over to the table, and find those that overlap."""
        for video, events in self.found.items():
            events.sort(key=lambda event: (event.start, event.end))
            self._overlaps(video, events)
            by_trial = "trial" in self.sheet.header
            self.table.by_video[video] = EventList(
                self.table.path, self.unit, tuple(events), by_trial, self.lengths.get(video)
            )
        chosen = self.selection.subject
        if chosen is not None and chosen not in self.table.subjects:
            there = ", ".join(sorted(filter(None, self.table.subjects))) or "none"
            self.problem(None, f"subject={chosen}: it has {there}; choose one of them")
        elif not self.found and not self.table.problems:
            self.problem(None, "labels nothing; add rows, or remove it")

    def _overlaps(self, video: str, events: Sequence[Event]) -> None:
        widest = events[0]
        for event in events[1:]:
            inside = (
                event.start <= widest.end
                if self.unit == "frames"
                else event.start < widest.end or event.start == widest.start
            )
            if inside:
                self.problem(
                    event.line,
                    f"{event.name!r} in {video} begins at {event.start:g}, before "
                    f"{widest.name!r} of line {widest.line} ends at {widest.end:g} "
                    f"({self.unit}{', the end is labelled too' * (self.unit == 'frames')}); a "
                    "frame can have one label: correct it, leave a behaviour out with "
                    "ignore=NAME, or choose one animal with subject=NAME",
                )
            if event.end > widest.end:
                widest = event


def _is_offset(cells: Sequence[str]) -> bool:
    return len(cells) > 1 and cells[0].strip().lower().startswith("time offset")
