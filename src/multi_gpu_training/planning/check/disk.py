"""`python -m ...disk`: whether checkpoints can be written to a folder, and how fast."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.distributed.trial import Voice
from multi_gpu_training.planning.check.check_report import Finding, Group
from multi_gpu_training.planning.check.registry import Context, check
from multi_gpu_training.planning.check.watched_process import Watched, watch

GROUP = Group("Machine")
MIB, GIB = 2**20, 2**30
WRITTEN_BYTES = 64 * MIB
SPACE_ENOUGH = 2 * GIB
SLOW_BYTES_S = 50 * MIB
FULL = {errno.ENOSPC, errno.EDQUOT}


@check(order=40)
def check_disk(context: Context) -> Iterator[Finding]:
    folder, limit = context.options.save_dir, context.options.timeout_s
    return judge(measure(folder, limit), folder, limit)


def measure(folder: Path, limit_s: float) -> Watched:
    """Write a file there in a child process: a network disk may hang."""
    program = Watched(
        "multi_gpu_training.planning.check.disk",
        {"folder": str(folder.absolute()), "bytes": WRITTEN_BYTES},
    )
    try:
        watch([program], limit_s)
    finally:
        program.kill()
    return program


def judge(program: Watched, folder: Path, limit_s: float) -> Iterator[Finding]:
    remedy = "choose another --save-dir"
    problem = program.last("problem")
    free = program.last("free_bytes")
    if program.timed_out:
        yield GROUP.fail(
            "disk", f"{folder}: writing did not end within {limit_s:g} s: the disk hangs", remedy
        )
    elif problem is not None:
        number, text = problem
        if number in FULL:
            left = f"{(free or 0) / MIB:.0f} MB free"
            remedy = f"free some space, or {remedy}"
            yield GROUP.fail(
                "disk", f"{folder}: it is full, {left}: {text}", remedy, free_bytes=free
            )
        elif number == errno.EROFS:
            remedy = f"{remedy}, or mount it writable: mount -o remount,rw"
            yield GROUP.fail("disk", f"{folder}: it is read-only: {text}", remedy)
        else:
            yield GROUP.fail("disk", f"{folder}: checkpoints cannot be written: {text}", remedy)
    elif program.last("bytes_s") is None:
        yield GROUP.fail("disk", f"{folder}: it could not be tried: {program.complaint()}", remedy)
    else:
        yield _speed(folder, program.last("bytes_s"), free, remedy)


def _speed(folder: Path, speed: float, free: int, remedy: str) -> Finding:
    text = f"{folder}: {speed / 1e6:,.0f} MB/s, {free / GIB:,.1f} GB free"
    facts = {"free_bytes": free, "bytes_per_s": speed}
    if free < SPACE_ENOUGH:
        return GROUP.warn(
            "disk",
            f"{text}: a few checkpoints of a large model fill it",
            f"free some space, keep fewer (keep_last=1), or {remedy}",
            **facts,
        )
    if speed < SLOW_BYTES_S:
        return GROUP.warn(
            "disk",
            f"{text}: training will wait for checkpoints",
            f"save less often (checkpoint_frequency), or {remedy}",
            **facts,
        )
    return GROUP.passed("disk", text, **facts)


def try_folder(folder: Path, count: int, voice: Voice) -> None:
    """Write `count` bytes to the disk that `folder` is or will be on."""
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
        block = os.urandom(MIB)
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
        with suppress(OSError):  # leave no trace
            if file is not None:
                file.unlink(missing_ok=True)
            for path in made:
                path.rmdir()
    voice.say(stage="end")


def main() -> None:
    die_with_parent()
    voice = Voice()
    request = json.loads(sys.stdin.readline())
    try_folder(Path(request["folder"]), request["bytes"], voice)
    os._exit(0)


if __name__ == "__main__":
    main()
