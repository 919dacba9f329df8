"""`python -m ...disk`: whether checkpoints can be written to a folder, and how fast."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed.trial import Voice
from multi_gpu_training.planning.check.check_report import Finding, Group
from multi_gpu_training.planning.check.registry import Context, check
from multi_gpu_training.planning.check.watched_process import Watched, be_program, run_program

DISK = Group("Machine").about("disk")
MIB, GIB = 2**20, 2**30
WRITTEN_BYTES = 64 * MIB
SPACE_ENOUGH = 2 * GIB
SLOW_BYTES_S = 50 * MIB
FULL = {errno.ENOSPC, errno.EDQUOT}


@check(order=40)
def check_disk(context: Context) -> Iterator[Finding]:
    folder, limit = context.options.save_dir, context.options.timeout_s
    yield judge(measure(folder, limit), folder, limit)


def measure(folder: Path, limit_s: float) -> Watched:
    """Write a file there in a child process: a network disk may hang."""
    request = {"folder": str(folder.absolute()), "bytes": WRITTEN_BYTES}
    return run_program(__name__, request, limit_s)


def judge(program: Watched, folder: Path, limit_s: float) -> Finding:
    elsewhere = "choose another --save-dir"
    problem, free = program.last("problem"), program.last("free_bytes")
    if program.timed_out:
        text = f"{folder}: writing did not end within {limit_s:g} s: the disk hangs"
        return DISK.fail(text, elsewhere)
    if problem is not None:
        number, text = problem
        if number in FULL:
            text = f"{folder}: it is full, {(free or 0) / MIB:.0f} MB free: {text}"
            return DISK.fail(text, f"free some space, or {elsewhere}", free_bytes=free)
        if number == errno.EROFS:
            remedy = f"{elsewhere}, or mount it writable: mount -o remount,rw"
            return DISK.fail(f"{folder}: it is read-only: {text}", remedy)
        return DISK.fail(f"{folder}: checkpoints cannot be written: {text}", elsewhere)
    speed = program.last("bytes_s")
    if speed is None:
        return DISK.fail(f"{folder}: it could not be tried: {program.complaint()}", elsewhere)
    text = f"{folder}: {speed / 1e6:,.0f} MB/s, {free / GIB:,.1f} GB free"
    facts = {"free_bytes": free, "bytes_per_s": speed}
    if free < SPACE_ENOUGH:
        remedy = f"free some space, keep fewer (keep_last=1), or {elsewhere}"
        return DISK.warn(f"{text}: a few checkpoints of a large model fill it", remedy, **facts)
    if speed < SLOW_BYTES_S:
        remedy = f"save less often (checkpoint_frequency), or {elsewhere}"
        return DISK.warn(f"{text}: training will wait for checkpoints", remedy, **facts)
    return DISK.passed(text, **facts)


# The program


def try_folder(request: dict[str, Any], voice: Voice) -> None:
    """Write some bytes to the disk that the folder is or will be on, and leave no trace."""
    folder, count = Path(request["folder"]), request["bytes"]
    made: list[Path] = []
    file = None
    try:
        place = folder
        while not place.exists() and place != place.parent:
            made.append(place)
            place = place.parent
        stat = os.statvfs(place)
        voice.say(free_bytes=stat.f_bavail * stat.f_frsize, stage="write")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f".mgt-check-{os.getpid()}"
        block = os.urandom(MIB)  # random: some disks compress
        begun = time.perf_counter()
        with file.open("wb") as out:
            for _ in range(count // MIB):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        voice.say(bytes_s=count / (time.perf_counter() - begun))
    except OSError as error:
        voice.say(problem=[error.errno, f"{error.strerror} ({error.filename or folder})"])
    finally:
        with suppress(OSError):
            if file is not None:
                file.unlink(missing_ok=True)
            for path in made:
                path.rmdir()


if __name__ == "__main__":
    be_program(try_folder)
