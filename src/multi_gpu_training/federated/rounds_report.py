"""The page of a federation: rounds, clients, drift and bytes. It needs nothing else to be shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from multi_gpu_training.monitoring.report.page import STYLE
from multi_gpu_training.safe_files import read_json, read_text, write_atomically

WIDTH, HEIGHT, EDGE = 460, 200, 40
MOST = 64 * 2**20


def write_report(folder: Path) -> Path:
    """Write FOLDER/report.html and return its path."""
    facts = read_json(folder / "federation.json", dict[str, Any])
    lines = read_text(folder / "rounds.jsonl", MOST).splitlines()
    rounds = [json.loads(line) for line in lines]
    path = folder / "report.html"
    write_atomically(path, page(facts, rounds))
    return path


def page(facts: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> str:
    names = sorted({name for entry in rounds for name in entry["metrics"]})
    figures = [
        _chart(name, rounds, lambda entry, n=name: entry["metrics"].get(n)) for name in names
    ]
    figures.append(_chart("drift", rounds, lambda entry: entry["drift"]))
    figures.append(_chart("norm of the update", rounds, lambda entry: entry["update_norm"]))
    if any(entry["epsilon"] is not None for entry in rounds):
        figures.append(_chart("epsilon", rounds, lambda entry: entry["epsilon"]))
    sent = sum(entry["bytes_out"] + entry["bytes_in"] for entry in rounds)
    settings = ", ".join(f"{k}={v}" for k, v in facts["settings"].items() if v is not None)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Federation</title>"
        f"<style>{STYLE}</style></head><body><main><h1>Federation "
        f"{escape(str(facts['federation']))}</h1><p>{len(rounds)} rounds, "
        f"{sent / 2**20:.1f} MiB sent and received.</p><p>{escape(settings)}</p>"
        f"{''.join(figures)}{_round_table(rounds, names)}{_client_table(rounds)}"
        "</main></body></html>"
    )


def _chart(title: str, rounds: Sequence[dict[str, Any]], value: Any) -> str:
    points = [(entry["round"], value(entry)) for entry in rounds]
    points = [(at, float(v)) for at, v in points if v is not None]
    if not points:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]
    drawn = " ".join(
        f"{EDGE + (WIDTH - 2 * EDGE) * (at - first) / max(1, last - first):.1f},"
        f"{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * ((v - low) / (high - low or 1)):.1f}"
        for at, v in points
    )
    return (
        f"<figure><figcaption>{escape(title)}: {points[0][1]:.4g} to {points[-1][1]:.4g}, "
        f"between {low:.4g} and {high:.4g}</figcaption>"
        f"<svg role=img aria-label='{escape(title)} by round' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"width={WIDTH}><polyline fill=none stroke=currentColor stroke-width=1.5 "
        f"points='{drawn}'/></svg></figure>"
    )


def _round_table(rounds: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    head = ["round", "clients", *names, "drift", "MiB out", "MiB in", "s", "left out"]
    rows = []
    for entry in rounds:
        out = "; ".join(f"{name}: {why}" for name, why in entry["left_out"].items())
        rows.append(
            [
                str(entry["round"]),
                f"{len(entry['counted'])} of {len(entry['asked'])}",
                *(_number(entry["metrics"].get(name)) for name in names),
                _number(entry["drift"]),
                f"{entry['bytes_out'] / 2**20:.2f}",
                f"{entry['bytes_in'] / 2**20:.2f}",
                f"{entry['seconds']:.1f}",
                out,
            ]
        )
    return _table("Rounds", head, rows)


def _client_table(rounds: Sequence[dict[str, Any]]) -> str:
    names = sorted({name for entry in rounds for name in entry["asked"]})
    rows = []
    for name in names:
        asked = sum(name in entry["asked"] for entry in rounds)
        counted = [entry["counted"][name] for entry in rounds if name in entry["counted"]]
        newest = counted[-1] if counted else {}
        figures = (_number(newest.get(key)) for key in ("samples", "norm", "seconds"))
        rows.append([name, f"{len(counted)} of {asked}", *figures])
    return _table("Clients", ["client", "rounds", "samples", "norm of its last update", "s"], rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th scope=col>{escape(word)}</th>" for word in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<h2>{title}</h2><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"
