"""`mgt predict`: what a trained model says to files, folders and texts, on all ranks."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from multi_gpu_training.cli.evaluate_command import checked_source
from multi_gpu_training.cli.measured_script import file_problems, folder_problems
from multi_gpu_training.delivery.loaded_model import load
from multi_gpu_training.delivery.rank_predictions import predict_on_ranks, ranks
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import write_atomically
from multi_gpu_training.safe_output import printable

FORMATS = ("table", "jsonl", "csv")
MOST_ROWS = 200  # of a table on the terminal; files hold all of them
MOST_NUMBERS = 6  # of an output in that table
COLOURS = ("#4878d0", "#ee854a", "#6acc64", "#d65f5f", "#956cb4", "#8c613c", "#dc7ec0", "#797979")


@dataclass(frozen=True)
class PredictFlags:
    run: str
    inputs: list[str]
    task: str | None
    out: str | None
    form: str | None
    timeline: str | None
    checkpoint: str | None
    num_gpus: int
    batch_size: int | None
    device: str
    dtype: str
    trust: bool
    options: dict[str, Any]


def predict(flags: PredictFlags) -> int:
    form = _format(flags)
    if flags.timeline is not None and Path(flags.timeline).suffix not in (".csv", ".svg"):
        raise ConfigError(f"--timeline {flags.timeline}: use a name that ends in .csv or .svg")
    problems = [
        *file_problems("--out", flags.out),
        *file_problems("--timeline", flags.timeline),
        *folder_problems("--record", flags.options.get("record")),
    ]
    if problems:
        raise ConfigError(problems)
    where = checked_source(flags.run, flags.checkpoint)
    with ranks(flags.num_gpus, flags.device) as placement:
        loaded = load(where, device=placement.device, trust=flags.trust, dtype=flags.dtype)
        # PPO acts on observations, but at a terminal one wants to see it play.
        usual = "play" if "play" in loaded.tasks else None
        task = loaded.task(flags.task or usual)
        words = flags.inputs or (["5"] if task == "play" else [])
        if not words:
            raise ConfigError("give at least one input after RUN: a file, a folder or a text")
        found = [pair for word in words for pair in loaded.pipeline.find(word, task)]
        raws = [raw for _, raw in found]
        results = predict_on_ranks(loaded, raws, placement, task, flags.batch_size, **flags.options)
        if not placement.is_main:
            return 0
    rows = [{"input": name, **result} for (name, _), result in zip(found, results, strict=True)]
    _show(rows, form, flags.out)
    if flags.timeline is not None:
        _write_timeline(rows, Path(flags.timeline))
    failed = sum("error" in row for row in rows)
    if failed:
        print(f"{failed} of {len(rows)} inputs could not be used", file=sys.stderr)
    return 1 if failed else 0


def _format(flags: PredictFlags) -> str:
    ending = Path(flags.out).suffix.removeprefix(".") if flags.out else ""
    if flags.out and flags.form is None and ending not in FORMATS[1:]:
        raise ConfigError(
            f"--out {flags.out}: end it in .jsonl or .csv, or say which with --format"
        )
    if flags.form is not None and ending in FORMATS[1:] and ending != flags.form:
        raise ConfigError(f"--out {flags.out} and --format {flags.form} contradict each other")
    form = flags.form or (ending if ending in FORMATS else "jsonl" if flags.out else "table")
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: use {', '.join(FORMATS)}")
    return form


def _show(rows: list[dict[str, Any]], form: str, out: str | None) -> None:
    if form == "table":
        if out is not None:
            raise ConfigError("--out takes jsonl or csv; drop --format table")
        _print_table(rows)
        return
    text = as_csv(rows) if form == "csv" else "".join(json.dumps(row) + "\n" for row in rows)
    if out is None:
        sys.stdout.write(text)
    else:
        _write(Path(out), text)
        print(f"{len(rows):,} results: {out}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text, 0o644)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """A column per field that any result has; what is nested stands there as JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        writer.writerow([json.dumps(c) if isinstance(c, (dict, list)) else c for c in cells])
    return out.getvalue()


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    # Of what is nested only a script's outputs: they are all that it predicts.
    columns = list(
        dict.fromkeys(
            name
            for row in rows
            for name, value in row.items()
            if name == "output" or isinstance(value, (str, int, float))
        )
    )
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    table = Table(*columns)
    for row in rows[:MOST_ROWS]:
        table.add_row(*(escape_markup(_cell(row.get(name, ""))) for name in columns))
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"and {len(rows) - MOST_ROWS:,} more; --out FILE.jsonl holds all")
    for row in rows[:MOST_ROWS]:
        if "timeline" in row:
            table = Table("from", "to", "label", "score", title=escape_markup(row["input"]))
            for one in row["timeline"]:
                table.add_row(
                    _moment(one, "first"), _moment(one, "last"), one["label"], f"{one['score']:.3f}"
                )
            console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_cell(one) for one in value[:MOST_NUMBERS])
        more = f", ... {len(value):,} in all" if len(value) > MOST_NUMBERS else ""
        return shorten(f"[{shown}{more}]", 160, placeholder=" ...]")
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def _moment(one: dict[str, Any], end: str) -> str:
    seconds = one[f"{end}_seconds"]
    return f"frame {one[f'{end}_frame']}" if seconds is None else f"{seconds:.2f} s"


# Timelines of videos


def _write_timeline(rows: Sequence[dict[str, Any]], path: Path) -> None:
    found = [row for row in rows if "timeline" in row]
    if not found:
        raise ConfigError("--timeline needs a video longer than one clip, and none was given")
    if path.suffix == ".csv":
        flat = [{"input": row["input"], **one} for row in found for one in row["timeline"]]
        _write(path, as_csv(flat))
    else:
        _write(path, timeline_svg(found))
    print(f"timeline: {path}")


def timeline_svg(rows: Sequence[dict[str, Any]]) -> str:
    """A bar per video, coloured by what is seen, with a legend."""
    labels = list(dict.fromkeys(one["label"] for row in rows for one in row["timeline"]))
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
    height = 46 * len(rows) + 30 + 20 * len(labels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" '
        'font-family="sans-serif" font-size="13">'
    ]
    top = 20
    for row in rows:
        parts.append(f'<text x="10" y="{top}">{escape(printable(row["input"]))}</text>')
        ends = [one["last_frame"] for one in row["timeline"]]
        scale = 880 / (ends[-1] + 1)
        before = 0.0
        for one, last in zip(row["timeline"], ends, strict=True):
            after = 880.0 if last == ends[-1] else (last + 1) * scale
            seen = f"{one['label']}, {_moment(one, 'first')} to {_moment(one, 'last')}"
            parts.append(
                f'<rect x="{10 + before:.1f}" y="{top + 6}" width="{max(0.5, after - before):.1f}" '
                f'height="18" fill="{colours[one["label"]]}"><title>{escape(seen)}</title></rect>'
            )
            before = after
        top += 46
    for label, colour in colours.items():
        parts.append(f'<rect x="10" y="{top}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="30" y="{top + 12}">{escape(printable(label))}</text>')
        top += 20
    return "\n".join([*parts, "</svg>\n"])
