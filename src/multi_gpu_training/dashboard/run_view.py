"""A run as the page and the terminal show it: plain values, of bounded size, ready for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from multi_gpu_training.dashboard.live_runs import LiveRun
from multi_gpu_training.monitoring.report import comparison, wording
from multi_gpu_training.monitoring.report.attribution import side_by_side
from multi_gpu_training.monitoring.report.curves import FIRST, IDENTITY
from multi_gpu_training.monitoring.report.event_schema import is_number
from multi_gpu_training.monitoring.report.figures import Figures, figures
from multi_gpu_training.monitoring.report.history import Event, time_of
from multi_gpu_training.monitoring.report.run_record import RunRecord
from multi_gpu_training.monitoring.report.sentences import duration
from multi_gpu_training.monitoring.report.verdict import judge
from multi_gpu_training.redaction import redact_values
from multi_gpu_training.safe_output import printable

LONGEST_NAME = 120
LONGEST_TEXT = 2_000
MOST_METRICS = 60
MOST_RANKS = 256
MOST_EVENTS = 60
SPARK = 40  # points of the small curve in the list
RECENT = 20  # logged intervals that speed and remaining time are taken from
STATES = {
    "running": "running",
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped on request",
    "killed": "killed, or its machine went down",
    "quiet": "no sign of life yet",
    "unreadable": "cannot be read",
}
Values = dict[str, Any]


def clean(text: object, most: int = LONGEST_TEXT) -> str:
    """Text from a run: without control characters, and of a length that fits a page."""
    shown = printable(str(text))
    return shown if len(shown) <= most else f"{shown[:most]}... ({len(shown):,} characters)"


def summary(run: LiveRun, now: float) -> Values:
    """A line of the list."""
    record = run.record
    told: Values = {
        "id": run.id,
        "name": clean(run.name, LONGEST_NAME),
        "path": clean(run.url or run.path, 500),
        "state": run.state,
        "state_text": STATES[run.state],
        "silent_s": run.silent_s(now) if run.state in ("running", "quiet") else None,
        "version": run.version,
        "problem": None if run.problem is None else clean(run.problem),
        "can_act": run.url is None and run.state == "running",
    }
    if record is None:
        return told
    found = figures(record)
    step, total = record.last_step, total_steps(record)
    recent = recent_steps(record)
    return told | {
        "step": step,
        "total": total,
        "progress": min(1.0, step / total) if total else None,
        "remaining_s": remaining_s(record, step, total) if run.state == "running" else None,
        "elapsed_s": record.trained_s or None,
        "began": record.began or None,
        "ranks": record.world_size,
        "mode": clean(record.config.get("training_mode", ""), 40),
        "samples_per_s": (_recent_rate(recent) if run.state == "running" else None)
        or found.samples_per_s,
        "loss": _newest_loss(record),
        "metrics": {clean(k, LONGEST_NAME): v for k, v in list(found.metrics.items())[:8]},
        "gpu_use": _mean(rank["gpu_use"] for rank in rank_rows(record)),
        "spark": _spark(record),
        "error": next((clean(e["error"]) for e in record.ends if e.get("error")), None),
    }


def detail(run: LiveRun, now: float) -> Values:
    """All that is shown of one run."""
    told, record = summary(run, now), run.record
    if record is None:
        return told
    found, verdict = figures(record), judge(record)
    kind = "cause" if verdict.causes else verdict.kind
    return (
        told
        | {
            "tiles": [(name, clean(value, 200)) for name, value in wording.tiles(record, found)],
            "verdict": clean(verdict.headline),
            "verdict_kind": kind,  # cause, none or unknown
            "forecast": forecast(found),
            "curves": curves(record),
            "rank_rows": rank_rows(record),
            "events": event_rows(record),
            "checkpoints": checkpoint_rows(record),
            "faults": fault_rows(record),
            "problems": [clean(problem) for problem in record.problems[:20]],
            "config": [
                (clean(name, LONGEST_NAME), clean(value, 300))
                for name, value in redact_values(record.config).items()
            ],
            "lr": next((e["lr"] for e in reversed(record.steps) if is_number(e.get("lr"))), None),
            "log_every": record.config.get("log_every"),
        }
    )


# Where it stands


def total_steps(record: RunRecord) -> int | None:
    """Optimizer steps of the whole run, where that is known."""
    config, facts = record.config, record.facts.get(record.ranks[0], {})
    by_epochs = (_number(config.get("epochs")) or 0.0) * (_number(facts.get("epoch_steps")) or 0.0)
    ends = [by_epochs, _number(config.get("max_steps")) or 0.0]
    return min((int(end) for end in ends if end >= 1), default=None)


def recent_steps(record: RunRecord) -> list[Event]:
    """The last logged steps since the latest start."""
    begun = record.facts.get(record.ranks[0], {}).get("step")
    after = begun if isinstance(begun, int) else -1
    return [event for event in record.steps[-RECENT:] if event["step"] > after]


def _newest_loss(record: RunRecord) -> float | None:
    """The loss of the last logged step, or of an epoch that ended after it: a short run may end
    before its first logged step."""
    told: list[tuple[float, Any]] = [(time_of(e), e.get("loss")) for e in recent_steps(record)]
    told += [
        (time_of(e), e["train"].get("loss"))
        for e in record.epochs[-1:]
        if isinstance(e.get("train"), dict)
    ]
    found = [(when, float(loss)) for when, loss in told if is_number(loss)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def remaining_s(record: RunRecord, step: int, total: int | None) -> float | None:
    """Seconds until the last step, at the pace of late: validations and checkpoints included. Both
    times come from the clock of one rank."""
    recent = [event for event in recent_steps(record) if time_of(event)]
    if total is None or len(recent) < 2:
        return None
    steps = int(recent[-1]["step"]) - int(recent[0]["step"])
    seconds = time_of(recent[-1]) - time_of(recent[0])
    if steps <= 0 or seconds < 0:  # its clock was set back
        return None
    return max(0, total - step) * seconds / steps


def _recent_rate(recent: Sequence[Event]) -> float | None:
    rates = [float(e["samples_per_s"]) for e in recent if is_number(e.get("samples_per_s"))]
    return median(rates[-5:]) if rates else None


# Curves


def curves(record: RunRecord) -> Values:
    """What was logged: the x of each point in steps, seconds and samples, and the values by name.
    Validation has points of its own."""
    samples = _number(record.facts.get(record.ranks[0], {}).get("global_batch"))
    rows = [
        {"step": e["step"], "time": e.get("time"), **e["val"]}
        for e in record.epochs
        if isinstance(e.get("val"), dict) and isinstance(e.get("step"), int)
    ]
    rows += [
        {k: v for k, v in e.items() if k not in ("v", "attempt", "rank", "world_size", "epoch")}
        for e in record.notable
        if e["event"] == "validation" and isinstance(e.get("step"), int)
    ]
    latest = {row["step"]: row for row in rows}
    validated = [latest[step] for step in sorted(latest)]
    return {
        "train": _columns(record.steps, record.began, samples),
        "val": _columns(validated, record.began, samples),
    }


def _columns(rows: Sequence[Event], began: float, batch: float | None) -> Values:
    names: dict[str, None] = {}
    for row in rows:
        names |= {k: None for k, v in row.items() if k not in IDENTITY and is_number(v)}
    chosen = sorted(names, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))
    times = [time_of(row) for row in rows]
    return {
        "step": [row["step"] for row in rows],
        "time": [round(at - began, 3) if at and began else None for at in times],
        "samples": [row["step"] * batch if batch else None for row in rows],
        "values": {
            clean(name, LONGEST_NAME): [_point(row.get(name)) for row in rows]
            for name in chosen[:MOST_METRICS]
        },
        "left_out": max(0, len(chosen) - MOST_METRICS),
    }


def _point(value: Any) -> float | None:
    return float(f"{value:.6g}") if is_number(value) else None


def _spark(record: RunRecord) -> list[float]:
    losses = np.array(record.column("loss"))
    if len(losses) < 2:
        return []
    pieces = np.array_split(losses, min(SPARK, len(losses)))
    return [float(f"{piece.mean():.4g}") for piece in pieces]


# Ranks


def rank_rows(record: RunRecord) -> list[Values]:
    """A row for each rank: where it runs, its newest reading, and what a step of it is made of."""
    steps = side_by_side(record)
    phases: dict[int, dict[str, float]] = {}
    if steps is not None:
        typical = steps.shown(figures(record).step_s)
        for row, rank in enumerate(steps.ranks):
            phases[rank] = {p: float(f"{v[row] * 1e3:.4g}") for p, v in typical.items()}
    slowest = None if steps is None or steps.slowest is None else steps.ranks[steps.slowest]
    rows = []
    for rank in record.ranks[:MOST_RANKS]:
        facts = record.facts.get(rank, {})
        last = record.devices.get(rank, [])[-1:] or [{}]
        reading = last[0]
        rows.append(
            {
                "rank": rank,
                "host": clean(facts.get("host", ""), LONGEST_NAME),
                "device": clean(facts.get("device_name") or facts.get("device") or "", 80),
                "gpu_use": _share(reading.get("gpu_utilization")),
                "cpu_use": _share(reading.get("cpu_percent")),
                "memory": _number(reading.get("gpu_memory_bytes", reading.get("memory_bytes"))),
                "memory_total": _number(
                    facts.get("device_bytes") if facts.get("device_uuid") else None
                ),
                "peak": _number(reading.get("peak_bytes")),
                "power_w": _number(reading.get("power_w")),
                "phases": phases.get(rank),
                "slowest": rank == slowest,
            }
        )
    return rows


def _share(percent: Any) -> float | None:
    return float(percent) / 100 if is_number(percent) else None


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# What happened


def event_rows(record: RunRecord) -> list[list[str]]:
    """(time since the start, kind, words), newest first. Of a fault the first line: it stands in
    full among the faults."""
    rows = wording.event_rows(record)[-MOST_EVENTS:]
    return [
        [clean(cell.partition("\n")[0] if row[1] == "fault" else cell) for cell in row]
        for row in reversed(rows)
    ]


def checkpoint_rows(record: RunRecord) -> list[Values]:
    """Checkpoints that were written, newest first."""
    found = [e for e in record.notable if e["event"] == "checkpoint" and e.get("rank") == 0]
    return [
        {
            "step": event.get("step"),
            "size": wording.size(event.get("bytes")),
            "stall": wording.paused(event),
            "after": _after(record, event),
        }
        for event in reversed(found[-MOST_EVENTS:])
    ]


def fault_rows(record: RunRecord) -> list[Values]:
    """Faults, stalls and restarts, newest first."""
    kinds = ("fault", "stall", "restart", "events_lost")
    found = [e for e in record.notable if e["event"] in kinds]
    return [
        {
            "after": _after(record, event),
            "kind": clean(event.get("kind") or event["event"], 80),
            "ranks": wording.fault_ranks(event).removeprefix("ranks ").removeprefix("rank "),
            "step": event.get("step"),
            "action": clean(event.get("action") or "", 80),
            "text": clean(event.get("message") or event.get("error") or ""),
        }
        for event in reversed(found[-MOST_EVENTS:])
    ]


def _after(record: RunRecord, event: Event) -> str:
    at = time_of(event)
    return f"+{duration(max(0.0, at - record.began))}" if at and record.began else ""


def forecast(found: Figures) -> Values | None:
    """What was forecast and what came, in words and numbers."""
    line = wording.forecast_line(found)
    if line is None or found.forecast is None:
        return None
    numbers = {k: _number(found.forecast[k]) for k in ("expected", "actual", "low", "high", "off")}
    return {"text": clean(line), "figure": found.forecast["figure"], **numbers}


def compared(runs: Sequence[LiveRun]) -> Values:
    """The table of several runs side by side, and the settings that differ."""
    records = [run.record for run in runs if run.record is not None]
    if not records:
        return {"title": [], "rows": [], "names": [], "settings": []}
    title, rows = comparison.table(records, [figures(record) for record in records])
    return {
        "title": [clean(cell, LONGEST_NAME) for cell in title],
        "rows": [[clean(cell, 200) for cell in row] for row in rows],
        "names": [clean(name, LONGEST_NAME) for name in comparison.names(records)],
        "settings": [[clean(cell, 300) for cell in row] for row in comparison.differences(records)],
    }
