"""The report in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from multi_gpu_training.monitoring.phase_names import PHASES
from multi_gpu_training.monitoring.report import comparison, wording
from multi_gpu_training.monitoring.report.attribution import Steps, side_by_side
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.run_record import RunRecord
from multi_gpu_training.monitoring.report.verdict import judge
from multi_gpu_training.safe_output import printable

SHADES = " ░▒▓█"
LEVELS = "▁▂▃▄▅▆▇█"
MOST_EVENTS = 12
MOST_ROWS = 16


def show(runs: Sequence[RunRecord], console: Console) -> None:
    if len(runs) > 1:
        _show_compared(runs, console)
    for run in runs:
        _show_run(run, console)


def _show_compared(runs: Sequence[RunRecord], console: Console) -> None:
    title, rows = comparison.table(runs, [figures(run) for run in runs])
    console.print(_table(title, rows, "Runs side by side"))
    different = comparison.differences(runs)
    if different:
        title = ["setting", *comparison.names(runs)]
        console.print(_table(title, different, "Set differently"))


def _show_run(run: RunRecord, console: Console) -> None:
    found, verdict = figures(run), judge(run)
    more = "".join(f"\n- {line}" for line in (*verdict.more, *verdict.notes))
    colour = "red" if verdict.causes else "green" if verdict.kind == "none" else "yellow"
    console.print(Panel(_data(verdict.headline + more), title=_data(run.name), border_style=colour))
    console.print(_data("  ".join(f"{name}: {value}" for name, value in wording.tiles(run, found))))
    forecast = wording.forecast_line(found)
    if forecast:
        console.print(_data(forecast))
    loss = run.column("loss")
    if len(loss) > 1:
        console.print(f"loss  {loss[0]:.4g} {_spark(loss)} {loss[-1]:.4g}")
    steps = side_by_side(run)
    if steps is not None:
        console.print(_phase_table(steps))
        for line in _heat_lines(steps):
            console.print(_data(line), highlight=False)
    rows = wording.event_rows(run)
    if rows:
        console.print(_table(["after", "what", ""], rows[-MOST_EVENTS:], "Events"))


def _data(text: str) -> str:
    """What a run's files say, as it is: neither markup nor control characters act."""
    return escape(printable(text))


def _phase_table(steps: Steps) -> Table:
    """Milliseconds of each phase, a row a rank; the slowest is marked."""
    slowest = _slowest(steps)
    title = f"A step, rank by rank: ms over {len(steps.steps)} timed steps"
    table = Table(title=title, title_justify="left")
    for name in ("", *PHASES, "waits for others"):
        table.add_column(name, justify="right" if name else "left")
    waits = np.median(steps.waits, axis=1)
    for row in _rows(steps):
        cells = [f"{float(steps.typical(phase)[row]) * 1e3:.2f}" for phase in PHASES]
        name = f"rank {steps.ranks[row]}" + (" slowest" if row == slowest else "")
        table.add_row(name, *cells, f"{waits[row] * 1e3:.2f}")
    return table


def _heat_lines(steps: Steps) -> list[str]:
    """Own time of each rank along the run, darker for longer."""
    pieces = np.array_split(np.arange(len(steps.steps)), min(60, len(steps.steps)))
    own = np.stack([np.median(steps.own[:, piece], axis=1) for piece in pieces], axis=1)
    largest, slowest = max(float(own.max()), 1e-12), _slowest(steps)
    lines = []
    for row in _rows(steps):
        cells = (own[row] / largest * (len(SHADES) - 1)).round().astype(int)
        name = f"rank {steps.ranks[row]}"
        mark = "  slowest" if row == slowest else ""
        lines.append(f"{name:>9} {''.join(SHADES[cell] for cell in cells)}{mark}")
    return [*lines, f"{'':>9} own time, step {steps.steps[0]} to {steps.steps[-1]}"]


def _slowest(steps: Steps) -> int | None:
    return int(np.median(steps.own, axis=1).argmax()) if len(steps.ranks) > 1 else None


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
