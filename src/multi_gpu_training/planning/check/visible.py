"""What CUDA_VISIBLE_DEVICES lets through, as CUDA reads it."""

from __future__ import annotations

from collections.abc import Sequence


def problem_of(value: str, uuids: Sequence[str]) -> str | None:
    """What is wrong with CUDA_VISIBLE_DEVICES on a machine with these GPUs, or None.

    CUDA stops reading at the first entry that it does not know: what follows is hidden too.
    """
    entries = [entry.strip() for entry in value.split(",")]
    count = len(uuids)
    there = "this machine has no GPU" if not count else f"this machine has GPUs 0 to {count - 1}"
    if count == 1:
        there = "this machine has GPU 0 alone"
    seen: list[int] = []
    for place, entry in enumerate(entries):
        hidden = f", and hides all after it ({', '.join(entries[place:])})" if place else ""
        if entry.startswith("MIG-"):
            continue  # a part of a GPU, which the list does not hold
        index = _index_of(entry, uuids)
        if index is None:
            kind = "is no number or UUID of a GPU here" if not _numeric(entry) else "is not there"
            return f"{entry or 'an empty entry'!r} {kind}: {there}{hidden}"
        if index in seen:
            return f"GPU {index} is named twice, and CUDA then shows none"
        seen.append(index)
    return None


def _numeric(entry: str) -> bool:
    return entry.lstrip("-").isdecimal()


def _index_of(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    if entry.startswith("GPU-"):
        # The beginning of a UUID is enough.
        return next((i for i, uuid in enumerate(uuids) if uuid.startswith(entry)), None)
    return None
