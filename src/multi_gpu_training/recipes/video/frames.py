"""Frames of video files: decoded once with PyAV, then kept on disk as bytes.

A cached video is two files in the cache folder: `<video>-<key>.frames`, its grey frames as uint8
one after the other, and `<video>-<key>.json`, written last, with their count and times or with why
the video cannot be used. The key is made of the video's path, size and time of change and of the
frame size: a changed video is decoded anew. Ranks that start together share the work by locking
each video.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.user_data import library

VIDEO_ENDINGS = (".mp4", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg", ".webm")
MOST_PIXELS = 2**25  # of a frame: 8K video just fits
BAR = 128  # halfway between black and white


class InvalidVideo(Exception):
    """The file cannot be used; the message says why."""


@dataclass(frozen=True)
class Head:
    """What a video file says about itself; `frames` and `seconds` are 0 where it does not say.

    `late`: its clock does not begin at 0; some containers then give a length that is too long.
    `aspect` is the width of the picture as it is shown, over its height: pixels need not be square.
    """

    frames: int
    height: int
    width: int
    seconds: float
    late: bool
    aspect: float


class FrameFile:
    """Frames of (count, height, width) on disk, mapped into memory when first read.

    `times` are the seconds at which they are shown; None where the file does not say.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int, int], times: Sequence[float] | None = None
    ) -> None:
        self.path = path
        self.shape = shape
        self.times = times
        self._mapped: Any = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, frames: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._mapped is None:
            self._mapped = np.memmap(self.path, np.uint8, "r", shape=self.shape)
        return np.asarray(self._mapped[frames])

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps it for itself, and has no use for the times.
        return {**self.__dict__, "_mapped": None, "times": None}


@dataclass(frozen=True)
class Decoded:
    """Frames of every usable video, why the others are not, and what it took."""

    frames: dict[Path, FrameFile]
    invalid: dict[Path, str]
    decoded: int
    seconds: float


def open_video(path: Path) -> Any:
    """An open PyAV container with one video stream."""
    av = library("av", "reading videos needs PyAV", extra="video")
    if not path.is_file():  # opening a FIFO would wait for whoever is at its other end
        raise InvalidVideo("is not a regular file")
    try:
        # A playlist that calls itself a video must not make FFmpeg fetch what it names.
        container = av.open(str(path), options={"protocol_whitelist": "file"})
    except (av.error.FFmpegError, OSError) as error:
        raise InvalidVideo(f"is no video that can be read ({_words(error)})") from None
    if not container.streams.video:
        container.close()
        raise InvalidVideo("holds no pictures")
    stream = container.streams.video[0]
    if (stream.width or 0) * (stream.height or 0) > MOST_PIXELS:
        container.close()
        raise InvalidVideo(
            f"has {stream.width:,} x {stream.height:,} pixels, {MOST_PIXELS:,} at most are decoded"
        )
    return container


def probe(path: Path) -> Head:
    """Size and length as the file's head gives them, without decoding."""
    with open_video(path) as container:
        stream = container.streams.video[0]
        length = container.duration / 1e6 if container.duration else 0.0
        late = abs(container.start_time or 0) > 0.1e6
        return Head(stream.frames, stream.height, stream.width, length, late, _aspect(stream))


def _aspect(stream: Any) -> float:
    pixel = float(stream.sample_aspect_ratio or 1)
    return pixel * stream.width / stream.height if stream.width and stream.height else 1.0


def decode(
    path: Path, size: int, letterbox: bool = False
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.uint8]], float | None]]:
    """Grey frames of `size` x `size`, one by one, with the second at which each is shown.

    Where the video has another size it is scaled: to the whole square, or with `letterbox` as
    large as its shape allows, between bars of grey, which the model sees as 0.
    """
    import av

    with open_video(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"  # decode on several cores
        aspect = _aspect(stream) if letterbox else 1.0
        width, height = (max(1, round(size * min(1.0, part))) for part in (aspect, 1 / aspect))
        top, left = (size - height) // 2, (size - width) // 2
        # Players count from where the file begins, which need not be where its clock does.
        origin = None if container.start_time is None else container.start_time / 1e6
        count = 0
        try:
            for frame in container.decode(stream):
                shown = None if frame.time is None else float(frame.time)
                origin = shown if origin is None else origin
                if (frame.width, frame.height) != (width, height):
                    frame = frame.reformat(width, height, "gray", interpolation="AREA")
                picture = frame.to_ndarray(format="gray")
                if letterbox:
                    square = np.full((size, size), BAR, np.uint8)
                    square[top : top + height, left : left + width] = picture
                    picture = square
                count += 1
                yield picture, None if shown is None or origin is None else shown - origin
        except av.error.FFmpegError as error:
            raise InvalidVideo(f"breaks off after {count} frames ({_words(error)})") from None
        if count < stream.frames or count == 0:
            raise InvalidVideo(f"is cut short: {count} of its {stream.frames} frames are there")


def load_frames(
    videos: Sequence[Path],
    size: int,
    cache: Path,
    threads: int = 1,
    letterbox: Collection[Path] = (),
    timed: Collection[Path] = (),
) -> Decoded:
    """The frames of every video, from the cache where they are in it.

    Those in `letterbox` keep their shape when they are scaled. Those in `timed` need the times of
    their frames, which caches of version 0.1 do not hold: there they are decoded again.

    Safe with several ranks and runs at once: each video is decoded by one of them.
    """
    started = time.perf_counter()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the frame cache {cache} cannot be made ({error.strerror}); set cache_dir to a "
            "folder that can be written",
            code="MGT704",
        ) from None
    entries = [
        CachedVideo(video, size, cache, video in letterbox, video in timed) for video in videos
    ]
    _check_space([entry for entry in entries if not entry.known], cache)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        # First what nobody else is at, then what others may have finished meanwhile.
        mine = list(pool.map(lambda entry: entry.fill(wait=False), entries))
        later = list(pool.map(lambda entry: entry.fill(wait=True), entries))
    frames, invalid = {}, {}
    for entry in entries:
        found = entry.read()
        assert found is not None
        if isinstance(found, FrameFile):
            frames[entry.video] = found
        else:
            invalid[entry.video] = found
    return Decoded(frames, invalid, sum(mine) + sum(later), time.perf_counter() - started)


class CachedVideo:
    """One video's place in the cache."""

    def __init__(
        self, video: Path, size: int, cache: Path, letterbox: bool = False, timed: bool = False
    ) -> None:
        facts = video.stat()
        form = "gray-letterbox-1" if letterbox else "gray-1"
        identity = (str(video.resolve()), facts.st_size, facts.st_mtime_ns, size, form)
        key = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
        self.video, self.size, self.letterbox, self.timed = video, size, letterbox, timed
        self.frames = cache / f"{video.stem}-{key}.frames"
        self.facts = self.frames.with_suffix(".json")

    @property
    def known(self) -> bool:
        return self.read() is not None

    def read(self) -> FrameFile | str | None:
        """The frames, or why there are none; None where the cache does not know."""
        try:
            facts = json.loads(self.facts.read_text())
            if facts["problem"] is not None:
                return str(facts["problem"])
            shape = (int(facts["frames"]), self.size, self.size)
            if self.frames.stat().st_size != shape[0] * self.size**2:
                return None
            if self.timed and "times" not in facts:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return FrameFile(self.frames, shape, facts.get("times"))

    def fill(self, wait: bool) -> bool:
        """Decode the video unless the cache knows it; True if that was done here."""
        if self.known:
            return False
        with _lock(self.frames.with_suffix(".lock"), wait) as held:
            if not held or self.known:
                return False
            self._decode()
            return True

    def _decode(self) -> None:
        partial = self.frames.with_suffix(".partial")
        problem = None
        times: list[float | None] = []
        try:
            with partial.open("wb") as file:
                for frame, shown in decode(self.video, self.size, self.letterbox):
                    file.write(np.ascontiguousarray(frame).tobytes())
                    times.append(shown)
                file.flush()
                os.fsync(file.fileno())  # before the rename: a crash leaves all of it or none
            partial.replace(self.frames)
        except InvalidVideo as error:
            problem = str(error)
            partial.unlink(missing_ok=True)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise DataError(
                f"the frames of {self.video} cannot be written to {partial.parent} "
                f"({error.strerror}); make room there, or set cache_dir to another folder",
                code="MGT704",
            ) from None
        facts = {
            "source": str(self.video),
            "frames": len(times),
            "problem": problem,
            "times": _increasing(times),
        }
        partial.write_text(json.dumps(facts))
        partial.replace(self.facts)  # last: what has this file is whole


def _increasing(times: Sequence[float | None]) -> list[float] | None:
    """The times, or None if one is missing or not later than the one before."""
    known = [round(shown, 6) for shown in times if shown is not None]
    rising = all(one < two for one, two in pairwise(known))
    return known if rising and len(known) == len(times) else None


@contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of that file among all processes and threads; False if another has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise DataError(
                f"{path.parent} knows no file locks ({error.strerror}); set cache_dir to a folder "
                "on a local disk"
            ) from None
        yield True  # closing the file gives the lock back


def _check_space(entries: Sequence[CachedVideo], cache: Path) -> None:
    """Refuse before decoding what the disk cannot take."""
    needed = 0
    for entry in entries:
        try:
            needed += probe(entry.video).frames * entry.size**2
        except InvalidVideo:
            continue
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise DataError(
            f"the frames of {len(entries)} videos take {needed / 2**30:.1f} GiB as "
            f"{entries[0].size}x{entries[0].size} bytes, but {cache} has {free / 2**30:.1f} GiB "
            "free; set cache_dir to a larger disk, or frame_size lower",
            code="MGT704",
        )


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
