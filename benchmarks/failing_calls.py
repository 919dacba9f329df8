"""A disk that fails and a clock that jumps, for one training alone, switched while it runs.

A preloaded library lets the calls into one folder fail, and a `sitecustomize` moves `time.time`.
Both read a small shared file, which the benchmark writes.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

# errno, every n-th call, which calls, seconds that the clock is off
LAYOUT = struct.Struct("4q")
ALL, WRITES, NEW = 0, 1, 2
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { ALL, WRITES, NEW };
static volatile int64_t *told;
static const char *folder;
static long calls;
__attribute__((constructor)) static void begin(void) {
    const char *control = getenv("SHIM_CONTROL");
    folder = getenv("SHIM_FOLDER");
    int fd = control ? syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(0, 32, PROT_READ, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at != MAP_FAILED) told = at;
}
static int hit(const char *path, int kind) {
    if (!told || !told[0] || !folder || !path || strncmp(path, folder, strlen(folder))) return 0;
    if (kind < told[2] || ++calls % told[1]) return 0;
    errno = (int)told[0];
    return 1;
}
static int hit_fd(int fd, int kind) {
    char link[64], path[4096];
    if (!told || !told[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return hit(path, kind);
}
static int kind_of(int flags) {
    return flags & O_CREAT ? NEW : flags & (O_WRONLY | O_RDWR) ? WRITES : ALL;
}
#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
ssize_t write(int fd, const void *b, size_t n) {
    return hit_fd(fd, WRITES) ? -1 : NEXT(write)(fd, b, n);
}
int fsync(int fd) { return hit_fd(fd, WRITES) ? -1 : NEXT(fsync)(fd); }
int rename(const char *a, const char *b) { return hit(a, WRITES) ? -1 : NEXT(rename)(a, b); }
int unlink(const char *a) { return hit(a, WRITES) ? -1 : NEXT(unlink)(a); }
int mkdir(const char *a, mode_t m) { return hit(a, NEW) ? -1 : NEXT(mkdir)(a, m); }
#define OPEN(name) int name(const char *a, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t m = va_arg(more, mode_t); va_end(more); \
    return hit(a, kind_of(flags)) ? -1 : NEXT(name)(a, flags, m); }
OPEN(open)
OPEN(open64)
"""
CLOCK = """
import mmap, os, struct, time
if os.environ.get("SHIM_CONTROL"):
    with open(os.environ["SHIM_CONTROL"], "rb") as file:
        told = mmap.mmap(file.fileno(), 32, access=mmap.ACCESS_READ)
    real, real_ns = time.time, time.time_ns
    # Ranks jump by different amounts, the launcher by another.
    off = lambda: struct.unpack_from("q", told, 24)[0] * (1 + os.getpid() % 3)
    time.time = lambda: max(1.0, real() + off())
    time.time_ns = lambda: max(1, real_ns() + off() * 10**9)
"""


class FailingCalls:
    """What one training is started with, and the switch."""

    def __init__(self, tools: Path, folder: Path, control: Path) -> None:
        self._library, self._folder, self._control = built(tools), folder, control
        if not control.exists():
            control.write_bytes(LAYOUT.pack(0, 1, 0, 0))

    @classmethod
    def at(cls, subject: Path) -> FailingCalls:
        """Those of the run below a subject's folder."""
        return cls(subject.parent / "tools", subject / "runs", subject / "control")

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(
            filter(None, [str(self._library.parent), os.environ.get("PYTHONPATH")])
        )
        told = {"LD_PRELOAD": str(self._library), "PYTHONPATH": path}
        return {**told, "SHIM_FOLDER": str(self._folder), "SHIM_CONTROL": str(self._control)}

    def fail(self, number: int, every: int = 1, calls: int = ALL) -> None:
        self._write(0, struct.pack("3q", number, every, calls))

    def work(self) -> None:
        self._write(0, struct.pack("3q", 0, 1, 0))

    def jump(self, seconds: int) -> None:
        self._write(24, struct.pack("q", seconds))

    def _write(self, offset: int, raw: bytes) -> None:
        with self._control.open("r+b") as file:
            file.seek(offset)
            file.write(raw)


def built(folder: Path) -> Path:
    """The library, beside the module that moves the clock."""
    library = folder / "shim.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(CLOCK)
        (folder / "shim.c").write_text(SHIM)
        command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(library), str(folder / "shim.c")]
        subprocess.run([*command, "-ldl"], check=True)
    return library
