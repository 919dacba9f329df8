"""What a container or job scheduler allows this process: control groups, old and new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores_allowed(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Cores by quota; None without a limit."""
    found = []
    for folder in _folders(root, membership, "cpu"):
        words = _words(folder / "cpu.max")  # version 2: "quota period"
        if not words:
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdecimal():
            found.append(int(words[0]) / int(words[1]))
    return min(found) if found else None


def memory_left(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
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
