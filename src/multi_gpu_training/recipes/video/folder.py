"""A folder of videos with their annotations, checked as a whole before anything is decoded.

Videos/*.mp4            grey or colour; read as grey. Or straight in the folder
Annotations/*.csv       one per video, of the same name; or beside the video
annotations.csv         or one table for all of them, of any name; also an export of BORIS
classes.txt             the classes in order, one per line; may be left out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import shortened
from multi_gpu_training.recipes.video.annotations import (
    Annotation,
    Trial,
    class_names,
    read_annotation,
)
from multi_gpu_training.recipes.video.clips import Video, VideoData
from multi_gpu_training.recipes.video.event_tables import (
    EventList,
    Selection,
    is_event_table,
    read_event_table,
)
from multi_gpu_training.recipes.video.frames import (
    VIDEO_ENDINGS,
    FrameFile,
    InvalidVideo,
    load_frames,
    probe,
)

TABLE_ENDINGS = (".csv", ".tsv")
BACKGROUND = "background"
MOST_PROBLEMS = 100
T = TypeVar("T")
Unlabelled = Literal["error", "skip", "background"]


@dataclass(frozen=True)
class Labelling:
    """How labels are found and read.

    annotations: one table for all videos; None: the only one in the folder, else one per video.
    stride: of an event, every n-th frame becomes the middle of a clip.
    background_stride: the same for videos without annotation that count as background.
    """

    annotations: Path | None = None
    selection: Selection = field(default_factory=Selection)
    unlabelled: Unlabelled = "error"
    stride: int = 1
    background_stride: int = 17


@dataclass
class Contents:
    """What a folder holds, with everything that is wrong with it."""

    folder: Path
    labelled: dict[Path, Annotation | EventList] = field(default_factory=dict)
    unlabelled: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    misread: list[Path] = field(default_factory=list)  # their annotations have problems
    invalid: dict[Path, str] = field(default_factory=dict)
    boxed: set[Path] = field(default_factory=set)
    classes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, check: Callable[..., T], *given: Any) -> T | None:
        """What `check` returns; None where it raises problems, which join the others."""
        try:
            return check(*given)
        except DataError as error:
            self.problems += error.problems
            return None

    def refuse(self) -> None:
        """Raise everything at once, not one problem per attempt."""
        if self.problems:
            raise DataError(shortened(self.problems, MOST_PROBLEMS))


def load_folder(
    folder: Path,
    size: int,
    resize: bool,
    strict: bool,
    cache: Path | None = None,
    threads: int = 1,
    letterbox: bool = True,
    labelling: Labelling | None = None,
) -> VideoData:
    """The videos of `folder` that can be used; the others are named, or with `strict` an error."""
    labelling = labelling or Labelling()
    there = find_labels(folder, labelling)
    background = labelling.unlabelled == "background"
    videos = [*there.labelled, *(there.unlabelled if background else [])]
    # Heads first: they take milliseconds, decoding takes hours. Also of videos whose labels are
    # wrong or missing: what is wrong with the pictures shall not wait for the next attempt.
    others = there.unlabelled if labelling.unlabelled == "error" else []
    _check_heads(there, [*videos, *there.misread, *others], size, resize, letterbox)
    if there.invalid and (strict or len(there.invalid) == len(videos)):
        there.problems += _named(there.invalid)
    also = [BACKGROUND] if background and there.unlabelled else []
    labels = list(there.labelled.values())
    there.classes = there.attempt(class_names, folder, labels, also) or []
    there.refuse()
    usable = [video for video in videos if video not in there.invalid]
    timed = {v for v, a in there.labelled.items() if getattr(a, "unit", None) == "seconds"}
    decoded = load_frames(usable, size, cache or folder / "FrameCache", threads, there.boxed, timed)
    there.invalid |= decoded.invalid
    if there.invalid and (strict or len(there.invalid) == len(videos)):
        raise DataError(_named(there.invalid))
    made = [
        Video(path.stem, frames, there.attempt(_trials, there, path, frames, labelling) or [])
        for path, frames in decoded.frames.items()
    ]
    there.refuse()
    where = decoded.frames[next(iter(decoded.frames))].path.parent
    notes = [
        f"frames: {decoded.decoded} videos decoded and {len(usable) - decoded.decoded} found in "
        f"{where} in {decoded.seconds:.1f} s",
        *there.notes,
    ]
    if there.boxed:
        notes.append(
            f"letterboxed: {len(there.boxed)} videos that are not square (scaling=stretch fills "
            "the frame and changes shapes)"
        )
    if there.invalid:
        notes.append(f"skipped {len(there.invalid)} of {len(videos)} videos:")
        notes += [f"  {line}" for line in shortened(_named(there.invalid))]
    return VideoData(made, there.classes, notes)


# Which labels belong to which video


def find_labels(folder: Path, labelling: Labelling) -> Contents:
    """Each video with its labels, and what is wrong with any of them."""
    there = Contents(folder)
    inside = folder / "Videos" if (folder / "Videos").is_dir() else folder
    videos = _videos(inside)
    if not videos and inside == folder:
        raise DataError(
            f"data_dir={str(folder)!r} has no folder Videos; put Videos/*.mp4 there, and a CSV "
            "for each in Annotations/, or one table for all of them",
            code="MGT301",
        )
    if not videos:
        raise DataError(
            f"{inside} holds no video; put files there that end in {', '.join(VIDEO_ENDINGS)}"
        )
    names = [video.stem for video in videos]
    there.problems += [
        f"{inside} has several videos called {name}; give each its own name"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    table = there.attempt(_find_table, folder, inside, names, labelling.annotations)
    if table is not None:
        _from_table(there, table, videos, labelling.selection)
    elif not there.problems or labelling.annotations is None:
        _from_files(there, inside, videos, labelling.selection)
    _settle_unlabelled(there, table, inside, labelling)
    return there


def _videos(inside: Path) -> list[Path]:
    return sorted(path for path in inside.iterdir() if path.suffix.lower() in VIDEO_ENDINGS)


def _tables(inside: Path) -> list[Path]:
    return sorted(path for path in inside.iterdir() if path.suffix.lower() in TABLE_ENDINGS)


def _find_table(
    folder: Path, inside: Path, names: Sequence[str], given: Path | None
) -> Path | None:
    """The table for all videos: the one that was named, or the only one there is."""
    if given is not None:
        path = given if given.is_absolute() or given.is_file() else folder / given
        if not path.is_file():
            raise DataError(f"annotations={str(given)!r}: no such file, nor {folder / given}")
        return path
    found = [path for path in _tables(folder) if path.stem not in names]
    if len(found) > 1:
        raise DataError(
            f"{folder} has several tables, {', '.join(path.name for path in found)}; say which one "
            "holds the labels with annotations=NAME, or move the others away"
        )
    if found and (folder / "Annotations").is_dir() and _tables(folder / "Annotations"):
        raise DataError(
            f"{folder} has {found[0].name} and Annotations/; keep one of them, or say "
            f"annotations={found[0].name}"
        )
    return found[0] if found else None


def _from_table(there: Contents, path: Path, videos: list[Path], selection: Selection) -> None:
    table = read_event_table(path, selection)
    there.problems += table.problems
    by_name = {video.stem: video for video in videos}
    for name, events in table.by_video.items():
        video = by_name.get(name)
        if video is None:
            there.problems.append(
                f"{path}, line {events.rows[0].line}: no video called {name} in "
                f"{videos[0].parent}; add it, correct the name, or take its rows out"
            )
        else:
            there.labelled[video] = events
    there.labelled = {video: there.labelled[video] for video in videos if video in there.labelled}
    if not table.by_video:
        there.misread = list(videos)  # one problem of the table is not one of each video
    units = sorted({events.unit for events in table.by_video.values()})
    rows = sum(len(events.rows) for events in table.by_video.values())
    there.notes.append(f"labels: {rows} rows of {path}, read as {' and '.join(units)}")


def _from_files(there: Contents, inside: Path, videos: list[Path], selection: Selection) -> None:
    """One file per video, of the same name."""
    folder = there.folder / "Annotations"
    folder = folder if folder.is_dir() else inside
    files = {path.stem: path for path in _tables(folder)}
    stems = {video.stem for video in videos}
    for video in videos:
        path = files.get(video.stem)
        if path is None:
            continue
        labels = there.attempt(_read, there, path, video, selection)
        if labels is not None:
            there.labelled[video] = labels
        else:
            there.misread.append(video)
    there.problems += [
        f"{path} has no video {inside / stem}.mp4; add it, or move the annotation away"
        for stem, path in files.items()
        if stem not in stems
    ]


def _read(
    there: Contents, path: Path, video: Path, selection: Selection
) -> Annotation | EventList | None:
    if not is_event_table(path):
        return read_annotation(path)
    table = read_event_table(path, selection, video.stem)
    there.problems += table.problems
    others = [name for name in table.by_video if name != video.stem]
    if others:
        there.problems.append(
            f"{path} labels {', '.join(others)}, but its name is that of {video.name}; rename it, "
            f"or use it as a table for all videos with annotations={path}"
        )
    return table.by_video.get(video.stem)


def _settle_unlabelled(
    there: Contents, table: Path | None, inside: Path, labelling: Labelling
) -> None:
    """What becomes of videos that nobody annotated."""
    known = {*there.labelled, *there.misread}
    there.unlabelled = [video for video in _videos(inside) if video not in known]
    if not there.unlabelled:
        return
    if labelling.unlabelled == "error":
        folder = there.folder / "Annotations"
        folder = folder if folder.is_dir() else inside
        for video in there.unlabelled:
            missing = f"row in {table}" if table else f"annotation {folder / video.stem}.csv"
            what = "add rows for it" if table else "write it (columns frame,class)"
            there.problems.append(
                f"{video} has no {missing}; {what}, move the video away, or set unlabelled=skip "
                "or unlabelled=background"
            )
        return
    kind = "left out" if labelling.unlabelled == "skip" else f"taken as {BACKGROUND}"
    shown = ", ".join(video.name for video in there.unlabelled[:8])
    more = f" and {len(there.unlabelled) - 8} more" if len(there.unlabelled) > 8 else ""
    there.notes.append(
        f"{len(there.unlabelled)} videos without annotation, {kind} "
        f"(unlabelled={labelling.unlabelled}): {shown}{more}"
    )


# What the videos can hold


def _check_heads(
    there: Contents, videos: Sequence[Path], size: int, resize: bool, letterbox: bool
) -> None:
    """Files that are not videos, wrong sizes, and labels past the end."""
    for video in videos:
        try:
            head = probe(video)
        except InvalidVideo as error:
            there.invalid[video] = str(error)
            continue
        except DataError as error:  # no PyAV: as true of the others
            there.problems += error.problems
            return
        if (head.width, head.height) != (size, size) and not resize:
            fits = f"frame_size={head.width}, " if head.width == head.height else ""
            there.problems.append(
                f"{video} has frames of {head.width}x{head.height}, not {size}x{size}; set "
                f"{fits}resize=true to scale it while it is read, or convert it"
            )
        if resize and letterbox and abs(head.aspect - 1) > 1e-6:
            there.boxed.add(video)
        if video in there.labelled:
            labels = there.labelled[video]
            there.problems += labels.past_the_end(video, head.frames, head.seconds)
            if isinstance(labels, EventList) and not head.late:
                there.problems += labels.wrong_length(video, head.seconds)
    if len(videos) < 2 and not there.problems and not there.invalid:
        there.problems.append(
            f"{len(videos)} video cannot be split into training and validation; clips of one "
            "video must not be in both: add videos"
        )


def _trials(there: Contents, video: Path, frames: FrameFile, labelling: Labelling) -> list[Trial]:
    """The trials of a decoded video; what its head did not say is checked now."""
    labels = there.labelled.get(video)
    count = len(frames)
    if labels is None:
        middles = tuple(range(min(count // 2, labelling.background_stride // 2), count))
        middles = middles[:: labelling.background_stride]
        label = there.classes.index(BACKGROUND)
        return [Trial(0, count - 1, middles, (label,) * len(middles))]
    times = None if frames.times is None else np.asarray(frames.times)
    if isinstance(labels, EventList):
        if labels.unit == "seconds" and times is None:
            raise DataError(
                f"{video} has frames without times that rise; label it by frame numbers, or "
                "convert it (ffmpeg -i IN -c:v libx264 OUT.mp4)"
            )
        length = 0.0
        if times is not None:
            last = float(times[-1] - times[-2]) if count > 1 else 0.0
            length = float(times[-1]) + last
        problems = labels.past_the_end(video, count, length) or labels.wrong_length(video, length)
        if problems:
            raise DataError(problems)
        labels = labels.in_frames(times, labelling.stride)
    else:
        problems = labels.past_the_end(video, count, 0.0)
        if problems:
            raise DataError(problems)
    return labels.trials(count, there.classes)


def _named(invalid: dict[Path, str]) -> list[str]:
    return [
        f"{path} {reason}; replace it, or move it away with its annotation"
        for path, reason in sorted(invalid.items())
    ]
