"""The host: shared memory, open files, cores, memory, threads."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.planning.check.check_report import Finding, Group
from multi_gpu_training.planning.check.registry import Context, check
from multi_gpu_training.portability import usable_cores

GROUP = Group("Machine")
MIB, GIB = 2**20, 2**30
SHM = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Docker gives 64 MiB, with which loader workers die of "Bus error" and NCCL of its buffers.
SHM_LEAST, SHM_ENOUGH = 64 * MIB, GIB
FILES_LEAST, FILES_ENOUGH = 256, 1024
# Importing torch takes so much.
TOO_LITTLE = 384 * MIB
# A rank with torch takes 0.3 GiB before it has a model, with CUDA some GiB.
MEMORY_LEAST, MEMORY_ENOUGH = GIB // 2, 2 * GIB
MOST_WORKERS = 8


@dataclass(frozen=True)
class Machine:
    """What this process may use. `quota_cores` is what a container allows, None without limit."""

    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: int
    open_files_hard: int
    cores: int
    quota_cores: float | None
    memory_free_bytes: int
    memory_limit: str
    address_space_bytes: int | None
    omp: str | None

    @property
    def usable_cores(self) -> float:
        return min(self.cores, self.quota_cores or self.cores)


def look(env: Mapping[str, str]) -> Machine:
    total = free = None
    with suppress(OSError):
        stat = os.statvfs(SHM)
        total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    memory, limit = _memory()
    return Machine(
        shm_bytes=total,
        shm_free_bytes=free,
        open_files=_finite(soft),
        open_files_hard=_finite(hard),
        cores=len(usable_cores()),
        quota_cores=cores_allowed(),
        memory_free_bytes=memory,
        memory_limit=limit,
        address_space_bytes=None if space == resource.RLIM_INFINITY else space,
        omp=env.get("OMP_NUM_THREADS"),
    )


def _finite(value: int) -> int:
    return 2**31 if value == resource.RLIM_INFINITY else value


def _memory() -> tuple[int, str]:
    """Bytes of memory that are left, and who sets the limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = memory_left()
    if left is not None and left < available:
        return left, "the container's limit"
    return available, "the machine"


@check(order=30)
def check_machine(context: Context) -> Iterator[Finding]:
    return judge(look(context.env), context.ranks_here, context.gpu_count)


def judge(found: Machine, ranks: int, gpus: int) -> Iterator[Finding]:
    """`ranks` train on this machine, on `gpus` GPUs."""
    yield _shared_memory(found)
    yield _open_files(found)
    yield _cores(found, ranks)
    yield free_memory(found, ranks, gpus)
    yield _threads(found, ranks)


def _shared_memory(found: Machine) -> Finding:
    topic = GROUP.about("/dev/shm")
    if found.shm_free_bytes is None or found.shm_bytes is None:
        text = "not there; loader workers and NCCL pass data through it"
        return topic.fail(text, "mount -t tmpfs -o size=8g tmpfs /dev/shm")
    free = found.shm_free_bytes
    text = f"{_size(free)} free of {_size(found.shm_bytes)}"
    remedy = (
        "docker run --shm-size=8g (or --ipc=host); else mount -o remount,size=8g /dev/shm; "
        "without loader workers (num_workers=0) CPU training needs little of it"
    )
    if found.shm_bytes > SHM_ENOUGH > free:
        remedy = f"remove what fills it: ls -lhS /dev/shm; or {remedy}"
    if free <= SHM_LEAST:
        text += ": loader workers crash with 'Bus error', and NCCL cannot allocate its buffers"
        return topic.fail(text, remedy, free_bytes=free)
    if free < SHM_ENOUGH:
        text += ": large batches from loader workers may not fit"
        return topic.warn(text, remedy, free_bytes=free)
    return topic.passed(text, free_bytes=free)


def _open_files(found: Machine) -> Finding:
    topic = GROUP.about("open files")
    text = f"{found.open_files} open files allowed (ulimit -n)"
    remedy = f"ulimit -n {min(found.open_files_hard, 65536)}"
    if found.open_files_hard < FILES_ENOUGH:
        remedy = (
            f"the hard limit is {found.open_files_hard} too: as root ulimit -n 65536, for good in "
            "/etc/security/limits.conf; docker run --ulimit nofile=65536"
        )
    if found.open_files < FILES_LEAST:
        return topic.fail(f"{text}: ranks and their loader workers need more", remedy)
    if found.open_files < FILES_ENOUGH:
        return topic.warn(f"{text}: many loader workers need more", remedy)
    return topic.passed(text, limit=found.open_files)


def workers_for(cores: float, ranks: int) -> int:
    """Loader workers per rank: the cores that its own main thread leaves."""
    return max(0, min(MOST_WORKERS, int(cores / ranks) - 1))


def _cores(found: Machine, ranks: int) -> Finding:
    usable = found.usable_cores
    text = f"{usable:g} cores for {_ranks(ranks)}"
    if found.quota_cores is not None and found.quota_cores < found.cores:
        text += f" (the container may use {found.quota_cores:g} of {found.cores})"
    workers = workers_for(usable, ranks)
    topic = GROUP.about("cores", cores=usable, workers_per_rank=workers)
    if usable < ranks:
        return topic.warn(f"{text}: ranks wait for each other", f"use {max(1, int(usable))} ranks")
    if workers == 0:
        remedy = "num_workers=0, or fewer ranks; more cores where data is decoded while training"
        return topic.warn(f"{text}: none left for loader workers", remedy)
    return topic.passed(f"{text}: loader workers per rank: up to {workers}")


def free_memory(found: Machine, ranks: int, gpus: int) -> Finding:
    topic = GROUP.about("memory")
    space = found.address_space_bytes
    if space is not None and space < (2**46 if gpus else 8 * GIB):
        level = topic.fail if gpus or space < 2 * GIB else topic.warn
        why = "CUDA needs all of them" if gpus else "torch alone takes several GB"
        text = f"a process may have {_size(space)} of addresses (ulimit -v): {why}"
        return level(text, "ulimit -v unlimited")
    free = found.memory_free_bytes
    text = f"{_size(free)} of host memory free for {_ranks(ranks)}"
    remedy = "end other programs, use fewer ranks, or fewer loader workers"
    if found.memory_limit != "the machine":
        text += f", by {found.memory_limit}"
        remedy += "; or raise that limit (docker run --memory, srun --mem)"
    often = MEMORY_ENOUGH * 2 if gpus else MEMORY_ENOUGH
    if free < ranks * MEMORY_LEAST:
        text += f": each takes {_size(MEMORY_LEAST)} at least"
        return topic.fail(text, remedy, free_bytes=free)
    if free < ranks * often:
        return topic.warn(f"{text}: a rank often takes {_size(often)}", remedy, free_bytes=free)
    return topic.passed(text, free_bytes=free)


def _threads(found: Machine, ranks: int) -> Finding:
    """OMP_NUM_THREADS: threads of a rank on the CPU."""
    topic = GROUP.about("OMP threads")
    share = max(1, int(found.usable_cores / ranks))
    if found.omp is None:
        return topic.passed(f"OMP_NUM_THREADS is not set: mgt gives each rank {share}")
    text = f"OMP_NUM_THREADS={found.omp}"
    parts = [part.strip() for part in found.omp.split(",")]  # one for each level of nesting
    remedy = f"export OMP_NUM_THREADS={share}, or unset it"
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        return topic.fail(f"{text} is not a number of threads: it is ignored", remedy)
    if int(parts[0]) * ranks > found.usable_cores and int(parts[0]) > 1:
        text += f" for each of {ranks} ranks is more than {found.usable_cores:g} cores"
        return topic.warn(text, remedy)
    return topic.passed(f"{text} for each of {_ranks(ranks)}")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GB" if count >= GIB else f"{count / MIB:.0f} MB"


# What a container or job scheduler allows: control groups, old and new


def cores_allowed(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Cores by quota; None without a limit."""
    found = []
    for folder in _folders(root, membership, "cpu"):
        words = _words(folder / "cpu.max")  # version 2: "quota period"
        if not words:
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdecimal():
            found.append(int(words[0]) / int(words[1]))
    return min(found) if found else None


def memory_left(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes under the tightest limit, with what the kernel gives back at need; None without."""
    found = []
    for folder in _folders(root, membership, "memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit >= 2**60:
            continue
        found.append(max(0, limit - used + _given_back(folder / "memory.stat")))
    return min(found) if found else None


def _folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """The groups of this process, from its own up to the root."""
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / names if names else root  # version 2 has no names
        folder = top / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent == top or top in parent.parents)
        # A container sees its own group as the root, whatever its path says.
        yield top


def _given_back(path: Path) -> int:
    """Cached files that nobody uses at the moment."""
    words = _words(path)
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))


def _number(*paths: Path) -> int | None:
    for path in paths:
        words = _words(path)
        if words and words[0].isdecimal():
            return int(words[0])
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
