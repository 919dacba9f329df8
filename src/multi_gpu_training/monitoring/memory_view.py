"""What snapshots of the GPU's memory found, for the report. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from multi_gpu_training.safe_files import read_json

FOLDER = "memory"
MOST_HOLDERS = 12
MOST_FRAMES = 8
MOST_FILES = 64
BEFORE = "allocated before stacks were noted: weights, optimizer state, data"
Text = Annotated[str, Field(max_length=500)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]


class Holder(BaseModel):
    """Memory that one stack allocated. `stack` begins with the innermost frame."""

    bytes: Bytes
    blocks: Bytes
    line: Text
    stack: Annotated[list[Text], Field(max_length=MOST_FRAMES)]


class MemorySnapshot(BaseModel):
    """Who held the memory of a rank at its peak, the largest first."""

    why: Literal["asked for", "out of memory"]
    step: Bytes
    bytes: Bytes
    reserved: Bytes
    holders: Annotated[list[Holder], Field(max_length=MOST_HOLDERS)]

    def headline(self) -> str:
        if not self.holders:
            return f"{self.bytes / 2**30:.2f} GB at the peak"
        first = self.holders[0]
        return (
            f"{self.bytes / 2**30:.2f} GB at the peak ({self.why}, step {self.step}), of which "
            f"{first.bytes / 2**30:.2f} GB from {first.line}"
        )


def peaks_of(run: Path, problems: list[str]) -> dict[str, MemorySnapshot]:
    """The snapshots in a run folder by name; what cannot be read is named in `problems`."""
    folder, found = run / FOLDER, {}
    if folder.is_symlink() or not folder.is_dir():
        return {}
    for path in sorted(folder.glob("rank-*.json"))[:MOST_FILES]:
        try:
            rank = path.name.split(".")[0].replace("-", " ")
            found[f"{rank}, {path.name}"] = MemorySnapshot.model_validate(
                read_json(path, dict[str, Any])
            )
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or "it is not a memory snapshot"
            problems.append(f"{FOLDER}/{path.name} cannot be read: {reason}")
    return found


def memory_html(found: dict[str, MemorySnapshot]) -> Iterator[str]:
    if found:
        yield "<h2>Memory at its peak</h2>"
    for name, peak in found.items():
        yield f"<p>{escape(name.partition(',')[0])}: {escape(peak.headline())}.</p>"
        yield '<div class="scroll"><table><tr><th>held</th><th>share</th><th>blocks</th>'
        yield "<th>allocated by</th></tr>"
        for holder in peak.holders:
            share = holder.bytes / max(1, peak.bytes)
            stack = "<br>".join(map(escape, holder.stack)) or escape(BEFORE)
            yield f"<tr><td>{holder.bytes / 2**20:,.1f} MB</td><td>{share:.0%}</td>"
            yield f"<td>{holder.blocks:,}</td><td><b>{escape(holder.line)}</b><br>{stack}</td></tr>"
        yield "</table></div>"
