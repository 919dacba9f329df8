"""Results as a table, as JSON and as a picture, all from the same rows."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multi_gpu_training.extras import can_draw
from multi_gpu_training.monitoring.report.picture import readable
from multi_gpu_training.portability import usable_cores

NOISY = 3.0  # times as long are the slow steps of a quiet machine at most
SUPERLINEAR = 1.1  # times as fast as its ranks allow: more is not an effect of caches
SCHEMA = 1
WORDS = 12  # columns for the words at the end of a row, where the terminal is narrow
Row = dict[str, Any]


class Column(NamedTuple):
    """`show` gives the text of a row."""

    title: str
    show: Callable[[Row], str]


class Bar(NamedTuple):
    """A number that the picture compares: its key in a row, and what to multiply it with. `low`
    and `high` are the keys of a range around it."""

    title: str
    unit: str
    key: str
    scale: float = 1.0
    low: str | None = None
    high: str | None = None


@dataclass
class ResultTable:
    """Rows are what JSON holds; columns say how a table shows them.

    notes: sentences below the table. recommended: what to choose, where the report says so.
    bars: the numbers that the picture compares.
    """

    kind: str
    title: str
    columns: Sequence[Column]
    rows: list[Row]
    bars: Sequence[Bar] = ()
    notes: list[str] = field(default_factory=list)
    recommended: dict[str, Any] | None = None

    def table(self, wrap_last: bool = False) -> Table:
        """For a rich console."""
        shown = [column for column in self.columns if not self._is_empty(column)]
        return self._table(shown, wrap_last, self.title)

    def _table(self, shown: Sequence[Column], wrap_last: bool, title: str | None) -> Table:
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
        table.collapse_padding, table.pad_edge = True, False
        for index, column in enumerate(shown):
            heading = _in_two_lines(column.title)
            wraps = wrap_last and index == len(shown) - 1
            table.add_column(
                heading,
                justify="right" if index and not wraps else "left",
                no_wrap=not wraps,
                max_width=WORDS if wraps else None,
            )
        for row in self.rows:
            table.add_row(*(escape(column.show(row)) for column in shown))
        return table

    def _is_empty(self, column: Column) -> bool:
        """Whether a column says nothing in the terminal; files keep it."""
        return bool(self.rows) and all(column.show(row) == "-" for row in self.rows)

    def show(self, console: Console) -> None:
        """Print the table and its notes."""
        table = self.table()
        # A table that is cut says nothing: let the last column wrap, then show it in parts.
        if self._width(table, console) > console.width:
            table = self.table(wrap_last=True)
        if self._width(table, console) > console.width and console.is_terminal:
            for part in self._parts(console):
                console.print(part)
        else:
            console.width = max(console.width, self._width(table, console))
            console.print(table)
        for note in self.notes:
            console.print(note, markup=False)

    def _width(self, table: Table, console: Console) -> int:
        return console.measure(table, options=console.options.update(max_width=400)).maximum

    def _parts(self, console: Console) -> Iterator[Table]:
        """Tables that fit the terminal, each of which begins with the first column."""
        first, *others = [column for column in self.columns if not self._is_empty(column)]
        title: str | None = self.title
        while others:
            count = 1
            while count < len(others):
                table = self._table([first, *others[: count + 1]], False, title)
                if self._width(table, console) > console.width:
                    break
                count += 1
            part = self._table([first, *others[:count]], False, title)
            if self._width(part, console) > console.width:  # words that must wrap
                part = self._table([first, *others[:count]], True, title)
            yield part
            others, title = others[count:], None

    def markdown(self) -> str:
        """The same table for a document."""
        lines = [
            "| " + " | ".join(column.title for column in self.columns) + " |",
            "|" + "---|" * len(self.columns),
        ]
        for row in self.rows:
            texts = [column.show(row).replace("|", "\\|") for column in self.columns]
            lines.append("| " + " | ".join(texts) + " |")
        lines += [f"\n{note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """What `bench.json` holds."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "title": self.title,
            "machine": machine(),
            "rows": self.rows,
            "notes": self.notes,
            "recommended": self.recommended,
        }

    def plot(self, path: Path | str) -> Path:
        """Draw one panel per number and one bar per row; rows without the number are named too."""
        # A figure of its own, without pyplot: no window system is asked and no state is left.
        from matplotlib.figure import Figure

        bars = list(self.bars)
        names = [str(row.get("case", "")) for row in self.rows]
        height = 1.2 + 0.38 * max(1, len(names))
        figure = Figure(figsize=(4.2 * max(1, len(bars)), height), layout="constrained")
        panels = figure.subplots(1, max(1, len(bars)), squeeze=False)[0]
        for index, (panel, bar) in enumerate(zip(panels, bars, strict=False)):
            values = [row.get(bar.key) for row in self.rows]
            shown = [(value or 0.0) * bar.scale for value in values]
            panel.barh(range(len(names)), shown, color="#4c78a8")
            for place, (row, value) in enumerate(zip(self.rows, values, strict=True)):
                end = shown[place]
                if value is not None and bar.low and bar.high:
                    low, end = row[bar.low] * bar.scale, row[bar.high] * bar.scale
                    panel.plot([low, end], [place, place], color="black", linewidth=1)
                text = " none" if value is None else f" {_precise(shown[place])}"
                panel.text(end, place, text, va="center", fontsize=8)
            panel.set_yticks(range(len(names)), names if index == 0 else [""] * len(names))
            panel.invert_yaxis()
            panel.margins(x=0.25)
            panel.set_xlim(left=0)
            panel.set_xlabel(bar.unit, fontsize=8)
            panel.tick_params(labelsize=8)
            panel.grid(alpha=0.3, axis="x")
            panel.set_axisbelow(True)
            readable(panel.xaxis)
            panel.set_title(bar.title, fontsize=10)
        figure.suptitle(self.title, fontsize=11)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        return path

    def save(self, folder: Path | str, name: str = "bench") -> list[Path]:
        """Write NAME.json, NAME.md and, where matplotlib is installed, NAME.png."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        data, text = folder / f"{name}.json", folder / f"{name}.md"
        data.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        text.write_text(f"# {self.title}\n\n{self.markdown()}")
        picture = folder / f"{name}.png"
        return [data, text, *([self.plot(picture)] if can_draw(picture) else [])]

    def __str__(self) -> str:
        return f"{self.title}\n\n{self.markdown()}"


def _precise(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _in_two_lines(title: str) -> str:
    """A heading broken where its halves are most alike: tables are as wide as their headings."""
    gaps = [place for place, letter in enumerate(title) if letter == " "]
    if len(title) < 9 or not gaps or "%" in title:
        return title
    middle = min(gaps, key=lambda place: abs(2 * place - len(title)))
    return f"{title[:middle]}\n{title[middle + 1 :]}"


def machine() -> dict[str, Any]:
    import torch  # not at the top: it takes seconds, and a table needs none of it

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpus": len(usable_cores()),
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
    }


# How values are shown


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def memory(count: float | None) -> str:
    if not count:
        return "-"
    return f"{count / 2**30:.2f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def counted(count: int, unit: str) -> str:
    """As in `1 GPU` and `2 CPU ranks`."""
    return f"{count} {unit}{'s' if count != 1 else ''}"


def speedups(rows: Sequence[Row]) -> list[float | None]:
    """Samples per second of each row against the first that has some."""
    rates = [row["samples_per_s"] for row in rows]
    base = next(filter(None, rates), None)
    return [rate / base if rate and base else None for rate in rates]


def doubts(row: Row, base: Row | None = None) -> list[str]:
    """Why a row is not believable: its steps differ too much, or it is faster against `base` than
    its ranks can make it."""
    found = []
    low, high = row.get("step_p10_s"), row.get("step_p90_s")
    if low and high and high > NOISY * low:
        found.append(
            f"its steps take between {milliseconds(low)} and {milliseconds(high)}: something else "
            "was running"
        )
    speed, ranks = row.get("speedup"), row.get("ranks")
    if base is not None and speed and ranks and base.get("ranks"):
        most = ranks / base["ranks"]
        if speed > SUPERLINEAR * most:
            found.append(
                f"{ratio(speed)} with {most:g} times the ranks: something slowed {base['case']} "
                "down"
            )
    return found


def mark_doubts(rows: Sequence[Row], base: Row | None = None) -> list[str]:
    """Note down in each row whether it is believable, and return what to say about those that are
    not."""
    notes = []
    for row in rows:
        row["doubts"] = doubts(row, base)
        notes += [f"Not believable: {row['case']}: {text}" for text in row["doubts"]]
    if notes:
        notes.append("Measure again on a quiet machine, with --repeats 3 and more --steps.")
    return notes


def doubted(text: str, row: Row) -> str:
    """A figure, with a question mark where its row is not believable."""
    return f"{text} ?" if row.get("doubts") and text != "-" else text


def case_name(row: Row) -> str:
    """With the reason where there is nothing to show."""
    if row.get("out_of_memory"):
        return f"{row['case']}: out of memory"
    if row.get("error"):
        return f"{row['case']}: {str(row['error']).splitlines()[0]}"
    return str(row["case"])


def _on_gpu(row: Row) -> bool:
    return bool(row["device"] != "CPU")  # which has no graphs


def _spread(row: Row) -> str:
    if row["step_p10_s"] is None:
        return "-"
    low, high = milliseconds(row["step_p10_s"]), milliseconds(row["step_p90_s"])
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low} - {high}"


STEP = Column("step", lambda row: milliseconds(row["step_p50_s"]))
SPREAD = Column("10 % - 90 %", _spread)
SAMPLES = Column("samples/s", lambda row: doubted(number(row["samples_per_s"]), row))
MEMORY = Column("memory", lambda row: memory(row["peak_bytes"]))
GRAPH = Column("as a graph", lambda row: share(row["graph_share"] if _on_gpu(row) else None))

SAMPLES_BAR = Bar("Speed", "samples per second", "samples_per_s")
STEP_BAR = Bar("Median step, 10 - 90 %", "ms", "step_p50_s", 1e3, "step_p10_s", "step_p90_s")
PEAK_BAR = Bar("Peak memory", "MB", "peak_bytes", 2**-20)
