"""What profiles of a run found, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from multi_gpu_training.monitoring.html_table import html_table
from multi_gpu_training.monitoring.profiling.trace_summary import EXCHANGE, short_name
from multi_gpu_training.safe_files import read_json
from multi_gpu_training.safe_output import printable

MOST_PROFILES = 64
MOST_NAME = 60  # of a kernel in the terminal: templates of CUTLASS fill a screen
Time = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=4096)]


class TopRow(BaseModel):
    name: Text
    op: Text | None = None
    seconds: Time
    calls: Time


class GapRow(BaseModel):
    during: Text
    seconds: Time


class GainRow(BaseModel):
    share: Time
    what: Text
    do: Text


class MemoryPeak(BaseModel):
    peak_bytes: int = Field(ge=0, le=2**60)
    during: Text | None = None


class TraceSummary(BaseModel):
    """A file that `trace_summary.write_summary` wrote; times are per step."""

    first: int = Field(ge=1, le=2**53)
    last: int = Field(ge=1, le=2**53)
    on: Annotated[str, Field(pattern="^(gpu|cpu)$")]
    step_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    busy_s: Time
    exchange_s: Time
    exposed_s: Time
    copy_s: Time
    idle_s: Time
    top: Annotated[list[TopRow], Field(max_length=64)]
    gaps: Annotated[list[GapRow], Field(max_length=64)]
    gains: Annotated[list[GainRow], Field(max_length=3)]
    memory: MemoryPeak | None = None
    recorded: bool = False


@dataclass(frozen=True)
class ShownProfile:
    """One trace of one rank, and the file that Perfetto opens."""

    name: str
    trace: Path
    found: TraceSummary
    waits_for: str | None = None  # who comes last to the exchange, if that is what it takes

    def headline(self) -> str:
        found = self.found
        what = "GPU" if found.on == "gpu" else "operators"
        parts = [f"{what} busy {_percent(found.busy_s, found)}"]
        parts.append(f"exposed exchange {_percent(found.exposed_s, found)}")
        parts.append(f"idle {_percent(found.idle_s, found)}")
        text = f"{self.name}: {_ms(found.step_s)} per step; {', '.join(parts)}"
        if found.memory is not None:
            text += f"; peak {found.memory.peak_bytes / 2**30:.2f} GB"
            text += f" in {found.memory.during}" if found.memory.during else ""
        return text

    def gains(self) -> list[str]:
        return [f"{gain.share:.0%}: {self._gain(gain)}" for gain in self.found.gains]

    def _gain(self, gain: GainRow) -> str:
        if gain.what == EXCHANGE and self.waits_for is not None:
            return f"waiting for {self.waits_for} in the exchange. What gains is in its trace"
        return f"{gain.what}. {_sentence(gain.do)}"

    def titles(self) -> list[str]:
        what = ["kernel", "of"] if self.found.on == "gpu" else ["operator"]
        return [*what, "per step", "share", "calls"]

    def rows(self) -> list[list[str]]:
        found = self.found
        gpu = found.on == "gpu"
        return [
            [
                *([short_name(row.name), row.op or "a recorded step"] if gpu else [row.name]),
                _ms(row.seconds),
                _percent(row.seconds, found),
                f"{row.calls:.3g}",
            ]
            for row in found.top
        ]

    def gap_rows(self) -> list[list[str]]:
        shown = [gap for gap in self.found.gaps if gap.seconds >= 0.005 * self.found.step_s]
        return [[gap.during, _ms(gap.seconds), _percent(gap.seconds, self.found)] for gap in shown]


def profiles_of(run: Path, problems: list[str]) -> list[ShownProfile]:
    """The profiles in a run folder; what cannot be read is named in `problems`."""
    folder, shown = run / "profile", []
    if folder.is_symlink() or not folder.is_dir():
        return []
    for path in sorted(folder.glob("rank-*.summary.json"))[:MOST_PROFILES]:
        stem = path.name.removesuffix(".summary.json")
        try:
            found = TraceSummary.model_validate(read_json(path, dict[str, Any]))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or "it is not a summary of a trace"
            problems.append(f"profile/{path.name} cannot be read: {reason}")
            continue
        rank = stem.partition(".")[0].removeprefix("rank-")
        name = f"rank {rank}, steps {found.first} to {found.last}"
        shown.append(ShownProfile(name, folder / f"{stem}.json.gz", found))
    return [_compared(one, shown) for one in shown]


def _compared(one: ShownProfile, shown: Sequence[ShownProfile]) -> ShownProfile:
    """The one that comes last to an exchange waits only for the network; the others for it, too."""
    steps = one.found.first, one.found.last
    same = [other for other in shown if (other.found.first, other.found.last) == steps]
    last = min(same, key=lambda other: other.found.exposed_s)
    waits = one.found.exposed_s - last.found.exposed_s
    if waits <= one.found.exposed_s / 2:
        return one
    return replace(one, waits_for=last.name.partition(",")[0])


def show_profiles(shown: Sequence[ShownProfile], console: Console) -> None:
    for profile in shown:
        console.print(_data(profile.headline()))
        table = Table(*profile.titles(), title="Longest", title_justify="left")
        for row in profile.rows():
            table.add_row(*(_data(cell[:MOST_NAME]) for cell in row))
        console.print(table)
        gaps = profile.gap_rows()
        if gaps:
            table = Table("while nothing was computed", "per step", "share")
            for during, *rest in gaps:
                table.add_row(_data(during[:MOST_NAME]), *rest)
            console.print(table)
        lines = profile.gains()
        if lines:
            console.print("What would gain most, and its share of the step:")
        for place, line in enumerate(lines, 1):
            console.print(_data(f"  {place}. {line}"))
        console.print(_data(f"trace for https://ui.perfetto.dev: {profile.trace}"), soft_wrap=True)


def profile_html(shown: Sequence[ShownProfile]) -> Iterator[str]:
    if shown:
        yield "<h2>Profiled steps</h2>"
    for profile in shown:
        yield f"<h3>{escape(profile.headline())}</h3>"
        if profile.found.gains:
            yield "<p>What would gain most, and its share of the step:</p><ol>"
            yield "".join(f"<li>{escape(line)}</li>" for line in profile.gains()) + "</ol>"
        yield html_table(profile.titles(), profile.rows(), "longest kernels")
        gaps = profile.gap_rows()
        if gaps:
            titles = ["while nothing was computed", "per step", "share"]
            yield html_table(titles, gaps, "while nothing was computed")
        yield f'<p class="soft">Trace for Perfetto: <code>{escape(str(profile.trace))}</code></p>'


def _data(text: str) -> str:
    return escape_markup(printable(text))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _percent(seconds: float, found: TraceSummary) -> str:
    return f"{seconds / found.step_s:.0%}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
