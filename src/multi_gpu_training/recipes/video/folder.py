"""A folder of videos with their annotations, checked as a whole before anything is decoded.

Videos/*.mp4            grey or colour; read as grey
Annotations/*.csv       one a video, of the same name; or beside the video
classes.txt             the classes in order, one a line; may be left out
"""

from __future__ import annotations

from pathlib import Path

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import refuse, shortened
from multi_gpu_training.recipes.video.annotations import Annotation, class_names, read_annotation
from multi_gpu_training.recipes.video.clips import Video, VideoData
from multi_gpu_training.recipes.video.frames import FrameFile, InvalidVideo, load_frames, probe

ENDINGS = (".mp4", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg", ".webm")


def load_folder(
    folder: Path, size: int, resize: bool, strict: bool, cache: Path | None = None, threads: int = 1
) -> VideoData:
    """The videos of `folder` that can be used; the others are named, or with `strict` an error."""
    pairs = find_pairs(folder)
    annotations = {video: note for video, note in zip(pairs, _read(pairs), strict=True)}
    classes = class_names(folder, list(annotations.values()))
    # Heads first: they take milliseconds, decoding takes hours.
    invalid = _check_heads(annotations, size, resize)
    usable = [video for video in pairs if video not in invalid]
    decoded = load_frames(usable, size, cache or folder / "FrameCache", threads)
    invalid |= decoded.invalid
    if invalid and (strict or len(invalid) == len(pairs)):
        raise DataError(_named(invalid))
    _check_ends(annotations, decoded.frames)
    videos = [
        Video(path.stem, frames, annotations[path].trials(len(frames), classes))
        for path, frames in decoded.frames.items()
    ]
    where = decoded.frames[next(iter(decoded.frames))].path.parent
    notes = [
        f"frames: {decoded.decoded} videos decoded and {len(usable) - decoded.decoded} found in "
        f"{where} in {decoded.seconds:.1f} s"
    ]
    if invalid:
        notes.append(f"skipped {len(invalid)} of {len(pairs)} videos:")
        notes += [f"  {line}" for line in _named(invalid)]
    return VideoData(videos, classes, notes)


def find_pairs(folder: Path) -> dict[Path, Path]:
    """Each video with its annotation; a missing half of any pair is an error."""
    inside = folder / "Videos"
    if not inside.is_dir():
        raise DataError(
            f"data_dir={str(folder)!r} has no folder Videos; put Videos/*.mp4 there, and a CSV "
            "for each in Annotations/"
        )
    notes_folder = folder / "Annotations" if (folder / "Annotations").is_dir() else inside
    videos = sorted(path for path in inside.iterdir() if path.suffix.lower() in ENDINGS)
    notes = {path.stem: path for path in sorted(notes_folder.glob("*.csv"))}
    if not videos:
        raise DataError(
            f"{inside} holds no video; put files there that end in {', '.join(ENDINGS)}"
        )
    names = [video.stem for video in videos]
    problems = [
        f"{inside} has several videos called {name}; give each a name of its own"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    problems += [
        f"{video} has no annotation {notes_folder / video.stem}.csv; write it (columns "
        "frame,class), or move the video away"
        for video in videos
        if video.stem not in notes
    ]
    problems += [
        f"{path} has no video {inside / stem}.mp4; add it, or move the annotation away"
        for stem, path in notes.items()
        if stem not in names
    ]
    refuse(problems)
    return {video: notes[video.stem] for video in videos}


def _read(pairs: dict[Path, Path]) -> list[Annotation]:
    read, problems = [], []
    for path in pairs.values():
        try:
            read.append(read_annotation(path))
        except DataError as error:
            problems += error.problems
    refuse(problems)
    return read


def _check_heads(annotations: dict[Path, Annotation], size: int, resize: bool) -> dict[Path, str]:
    """Why some files are no videos; wrong sizes and labels past the end are errors."""
    invalid, problems = {}, []
    for video, annotation in annotations.items():
        try:
            head = probe(video)
        except InvalidVideo as error:
            invalid[video] = str(error)
            continue
        if (head.width, head.height) != (size, size) and not resize:
            fits = f"frame_size={head.width}, " if head.width == head.height else ""
            problems.append(
                f"{video} has frames of {head.width}x{head.height}, not {size}x{size}; set "
                f"{fits}resize=true to scale it while it is read, or convert it"
            )
        if head.frames:
            problems += _past_the_end(annotation, head.frames, video)
    refuse(problems)
    return invalid


def _check_ends(annotations: dict[Path, Annotation], frames: dict[Path, FrameFile]) -> None:
    """Once more with the frames that were decoded: some containers do not say how many."""
    refuse(
        [
            problem
            for video, found in frames.items()
            for problem in _past_the_end(annotations[video], len(found), video)
        ]
    )


def _past_the_end(annotation: Annotation, frames: int, video: Path) -> list[str]:
    row = annotation.last_frame
    if row.frame < frames:
        return []
    return [
        f"{annotation.path}, line {row.line}: frame {row.frame}, but {video} has {frames} frames, "
        f"0 to {frames - 1}; correct the number, or check that they belong together"
    ]


def _named(invalid: dict[Path, str]) -> list[str]:
    return shortened(
        [
            f"{path} {reason}; replace it, or move it away with its annotation"
            for path, reason in sorted(invalid.items())
        ]
    )
