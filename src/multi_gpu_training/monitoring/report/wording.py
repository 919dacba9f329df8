"""Figures, events and states as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from multi_gpu_training.monitoring.report.event_schema import is_number
from multi_gpu_training.monitoring.report.figures import Figures
from multi_gpu_training.monitoring.report.history import Event
from multi_gpu_training.monitoring.report.run_record import RunRecord, ending
from multi_gpu_training.monitoring.report.sentences import duration

STATES = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped: by a signal",
    "running": "running",
    "ended without a word": "ended without a word: killed, or the machine went down",
    "unknown": "its end is not recorded",
}
IDENTITY = {"v", "run", "attempt", "rank", "world_size", "host", "time", "clock", "event", "_crc"}
MOST_EVENTS = 200


def tiles(run: RunRecord, found: Figures) -> list[tuple[str, str]]:
    """Name and value of each figure that is known."""
    rows: list[tuple[str, str | None]] = [
        ("state", STATES[run.state].partition(":")[0]),
        ("steps", f"{run.last_step:,}"),
        ("ranks", str(run.world_size)),
        *speed_rows(found),
        ("peak memory", size(found.peak_bytes)),
        ("GPU use", percent(found.gpu_utilization, 100)),
        ("power", f"{found.power_w:,.0f} W a GPU" if found.power_w else None),
        ("MFU", f"{found.mfu:.1%}" if found.mfu is not None else None),
    ]
    rows += [*metric_rows("train", found.train), *metric_rows("val", found.val)]
    return [(name, value) for name, value in rows if value is not None]


def metric_rows(part: str, values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Metrics of the last epoch, in the same words wherever a run is summed up."""
    return [(f"{part} {name}", metric(name, value)) for name, value in values.items()]


def metric(name: str, value: float) -> str:
    """78.23% of an accuracy, 0.4521 of others; of small ones four digits that are not zeros."""
    if name.split("/")[-1] == "accuracy":
        return f"{value:.2%}"
    return f"{value:.4g}" if 0 < abs(value) < 0.01 else f"{value:.4f}"


def speed_rows(found: Figures) -> list[tuple[str, str]]:
    """Time, rate and step time, in the same words wherever a run is summed up."""
    rows = [
        ("time", duration(found.elapsed_s) if found.elapsed_s else None),
        ("samples/s", number(found.samples_per_s)),
        ("step", duration(found.step_s) if found.step_s else None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def forecast_line(found: Figures) -> str | None:
    """What was forecast and what came."""
    forecast = found.forecast
    if forecast is None:
        return None

    def show(value: Any) -> str:
        if not is_number(value):
            return "?"
        speed = forecast["figure"] == "samples_per_s"
        return f"{number(value)} samples/s" if speed else f"{duration(value)} per step"

    text = f"forecast {show(forecast['expected'])}, actual {show(forecast['actual'])}"
    if forecast["off"] is not None:
        text += f" ({forecast['off']:+.0%})"
    if forecast["low"] is not None:
        where = "inside" if forecast["inside"] else "outside"
        text += f"; {where} the band {show(forecast['low'])} to {show(forecast['high'])}"
    if forecast["batches"] is not None:
        foreseen, came = forecast["batches"]
        text += f"; the forecast was for a global batch of {foreseen:g}, the run's is {came:g}"
    return text


def event_rows(run: RunRecord) -> list[tuple[str, str, str]]:
    """Time since the start, kind and words of each event; of very many the first and last."""
    # A fault is said to people, too: its message stands in the log a second time.
    faults = {e.get("message") for e in run.notable if e["event"] == "fault"}
    shown = [
        e
        for e in run.notable
        if e["event"] != "shares" and not (e["event"] == "log" and e.get("message") in faults)
    ]
    shown = _one_stop_each(shown)
    left = len(shown) - MOST_EVENTS
    rows = [_event_row(run, event) for event in shown]
    if left > 0:
        middle = ("", "...", f"{left} more")
        rows = [*rows[: MOST_EVENTS // 2], middle, *rows[-MOST_EVENTS // 2 :]]
    return rows


def _one_stop_each(shown: list[Event]) -> list[Event]:
    """Each rank tells that it stops, and again that it ended. Only the first knows who asked;
    others get a signal from it."""
    best: dict[Any, Event] = {}
    for event in shown:
        if event["event"] == "stopped":
            before = best.setdefault(event.get("step"), event)
            if str(before.get("signal")).startswith("SIG"):
                best[event.get("step")] = event
    kept = {id(event) for event in best.values()}
    return [
        event
        for event in shown
        if id(event) in kept
        or event["event"] not in ("stopped", "run_end")
        or (
            event["event"] == "run_end" and not (event.get("stopped") and event.get("step") in best)
        )
    ]


def _event_row(run: RunRecord, event: Event) -> tuple[str, str, str]:
    kind = event["event"]
    at = float(event["time"]) if is_number(event.get("time")) else None
    since = f"+{duration(max(0.0, at - run.began))}" if at is not None and run.began else ""
    if kind == "checkpoint":
        text = (
            f"step {event.get('step')} saved ({size(event.get('bytes'))} of tensors), training "
            f"paused for {paused(event)}"
        )
    elif kind in ("restart", "resume"):
        again = f"attempt {event.get('attempt')}" if kind == "restart" else "started again"
        world = event.get("world_size")
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        text = f"{again}, on {ranks} from step {event.get('step')}"
    elif kind == "validation":
        found = {k: v for k, v in event.items() if k not in (*IDENTITY, "step")}
        text = ", ".join(
            f"{name} {metric(name, value) if is_number(value) else _short(value)}"
            for name, value in found.items()
        )
        text = f"after step {event.get('step')}: {text}"
    elif kind == "fault":
        text = f"{fault_ranks(event)}, {event.get('kind')}, {event.get('action')}: "
        text += str(event.get("message"))
    elif kind == "log":
        text = str(event.get("message"))
        kind = str(event.get("level", "log"))
    elif kind == "stall":
        waited = float(event.get("waited_s") or 0.0)
        text = f"rank {event.get('rank')}: no step for {duration(waited)}"
        text += f" after step {event.get('step')}"
    elif kind == "memory":
        text = f"rank {event.get('rank')}: {event.get('message')}"
    elif kind == "request":
        asked = str(event.get("action")).replace("_", " ")
        value = "" if event.get("value") is None else f" {_short(event['value'])}"
        text = f"{event.get('by') or 'asked'}: {asked}{value} at step {event.get('step')}: "
        text += str(event.get("outcome"))
    elif kind == "run_end":
        kind = {"finished": "end"}.get(ending(event), ending(event))
        text = str(event.get("error") or f"after step {event.get('step')}")
        if kind == "stopped":
            text = f"by {event.get('stopped', 'a signal')} after step {event.get('step')}"
    elif kind == "stopped":
        text = f"by {event.get('signal', 'a signal')} after step {event.get('step')}"
        if is_number(event.get("save_s")):
            text += f", saved in {duration(float(event['save_s']))}"
        if event.get("problem"):
            text += f"; {event['problem']}"
    else:
        text = f"rank {event.get('rank')}: " + ", ".join(
            f"{key} {_short(value)}" for key, value in event.items() if key not in IDENTITY
        )
    return since, kind, text


def paused(checkpoint: Event) -> str:
    """How long training stood still for a checkpoint."""
    return duration(float(checkpoint.get("stall_s") or 0) + float(checkpoint.get("waited_s") or 0))


def fault_ranks(event: Event) -> str:
    """Who tells of a fault: what happens to all of them is one fault."""
    ranks = sorted(set(event.get("ranks") or [event.get("rank")]), key=str)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 4 else f"{len(ranks)} ranks"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:200]


def date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else "?"


def number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None, whole: float = 1.0) -> str | None:
    return None if value is None else f"{value / whole:.0%}"


def size(value: Any) -> str | None:
    if not is_number(value):
        return None
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"
