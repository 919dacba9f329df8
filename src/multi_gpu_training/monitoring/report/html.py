"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from multi_gpu_training.monitoring.html_table import html_table, scrolling
from multi_gpu_training.monitoring.memory_view import memory_html
from multi_gpu_training.monitoring.profiling.trace_view import profile_html
from multi_gpu_training.monitoring.report import charts, comparison, curves, wording
from multi_gpu_training.monitoring.report.attribution import Steps, side_by_side
from multi_gpu_training.monitoring.report.figures import Figures, figures
from multi_gpu_training.monitoring.report.page import SCRIPT, STYLE
from multi_gpu_training.monitoring.report.picture import LOGGED
from multi_gpu_training.monitoring.report.run_record import RunRecord
from multi_gpu_training.monitoring.report.verdict import Verdict, judge
from multi_gpu_training.redaction import redact_values

MOST_CELLS = 8_000
MOST_ROWS = 64
WORDS = {"comm": "communication", "queued": "ready, but without a core"}
TITLES = {"samples_per_s": "samples/s", "lr": "learning rate", "grad_norm": "gradient norm"}
TITLES |= {"input_wait": "share of the time that rank 0 waits for data"}


def page(runs: Sequence[RunRecord]) -> str:
    """The whole report of one run, or of several side by side."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = "".join(_compared(runs)) if len(runs) > 1 else ""
    body += "".join("".join(_run(run, single=len(runs) == 1)) for run in runs)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def _compared(runs: Sequence[RunRecord]) -> Iterator[str]:
    found = [figures(run) for run in runs]
    yield f"<h1>{len(runs)} runs side by side</h1>"
    title, rows = comparison.table(runs, found)
    yield html_table(title, rows, "runs side by side")
    names = comparison.names(runs)
    yield "<h2>What was set differently</h2>"
    rows = comparison.differences(runs)
    yield (
        html_table(["setting", *names], rows, "settings that differ")
        if rows
        else "<p>Nothing: the settings are the same.</p>"
    )
    yield "<h2>Why each is as fast as it is</h2><ul>"
    for name, run in zip(names, runs, strict=True):
        yield f"<li><b>{escape(name)}</b>: {escape(judge(run).headline)}</li>"
    yield "</ul><h2>Curves</h2>" + _charts(curves.training_curves(runs, names))


def _run(run: RunRecord, single: bool) -> Iterator[str]:
    found, verdict = figures(run), judge(run)
    heading = "h1" if single else "h2"
    yield f"<{heading}>{escape(run.name)}</{heading}>"
    yield f'<div class="soft">began {wording.date(run.began)}, {wording.STATES[run.state]}</div>'
    yield _verdict(verdict)
    tiles = wording.tiles(run, found)
    yield '<div class="tiles">'
    yield "".join(
        f'<div class="tile"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in tiles
    )
    yield "</div>"
    yield _forecast(found)
    steps = side_by_side(run)
    if steps is not None:
        yield "".join(_phases(run, steps))
    yield from profile_html(run.profiles)
    yield from memory_html(run.memory)
    if single:
        yield "<h2>Curves</h2>" + _charts(curves.training_curves([run], ["training"]))
    devices = {f"{t} ({u})": s for (t, u), s in curves.device_curves(run).items()}
    if devices:
        yield "<h2>Devices</h2>" + _charts(devices, "seconds")
    yield from _rest(run)


def _verdict(verdict: Verdict) -> str:
    kind = "none" if verdict.kind == "none" else "cause" if verdict.causes else ""
    more = "".join(f"<li>{escape(line)}</li>" for line in (*verdict.more, *verdict.notes))
    sentence = verdict.headline[0].upper() + verdict.headline[1:]
    return (
        f'<div class="verdict {kind}"><p>{escape(sentence)}.</p>'
        f"{f'<ul>{more}</ul>' if more else ''}</div>"
    )


def _forecast(found: Figures) -> str:
    line = wording.forecast_line(found)
    return f"<h2>Forecast and actual</h2><p>{escape(line)}</p>" if line else ""


def _phases(run: RunRecord, steps: Steps) -> Iterator[str]:
    yield "<h2>A step, rank by rank</h2>"
    source = "shares of eager steps that were computed to compare" if steps.from_checks else "timed"
    yield f'<p class="soft">Median time of each phase over {len(steps.steps):,} {source} steps.'
    typical = steps.shown(figures(run).step_s)
    keys = "".join(
        f'<span class="pair"><span class="key p{i}"></span>{WORDS.get(phase, phase)}</span> '
        for i, phase in enumerate(typical)
        if typical[phase].max() > 0
    )
    yield f"{keys}</p>"
    rows = _shown_rows(steps)
    names = [f"rank {steps.ranks[row]}" for row in rows]
    typical = {phase: values[rows] for phase, values in typical.items()}
    slowest = None if steps.slowest is None else rows.tolist().index(steps.slowest)
    yield scrolling(charts.phase_bars(names, typical, slowest), "phases of a step, rank by rank")
    if len(rows) < len(steps.ranks):
        yield f'<p class="soft">The {len(rows)} slowest of {len(steps.ranks)} ranks are shown.</p>'
    yield _heat_map(steps, rows, names, slowest)


def _shown_rows(steps: Steps) -> np.ndarray:
    """The ranks to show, by number; of very many the slowest."""
    own = np.median(steps.own, axis=1)
    return np.sort(np.argsort(-own)[:MOST_ROWS])


def _heat_map(steps: Steps, rows: np.ndarray, names: list[str], slowest: int | None) -> str:
    columns = max(20, min(250, MOST_CELLS // max(1, len(rows))))
    pieces = np.array_split(np.arange(len(steps.steps)), min(columns, len(steps.steps)))
    shown = {"own time": steps.own, **steps.phases}

    def cells(values: np.ndarray) -> np.ndarray:
        return np.stack([np.median(values[rows][:, piece], axis=1) for piece in pieces], axis=1)

    at = np.array([steps.steps[piece[0]] for piece in pieces])
    data = {
        "names": names,
        "steps": at.tolist(),
        "row": max(8, min(22, 400 // len(rows))),
        "phases": {k: np.round(cells(v) * 1e3, 2).tolist() for k, v in shown.items()},
    }
    options = "".join(f'<option value="{k}">{WORDS.get(k, k)}</option>' for k in shown)
    drawn = charts.heat_map(names, cells(steps.own), at, slowest)
    return (
        '<div class="heat"><h3>Ranks by steps</h3><p class="soft">Darker is longer; a dot marks '
        'the slowest rank of each column. "own time" is all that a rank does before it meets the '
        "others. Arrow keys and the pointer read single cells.</p>"
        f'<p class="soft"><label>Show <select>{options}</select></label> '
        '<span class="words" role="status"></span></p>'
        f"{scrolling(drawn, 'ranks by steps')}"
        f'<script type="application/json">{_json(data)}</script></div>'
    )


def _charts(found: dict[str, list[charts.Series]], x_unit: str = "step") -> str:
    parts = []
    for title, series in found.items():
        zero = x_unit != "step" or LOGGED.get(title, ("", "", 1.0, False))[3]  # rates begin at 0
        shown = TITLES.get(title, title)
        drawn = charts.line_chart(series, x_unit, from_zero=zero, title=shown)
        if not drawn:
            continue
        key = "".join(
            f'<span class="pair"><span class="key c{s.colour % 8}"></span>{escape(s.name)}</span> '
            for s in series
        )
        alone = len(series) == 1 and series[0].name == "training"
        legend = "" if alone else f'<span class="soft">{key}</span>'
        parts.append(f"<div><h3>{escape(shown)} {legend}</h3>{drawn}</div>")
    return f'<div class="charts">{"".join(parts)}</div>' if parts else "<p>Nothing was logged.</p>"


def _rest(run: RunRecord) -> Iterator[str]:
    rows = wording.event_rows(run)
    yield "<h2>Events</h2>"
    yield html_table(["after", "what", "details"], rows, "events") if rows else "<p>None.</p>"
    for title, values in (("Settings", run.config), ("Environment", run.environment)):
        if values:
            # Files of older versions hold commands and settings with their secrets.
            shown = redact_values(values)
            listed = [[key, json.dumps(value, default=str)] for key, value in shown.items()]
            yield f"<h2>{title}</h2><details><summary>{len(listed)} entries</summary>"
            yield html_table(["name", "value"], listed, title.lower()) + "</details>"


def _json(data: object) -> str:
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
