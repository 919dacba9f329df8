"""The report in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table

from multi_gpu_training.monitoring.profiling.trace_view import show_profiles
from multi_gpu_training.monitoring.report import comparison, wording
from multi_gpu_training.monitoring.report.attribution import Steps, side_by_side
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.run_record import RunRecord
from multi_gpu_training.monitoring.report.sentences import duration
from multi_gpu_training.monitoring.report.verdict import judge
from multi_gpu_training.safe_output import printable

SHADES = " ░▒▓█"
LEVELS = "▁▂▃▄▅▆▇█"
MOST_EVENTS = 12
MOST_ROWS = 16
ROOM_FOR_LINES = 100  # columns that the table of phases needs with lines between its columns
WORDS = {"queued": "no core"}
SHORT = {"backward": "backw.", "optimizer": "optim.", "checkpoint": "ckpt."}


def show(runs: Sequence[RunRecord], console: Console) -> None:
    if len(runs) > 1:
        _show_compared(runs, console)
    for run in runs:
        _show_run(run, console)


def _show_compared(runs: Sequence[RunRecord], console: Console) -> None:
    title, rows = comparison.table(runs, [figures(run) for run in runs])
    _print_fitting(title, rows, "Runs side by side", console)
    different = comparison.differences(runs)
    if different:
        title = ["setting", *comparison.names(runs)]
        console.print(_table(title, different, "Set differently"))


def _print_fitting(
    title: Sequence[str], rows: Sequence[Sequence[str]], name: str, console: Console
) -> None:
    """A row for each run; a column, where the terminal is too narrow; a paragraph, where it is
    too narrow for that as well."""
    turned = list(zip(title, *rows, strict=True))
    unbounded = console.options.update(max_width=100_000)
    for table in (_table(title, rows, name), _table(turned[0], turned[1:], name)):
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            console.print(table)
            return
    console.print(name)
    for row in rows:
        console.print(_data(row[0]))
        told = [f"{head} {cell}" for head, cell in zip(title[1:], row[1:], strict=True)]
        for line in packed(told, console.width - 2):
            console.print(f"  {_data(line)}")


def _show_run(run: RunRecord, console: Console) -> None:
    found, verdict = figures(run), judge(run)
    more = "".join(f"\n- {line}" for line in (*verdict.more, *verdict.notes))
    colour = "red" if verdict.causes else "green" if verdict.kind == "none" else "yellow"
    console.print(Panel(_data(verdict.headline + more), title=_data(run.name), border_style=colour))
    tiles = [f"{name}: {value}" for name, value in wording.tiles(run, found)]
    for line in packed(tiles, console.width):
        console.print(_data(line))
    forecast = wording.forecast_line(found)
    if forecast:
        console.print(_data(forecast))
    loss = run.column("loss")
    if len(loss) > 1:
        console.print(f"loss  {loss[0]:.4g} {_spark(loss)} {loss[-1]:.4g}")
    steps = side_by_side(run)
    if steps is not None:
        narrow = console.width < ROOM_FOR_LINES
        console.print(_phase_table(steps, found.step_s or steps.loaded_step, narrow))
        for line in _heat_lines(steps):
            console.print(_data(line), highlight=False)
    show_profiles(run.profiles, console)
    rows = wording.event_rows(run)
    if rows:
        console.print(_table(["after", "what", ""], rows[-MOST_EVENTS:], "Events"))


def packed(words: Sequence[str], width: int) -> list[str]:
    """Lines of whole figures: 8.6 ms must not be broken in the middle."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(word)
    return lines


def _data(text: str) -> str:
    """What a run's files say, as it is: neither markup nor control characters act."""
    return escape(printable(text))


def _phase_table(steps: Steps, step_s: float, narrow: bool) -> Table:
    """Milliseconds of each phase, a row a rank; the slowest is marked, if one is."""
    typical = steps.shown(step_s)
    title = f"A step of {duration(step_s)}, rank by rank: median ms of {len(steps.steps)} steps"
    table = Table(title=title, title_justify="left")
    if narrow:  # no lines between columns: a figure must not be cut
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Checkpoints are rarely among the timed steps, and eight columns are wide enough.
    shown = [p for p in typical if p != "checkpoint" or typical[p].max() >= 5e-6]
    words = WORDS | (SHORT if narrow else {})
    for name in ("", *(words.get(p, p) for p in shown), "waits for others"):
        others = name == "waits for others"
        table.add_column(
            name, justify="right" if name else "left", no_wrap=not others, min_width=6 * others
        )
    waits = np.median(steps.waits, axis=1)
    for row in _rows(steps):
        cells = [f"{float(typical[phase][row]) * 1e3:.2f}" for phase in shown]
        name = f"{'' if narrow else 'rank '}{steps.ranks[row]}"
        name += " slowest" if row == steps.slowest else ""
        table.add_row(name, *cells, f"{waits[row] * 1e3:.2f}")
    return table


def _heat_lines(steps: Steps) -> list[str]:
    """Own time of each rank along the run, darker for longer."""
    pieces = np.array_split(np.arange(len(steps.steps)), min(60, len(steps.steps)))
    own = np.stack([np.median(steps.own[:, piece], axis=1) for piece in pieces], axis=1)
    largest = max(float(own.max()), 1e-12)
    lines = []
    for row in _rows(steps):
        cells = (own[row] / largest * (len(SHADES) - 1)).round().astype(int)
        name = f"rank {steps.ranks[row]}"
        mark = "  slowest" if row == steps.slowest else ""
        lines.append(f"{name:>9} {''.join(SHADES[cell] for cell in cells)}{mark}")
    return [*lines, f"{'':>9} own time, step {steps.steps[0]} to {steps.steps[-1]}"]


def _rows(steps: Steps) -> list[int]:
    own = np.median(steps.own, axis=1)
    return sorted(int(row) for row in np.argsort(-own)[:MOST_ROWS])


def _spark(values: list[float]) -> str:
    found = np.array([piece.mean() for piece in np.array_split(np.array(values), 40) if len(piece)])
    low, high = float(found.min()), float(found.max())
    places = ((found - low) / max(high - low, 1e-12) * (len(LEVELS) - 1)).round()
    return "".join(LEVELS[int(place)] for place in places)


def _table(title: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> Table:
    table = Table(title=name, title_justify="left")
    for cell in title:
        table.add_column(_data(cell), overflow="fold")
    for row in rows:
        table.add_row(*(_data(str(cell)) for cell in row))
    return table
