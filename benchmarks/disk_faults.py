"""Disks, users and clocks that misbehave in mid-run: does training end as if undisturbed?

    python benchmarks/disk_faults.py --out disk_faults.json

A tiny training of one rank runs on a file system of its own that runs out of inodes, becomes
read-only, is unmounted, or answers EIO and ESTALE (a preloaded library fails the calls); as
another user; and with a clock that jumps. The weights must be those of an undisturbed run, or the
run must be refused in words before it trains; what was saved must be intact. Needs root and gcc.
"""

# ruff: noqa: E501 - one line per case reads best
from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from hostile_trial import attempt

STEPS = 30
# (error, every n-th call, first and last step at which calls fail)
PRELOADED = [(number, n, 0, 0) for number in (errno.EIO, errno.ESTALE) for n in (3, 7, 19)]
PRELOADED += [(errno.EROFS, 1, 5, 15), (errno.EROFS, 1, 7, 99), (errno.EIO, 1, 5, 15)]
PRELOADED += [(errno.ESTALE, 1, 9, 20), (errno.EIO, 2, 3, 25), (errno.ENOSPC, 1, 6, 99)]
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static long calls;
static int hit(const char *path) {
    const char *folder = getenv("SHIM_FOLDER"), *every = getenv("SHIM_EVERY");
    if (!folder || !path || strncmp(path, folder, strlen(folder))) return 0;
    if (getenv("SHIM_SWITCH") && access(getenv("SHIM_SWITCH"), F_OK)) return 0;
    if (++calls % atol(every)) return 0;
    errno = atoi(getenv("SHIM_ERRNO"));
    return 1;
}
static int hit_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return hit(path);
}
#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
ssize_t write(int fd, const void *b, size_t n) { return hit_fd(fd) ? -1 : NEXT(write)(fd, b, n); }
ssize_t writev(int fd, const struct iovec *v, int n);
int fsync(int fd) { return hit_fd(fd) ? -1 : NEXT(fsync)(fd); }
int rename(const char *a, const char *b) { return hit(a) ? -1 : NEXT(rename)(a, b); }
int mkdir(const char *a, mode_t m) { return hit(a) ? -1 : NEXT(mkdir)(a, m); }
int open64(const char *a, int flags, ...) {
    va_list more; va_start(more, flags); mode_t m = va_arg(more, mode_t); va_end(more);
    return hit(a) ? -1 : NEXT(open64)(a, flags, m);
}
int open(const char *a, int flags, ...) {
    va_list more; va_start(more, flags); mode_t m = va_arg(more, mode_t); va_end(more);
    return hit(a) ? -1 : NEXT(open)(a, flags, m);
}
"""


def train(folder: Path, at: dict[int, Callable[[], object]] | None = None, **settings: Any) -> str:
    """A run with a checkpoint every other step; `at` a step something happens to its disk."""
    from tiny import flat, line, manager_for, points, sgd, squares

    from multi_gpu_training import Callback

    class Happen(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            if at and result.step in at:
                at[result.step]()

    given = {"training_mode": "single", "batch_size": 2, "epochs": 9, "run_name": "it"}
    given |= {"enable_fault_tolerance": True, "checkpoint_frequency": 2, "keep_last": 3}
    given |= {"log_every": 1, "max_steps": STEPS, "resume": "auto", "progress": "lines", **settings}
    manager, model = manager_for(folder, **given), line()
    manager.fit(model, points(), loss_fn=squares, optimizer=sgd, callbacks=[Happen()])
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


def told(folder: Path, **more: Any) -> Callable[[], None]:
    """The training, with its errors as a script shows them."""

    def call() -> None:
        from multi_gpu_training.errors import MultiGPUError

        try:
            print("weights", train(folder, **more))
        except MultiGPUError as error:
            print(error)
            sys.exit(error.exit_code)

    return call


class Disk:
    """A small file system of our own."""

    def __init__(self, path: Path, options: str) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False)


def cases(base: Path) -> dict[str, tuple[Callable[[], object], bool, Callable[[], object]]]:
    """Name -> (call, whether it must train to its end, clean-up)."""
    found: dict[str, Any] = {}
    for inodes in (12, 20, 30):
        few = Disk(base / f"inodes-{inodes}", f"size=20m,nr_inodes={inodes}")
        found[f"{inodes} inodes"] = told(few.path), inodes > 12, few.unmount
    full = Disk(base / "full", "size=64k")
    found["64 KiB of space"] = told(full.path), True, full.unmount
    gone = Disk(base / "gone", "size=20m")
    found["unmounted at step 9"] = told(gone.path, at={9: gone.unmount}), True, gone.unmount

    def stranger() -> None:
        os.setgid(65534)
        os.setuid(65534)
        told(base / "theirs")()

    (base / "theirs").mkdir(mode=0o755)
    found["another user's folder"] = stranger, False, lambda: None
    shifts = iter([0.0, 1e7, -1e7, 3e8, -5.0, 86_400.0] * 1000)
    real = time.time

    def jumping() -> None:
        with mock.patch("time.time", lambda: max(1.0, real() + next(shifts))):
            told(base / "clock")()

    found["a clock that jumps"] = jumping, True, lambda: None

    def broken(*_: object) -> None:
        raise RuntimeError("broken at every restart")

    found["an exception at every start"] = (
        told(base / "broken", at={1: broken}),
        False,
        lambda: None,
    )
    return found


def preloaded(
    base: Path, number: int, every: int, first: int = 0, last: int = 0
) -> tuple[int, str]:
    """The training as a program whose calls into its run folder fail now and then; with `first`,
    only from that step to `last`. (A disk with open files cannot be remounted read-only.)"""
    library, folder = base / "shim.so", base / f"shim-{number}-{every}-{first}-{last}"
    switch = base / f"{folder.name}.on"
    if not library.exists():
        (base / "shim.c").write_text("#include <sys/stat.h>\n#include <sys/uio.h>\n" + SHIM)
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            "-o",
            str(library),
            str(base / "shim.c"),
            "-ldl",
        ]
        subprocess.run(command, check=True)
    folder.mkdir()
    code = (
        f"import disk_faults, pathlib; switch = pathlib.Path({str(switch)!r}); at = "
        f"{{{first}: switch.touch, {last}: switch.unlink}} if {first} else None; "
        f"disk_faults.told(pathlib.Path({str(folder)!r}), at=at)()"
    )
    env = {**os.environ, "LD_PRELOAD": str(library), "SHIM_FOLDER": str(folder / "custom")}
    env |= {"SHIM_ERRNO": str(number), "SHIM_EVERY": str(every)}
    if first:
        env["SHIM_SWITCH"] = str(switch)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from wrong_invocations import warm_up

    warm_up()
    bad: dict[str, str] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="disk-faults-") as temporary:
        base = Path(temporary)
        base.chmod(0o755)
        first = attempt(told(base / "whole"), base)
        whole = first.said.rpartition("weights ")[2].strip()
        for name, (call, trains, clean) in cases(base).items():
            ended = attempt(call, base)
            clean()
            problems = [
                p for p in ended.problems(must_fail=False) if trains or "traceback" not in p
            ]
            # Trained to its end, and then told that the last checkpoint could not be saved.
            ended_well = f"weights {whole}" in ended.said or f"not save step {STEPS}" in ended.said
            if trains and not ended_well:
                problems.append(f"other weights or none: {ended.said[-300:]!r}")
            if not trains and ended.code == 0:
                problems.append("was accepted")
            rows.append({"fault": name, "code": ended.code, "problems": problems})
        for number, every, first, last in PRELOADED:
            code, said = preloaded(base, number, every, first, last)
            same = f"weights {whole}" in said
            # A disk that fails every third call may refuse the run before it trains; one that
            # fails to the end cannot take the last checkpoint.
            fine = same or (
                (code == 2 or f"not save step {STEPS}" in said) and "Traceback" not in said
            )
            when = f" from step {first} to {last}" if first else ""
            name = f"every {every}. call fails with {errno.errorcode[number]}{when}"
            told_ = [] if fine else [said[-300:]]
            rows.append({"fault": name, "code": code, "problems": told_, "trained": same})
    for row in rows:
        print(
            row["fault"], row["code"], *row["problems"], sep="\n    " if row["problems"] else "  "
        )
        if row["problems"]:
            bad[str(row["fault"])] = str(row["problems"])
    print(f"{len(rows)} faults, {len(bad)} with problems")
    if given.out is not None:
        facts = {"python": platform.python_version(), "faults": rows}
        given.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
