"""The report of a search as one HTML file that needs nothing else. All data are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from multi_gpu_training.monitoring.html_table import html_table
from multi_gpu_training.monitoring.report.page import STYLE
from multi_gpu_training.safe_files import write_atomically
from multi_gpu_training.search.objectives import SearchObjective
from multi_gpu_training.search.run_search import RepeatedTrial, SearchResult
from multi_gpu_training.search.searcher import elapsed
from multi_gpu_training.search.settings import SearchSettings
from multi_gpu_training.search.space import Parameter
from multi_gpu_training.search.study import TrialRecord
from multi_gpu_training.search.trial_run import TrialEnding

WIDTH, HEIGHT, FULL_WIDTH = 460, 240, 1010
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 40
MOST_ROWS = 2000
LEAST_FOR_IMPORTANCE = 10  # complete trials; with fewer it is noise
OWN_STYLE = """
.point { fill: var(--c0); opacity: .75; } .point.front { fill: var(--bad); }
.thread { fill: none; stroke-width: 1.3; opacity: .7; } .bar { fill: var(--c0); }
"""


class Axis:
    """Maps values to a stretch of pixels: numbers by size, choices by their order.

    With an objective, it ends where only a few much worse values would follow: a single diverged
    trial would press all others flat. Those lie at its end.
    """

    def __init__(
        self,
        values: Sequence[Any],
        pixels: tuple[float, float],
        parameter: Parameter | None = None,
        objective: SearchObjective | None = None,
    ) -> None:
        self._from, self._to = pixels
        self._choices = list(parameter.choices) if parameter is not None else []
        self.log = parameter is not None and parameter.log
        numbers = [] if self._choices else [v for v in values if math.isfinite(v)]
        self._low, self._high = min(numbers, default=0.0), max(numbers, default=1.0)
        if parameter is not None and not self._choices:
            self._low, self._high = parameter.low, parameter.high
        self._cut = ""
        if objective is not None and numbers:
            self._end_before_extremes(sorted(numbers), objective.direction)

    def _end_before_extremes(self, numbers: Sequence[float], direction: str) -> None:
        good_first = numbers if direction == "min" else numbers[::-1]
        best, most = good_first[0], good_first[(len(numbers) - 1) * 3 // 4]
        limit = most + 3 * (most - best)
        if direction == "min" and best < limit < self._high:
            self._high, self._cut = limit, "≥ "
        elif direction == "max" and best > limit > self._low:
            self._low, self._cut = limit, "≤ "

    def __call__(self, value: Any) -> float:
        return self._from + (self._to - self._from) * self.share(value)

    def share(self, value: Any) -> float:
        """Where the value lies between the ends, from 0 to 1."""
        if self._choices:
            place = self._choices.index(value) if value in self._choices else 0
            return (place + 0.5) / len(self._choices)
        low, high, at = self._low, self._high, float(value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-300))
        return 0.5 if high <= low else min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self) -> list[tuple[float, str]]:
        if self._choices:
            return [(self(choice), str(choice)) for choice in self._choices[:12]]
        middle = (self._low + self._high) / 2
        if self.log:
            middle = math.sqrt(self._low * self._high)
        values = [self._low, middle, self._high] if self._high > self._low else [self._low]
        cut = self._high if self._cut == "≥ " else self._low
        return [
            (self(value), (self._cut if value == cut else "") + f"{value:.3g}") for value in values
        ]


def write_report(
    result: SearchResult, settings: SearchSettings, repeats: Sequence[RepeatedTrial] = ()
) -> Path:
    """Write STUDY/report.html and return its path."""
    path = result.folder / "report.html"
    write_atomically(path, page(result, settings, repeats))
    return path


def page(
    result: SearchResult, settings: SearchSettings, repeats: Sequence[RepeatedTrial] = ()
) -> str:
    title = f"Search {result.folder.name}"
    body = "".join(_body(result, settings, repeats))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{OWN_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _body(
    result: SearchResult, settings: SearchSettings, repeats: Sequence[RepeatedTrial]
) -> Iterator[str]:
    states = [one.state for one in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    goals = ", ".join(f"{one.metric} ({one.direction})" for one in result.objectives)
    target = settings.target or "a Python function"
    yield (
        f'<div class="soft">{escape(target)}, optimizing {escape(goals)} with '
        f"{escape(settings.sampler)}, pruner {escape(settings.pruner)}, seed {settings.seed}: "
        f"{escape(counts)}</div>"
    )
    yield _verdict(result)
    done = [one for one in result.trials if one.state == TrialEnding.COMPLETE and one.values]
    space = settings.space()
    if done:
        yield "<h2>All parameters at once</h2>" + parallel_coordinates(
            done, space, result.objectives[0]
        )
        yield '<h2>Parameter by parameter</h2><div class="charts">'
        for parameter in space:
            yield f"<div><h3>{escape(parameter.name)}</h3>"
            yield slice_plot(done, parameter, result.objectives[0]) + "</div>"
        yield "</div>"
        if len(result.objectives) > 1:
            yield "<h2>Pareto front</h2>" + front_plot(done, result)
        else:
            yield "<h2>Progress</h2>" + history_plot(done, result.objectives[0])
    importances = result.importances() if len(done) >= LEAST_FOR_IMPORTANCE else {}
    if importances:
        yield "<h2>Importance</h2>" + importance_bars(importances)
        yield (
            '<p class="soft">How much of the variance of the first metric each parameter explains '
            "in these trials. It says nothing about values that were not tried.</p>"
        )
    if repeats:
        yield "<h2>Repeated with other seeds</h2>" + _repeats(repeats)
    yield "<h2>Trials</h2>" + _trials(result, [one.name for one in space])


def _verdict(result: SearchResult) -> str:
    if not result.front:
        return '<div class="verdict cause"><p>No trial is complete.</p></div>'
    if len(result.objectives) > 1:
        return (
            f'<div class="verdict"><p>{len(result.front)} trials are not beaten in every metric.'
            "</p></div>"
        )
    best = result.front[0]
    params = ", ".join(f"{name} = {_text(value)}" for name, value in best.params.items())
    sentence = f"Trial {best.number}: {result.objectives[0].metric} {best.values[0]:.6g}"
    return f'<div class="verdict"><p>{escape(sentence)}</p><ul><li>{escape(params)}</li></ul></div>'


def parallel_coordinates(
    trials: Sequence[TrialRecord], space: Sequence[Parameter], objective: SearchObjective
) -> str:
    """One line per trial through all parameters to the metric; red is better."""
    width = max(FULL_WIDTH, 140 * (len(space) + 1))
    pixels = (HEIGHT - BOTTOM, TOP + 14.0)
    axes = [Axis([], pixels, one) for one in space]
    last = Axis([one.values[0] for one in trials], pixels, objective=objective)
    gap = (width - LEFT - 60) / max(1, len(space))
    places = [LEFT + number * gap for number in range(len(space) + 1)]
    parts = []
    for one in trials:
        points = [
            (x, axis(one.params[parameter.name]))
            for x, axis, parameter in zip(places, axes, space, strict=False)
            if parameter.name in one.params
        ]
        points.append((places[-1], last(one.values[0])))
        good = last.share(one.values[0])
        good = 1 - good if objective.direction == "min" else good
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = f"hsl({220 + 140 * good:.0f} 70% 50%)"
        parts.append(f'<polyline class="thread" style="stroke:{colour}" points="{line}"/>')
    names = [*(one.name for one in space), objective.metric]
    for x, axis, name in zip(places, [*axes, last], names, strict=True):
        parts.append(f'<path class="grid" d="M{x:.1f} {pixels[1]}V{pixels[0]}"/>')
        parts.append(_label(x, TOP, name, "middle", "label"))
        parts += [_label(x - 4, y, text, "end") for y, text in axis.ticks()]
    return f'<div class="scroll">{_svg(parts, width)}</div>'


def slice_plot(
    trials: Sequence[TrialRecord], parameter: Parameter, objective: SearchObjective
) -> str:
    """The metric over one parameter."""
    known = [one for one in trials if parameter.name in one.params]
    across = Axis([], (LEFT, WIDTH - RIGHT), parameter)
    up = Axis([one.values[0] for one in known], (HEIGHT - BOTTOM, TOP), objective=objective)
    points = [(across(one.params[parameter.name]), up(one.values[0]), one) for one in known]
    return _scatter(points, across, up, parameter.name, objective.metric, set())


def front_plot(trials: Sequence[TrialRecord], result: SearchResult) -> str:
    """The first two metrics of every trial; those of the front are red."""
    first, second = result.objectives[:2]
    across = Axis([one.values[0] for one in trials], (LEFT, WIDTH - RIGHT), objective=first)
    up = Axis([one.values[1] for one in trials], (HEIGHT - BOTTOM, TOP), objective=second)
    points = [(across(one.values[0]), up(one.values[1]), one) for one in trials]
    front = {one.number for one in result.front}
    drawn = _scatter(points, across, up, first.metric, second.metric, front)
    return f'<div class="charts"><div>{drawn}</div></div>'


def history_plot(trials: Sequence[TrialRecord], objective: SearchObjective) -> str:
    """Every value in the order of trials; red where it was the best until then."""
    across = Axis([float(one.number) for one in trials], (LEFT, WIDTH - RIGHT))
    up = Axis([one.values[0] for one in trials], (HEIGHT - BOTTOM, TOP), objective=objective)
    best: set[int] = set()
    leader: float | None = None
    for one in sorted(trials, key=lambda one: one.number):
        if leader is None or objective.better(one.values[0], leader):
            leader = one.values[0]
            best.add(one.number)
    points = [(across(float(one.number)), up(one.values[0]), one) for one in trials]
    drawn = _scatter(points, across, up, "trial", objective.metric, best)
    return f'<div class="charts"><div>{drawn}</div></div>'


def importance_bars(importances: Mapping[str, float]) -> str:
    parts, height = [], 24 * len(importances) + 8
    for number, (name, share) in enumerate(sorted(importances.items(), key=lambda p: -p[1])):
        y = 24 * number + 4
        parts.append(_label(150, y + 13, name, "end", "label"))
        parts.append(f'<rect class="bar" x="158" y="{y}" width="{240 * share:.1f}" height="16"/>')
        parts.append(_label(164 + 240 * share, y + 13, f"{share:.0%}", "start"))
    return f'<div class="charts"><div>{_svg(parts, WIDTH, height)}</div></div>'


def _scatter(
    points: Sequence[tuple[float, float, TrialRecord]],
    across: Axis,
    up: Axis,
    x_name: str,
    y_name: str,
    marked: set[int],
) -> str:
    base = HEIGHT - BOTTOM
    parts = [f'<path class="grid" d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}"/>']
    parts += [_label(LEFT - 6, y + 4, text, "end") for y, text in up.ticks()]
    parts += [_label(x, base + 16, text, "middle") for x, text in across.ticks()]
    parts.append(_label((LEFT + WIDTH) / 2, HEIGHT - 6, x_name, "middle", "label"))
    parts.append(_label(LEFT, TOP - 3, y_name, "start", "label"))
    for x, y, one in points:
        kind = "point front" if one.number in marked else "point"
        values = ", ".join(f"{value:.6g}" for value in one.values)
        told = f"<title>trial {one.number}: {values}</title>"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4">{told}</circle>')
    return _svg(parts, WIDTH)


def _svg(parts: Sequence[str], width: float, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    shown = text if len(text) <= 28 else text[:27] + "…"
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}'
        "</text>"
    )


def _repeats(repeats: Sequence[RepeatedTrial]) -> str:
    rows = [
        [
            str(one.number),
            f"{one.searched:.6g}",
            "-" if one.mean is None else f"{one.mean:.6g}",
            "-" if one.spread is None else f"{one.spread:.2g}",
            ", ".join(f"{value:.6g}" for value in one.values),
            str(one.failed),
        ]
        for one in repeats
    ]
    head = ["trial", "in the search", "mean", "standard deviation", "each seed", "failed"]
    return html_table(head, rows)


def _trials(result: SearchResult, names: Sequence[str]) -> str:
    rows = [
        [
            str(one.number),
            one.state,
            *(_text(one.params.get(name, "")) for name in names),
            *(f"{value:.6g}" for value in one.values),
            *([""] * (len(result.objectives) - len(one.values))),
            f"{elapsed(one):.1f}",
            one.run,
            one.reason,
        ]
        for one in result.trials[:MOST_ROWS]
    ]
    metrics = [one.metric for one in result.objectives]
    head = ["trial", "state", *names, *metrics, "seconds", "run", "why"]
    return html_table(head, rows, "trials")


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
