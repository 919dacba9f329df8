"""Charts as SVG text: lines with the range they summarise, bars of phases, a heat map."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 300
MOST_TOLD = 16
WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 10, 34


@dataclass
class Series:
    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0


def line_chart(
    series: Sequence[Series], x_unit: str = "step", from_zero: bool = False, title: str = ""
) -> str:
    """Lines over one pair of axes. Of many points the mean is drawn, with a band from the
    smallest to the largest. Empty where there is nothing to draw."""
    drawn = [s for s in map(_finite, series) if len(s.x)]
    if not drawn:
        return ""
    x_low, x_high = min(s.x.min() for s in drawn), max(s.x.max() for s in drawn)
    ys = np.concatenate([s.y for s in drawn])
    low, high = _limits(np.append(ys, 0.0) if from_zero else ys)
    scale_x = (WIDTH - LEFT - RIGHT) / max(x_high - x_low, 1e-12)
    scale_y = (HEIGHT - TOP - BOTTOM) / max(high - low, 1e-12)

    def at(x: float, y: float) -> str:
        down = HEIGHT - BOTTOM - (min(max(y, low), high) - low) * scale_y
        return f"{LEFT + (x - x_low) * scale_x:.1f},{down:.1f}"

    newest = ", ".join(f"{s.name} {s.y[-1]:.4g}" for s in drawn)
    parts = [_svg(WIDTH, HEIGHT, f"{title} over {x_unit}; newest: {newest}")]
    for tick in _ticks(low, high):
        y = HEIGHT - BOTTOM - (tick - low) * scale_y
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">')
        parts.append(f"{_short(tick)}</text>")
    for tick in _ticks(x_low, x_high):
        x = LEFT + (tick - x_low) * scale_x
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">')
        parts.append(f"{_short(tick)}</text>")
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">')
    parts.append(f"{html.escape(x_unit)}</text>")
    for s in drawn:
        x, mean, least, most = _binned(s)
        if not np.array_equal(least, most):
            band = [at(a, b) for a, b in zip(x, most, strict=True)]
            band += [at(a, b) for a, b in zip(x[::-1], least[::-1], strict=True)]
            parts.append(f'<polygon class="band c{s.colour % 8}" points="{" ".join(band)}"/>')
        points = " ".join(at(a, b) for a, b in zip(x, mean, strict=True))
        if len(x) == 1:
            across, _, down = points.partition(",")
            parts.append(f'<circle class="dot c{s.colour % 8}" cx="{across}" cy="{down}" r="3"/>')
        else:
            parts.append(f'<polyline class="line c{s.colour % 8}" points="{points}"/>')
    return "".join(parts) + "</svg>"


def phase_bars(names: Sequence[str], phases: dict[str, np.ndarray], mark: int | None) -> str:
    """A bar a name, made of its phases; the one at `mark` is said to be the slowest."""
    total = max(float(sum(values[i] for values in phases.values())) for i in range(len(names)))
    row, left, width = 24, 110, 640
    told = "; ".join(
        f"{name}: "
        + ", ".join(f"{phase} {float(v[i]) * 1e3:.2f} ms" for phase, v in phases.items() if v[i])
        for i, name in enumerate(names[:MOST_TOLD])
    )
    parts = [_svg(left + width + 90, row * len(names) + 4, f"phases of a step; {told}")]
    for i, name in enumerate(names):
        y, x = i * row + 3, float(left)
        bold = ' class="slowest"' if i == mark else ' class="label"'
        parts.append(f'<text{bold} x="{left - 8}" y="{y + 14}" text-anchor="end">')
        parts.append(f"{html.escape(name)}{' ▸' if i == mark else ''}</text>")
        for number, (phase, values) in enumerate(phases.items()):
            wide = width * float(values[i]) / max(total, 1e-12)
            if wide >= 0.3:
                parts.append(
                    f'<rect class="p{number}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="18">'
                    f"<title>{phase} {float(values[i]) * 1e3:.2f} ms</title></rect>"
                )
            x += wide
        whole = float(sum(values[i] for values in phases.values()))
        parts.append(f'<text class="tick" x="{x + 6:.1f}" y="{y + 14}">{whole * 1e3:.1f} ms</text>')
    return "".join(parts) + "</svg>"


def heat_map(
    names: Sequence[str], cells: np.ndarray, steps: np.ndarray, slowest: int | None
) -> str:
    """A row a name, a column a step, darker for more; a dot on the slowest of each column."""
    rows, columns = cells.shape
    left, width, row = 110, 780, max(8, min(22, 400 // rows))
    wide, largest = width / columns, max(float(np.nanmax(cells)), 1e-12)
    told = f"own time of {rows} ranks, step {int(steps[0]):,} to {int(steps[-1]):,}"
    if slowest is not None:
        told += f"; the slowest is {names[slowest]}"
    parts = [_svg(left + width + 10, rows * row + 24, told)]
    for r in range(rows):
        y = r * row
        kind = "slowest" if r == slowest else "label"
        if rows <= 40 or r == slowest:
            text = html.escape(names[r]) + (" ▸" if r == slowest else "")
            parts.append(f'<text class="{kind}" x="{left - 8}" y="{y + row * 0.7:.1f}" ')
            parts.append(f'text-anchor="end">{text}</text>')
        parts.append("<g>")
        for c in range(columns):
            shade = float(cells[r, c]) / largest
            parts.append(
                f'<rect x="{left + c * wide:.1f}" y="{y}" width="{wide:.1f}" height="{row - 1}" '
                f'fill-opacity="{0.04 + 0.96 * shade:.2f}"/>'
            )
        parts.append("</g>")
    for c, r in enumerate(np.nanargmax(cells, axis=0) if rows > 1 else []):
        x, y = left + (c + 0.5) * wide, r * row + row / 2 - 0.5
        parts.append(f'<circle class="worst" cx="{x:.1f}" cy="{y:.1f}" r="1.6"/>')
    for place in np.linspace(0, columns - 1, min(columns, 6)).astype(int):
        x = left + (place + 0.5) * wide
        parts.append(f'<text class="tick" x="{x:.1f}" y="{rows * row + 16}" ')
        parts.append(f'text-anchor="middle">{int(steps[place]):,}</text>')
    return "".join(parts) + "</svg>"


def _svg(width: int, height: int, told: str) -> str:
    """The opening tag; `told` is what a screen reader says of the picture."""
    label = html.escape(told)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'


def _finite(series: Series) -> Series:
    good = np.isfinite(series.x) & np.isfinite(series.y)
    return Series(series.name, series.x[good], series.y[good], series.colour)


def _binned(s: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    if len(s.x) <= BINS:
        return s.x, s.y, s.y, s.y
    pieces = np.array_split(np.arange(len(s.x)), BINS)
    x = np.array([s.x[p].mean() for p in pieces])
    mean = np.array([s.y[p].mean() for p in pieces])
    return (
        x,
        mean,
        np.array([s.y[p].min() for p in pieces]),
        np.array([s.y[p].max() for p in pieces]),
    )


def robust_limits(y: np.ndarray) -> tuple[float, float]:
    """The smallest and largest value, but for a few extremes that would press the rest flat."""
    if len(y) < 20:
        return float(y.min()), float(y.max())
    low, high = (float(v) for v in np.quantile(y, [0.02, 0.98]))
    span = max(high - low, 1e-12)
    near = y[(y >= low - span) & (y <= high + span)]
    return float(near.min()), float(near.max())


def _limits(y: np.ndarray) -> tuple[float, float]:
    low, high = robust_limits(y)
    if 0 <= low < 0.5 * high:
        low = 0.0
    if high <= low:
        low, high = low - 0.5 * abs(low) - 1e-9, high + 0.5 * abs(high) + 1e-9
    room = 0.05 * (high - low)
    return (low if low == 0.0 else low - room), high + room


def _ticks(low: float, high: float) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(span / 4))
    unit *= next(times for times in (1, 2, 5, 10) if span / (unit * times) <= 5)
    first = math.ceil(low / unit) * unit
    return [first + i * unit for i in range(int((high - first) / unit + 1e-9) + 1)]


def _short(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale * 10 or (abs(value) >= scale and unit != "k"):
            return f"{value / scale:g}{unit}"
    return f"{value:.6g}"
