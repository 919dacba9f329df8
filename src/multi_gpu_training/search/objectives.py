"""What a search optimizes, and how a value is read from the events of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.event_segments import marked_events
from multi_gpu_training.monitoring.loggers.jsonl_logger import logged_metrics
from multi_gpu_training.safe_output import brief

# Words that say which way is better. The first also at the end of a word, as in logloss; the others
# alone: cancer and answer are no error rates, a heatmap no mean average precision.
SMALL = ("loss", "error", "perplexity", "rmse", "mse", "mae", "nll", "regret"), ("wer", "cer")
LARGE = (
    ("accuracy", "f1", "auc", "auroc", "precision", "recall", "reward", "return", "score", "iou"),
    ("map",),
)
UNSURE = ("neg", "negative", "minus", "inverse", "brier", "crps", "fid")  # turn it around
# Facts of a run rather than metrics of its model, and which way is better.
FACTS: dict[str, Literal["min", "max"]] = {
    "parameters": "min",
    "samples_per_s": "max",
    "peak_memory_mb": "min",
}


@dataclass(frozen=True)
class SearchObjective:
    """A metric as the run logs it, such as `val/loss`, and whether small or large is good."""

    metric: str
    direction: Literal["min", "max"]

    @property
    def optuna_direction(self) -> Literal["minimize", "maximize"]:
        return "minimize" if self.direction == "min" else "maximize"

    def better(self, one: float, other: float) -> bool:
        return one < other if self.direction == "min" else one > other


def read_objective(text: str) -> SearchObjective:
    """`val/loss`, or `NAME:min` and `NAME:max` where the name does not tell."""
    name, colon, way = text.partition(":")
    if not name.strip():
        raise ConfigError("--metric needs a name, such as val/loss or val/accuracy:max")
    if colon:
        if way not in ("min", "max"):
            raise ConfigError(f"--metric {brief(text)}: end it with :min or :max")
        return SearchObjective(name, "min" if way == "min" else "max")
    if name in FACTS:
        return SearchObjective(name, FACTS[name])
    words = name.lower().replace("/", "_").replace("-", "_").split("_")
    small, large = (
        any(word.endswith(ends) or word in alone for word in words)
        for ends, alone in (SMALL, LARGE)
    )
    if small != large and not any(word in UNSURE for word in words):
        return SearchObjective(name, "min" if small else "max")
    raise ConfigError(
        f"--metric {brief(name)}: the name does not say whether small or large values are good; "
        f"write {name[:80]}:min or {name[:80]}:max"
    )


@dataclass(frozen=True)
class Validated:
    """The objectives after one validation, at a step of the training."""

    step: int
    values: tuple[float, ...]


@dataclass
class RunReadings:
    """What the events of a run say so far.

    `history` is in the order of steps; a validation that a resumed run repeats counts once.
    """

    history: list[Validated] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    last_step: int = -1
    finished: bool = False

    def missing(self, objectives: Sequence[SearchObjective]) -> list[str]:
        known = {**self.metrics, **self.facts}
        return [one.metric for one in objectives if one.metric not in known]


def read_events(run: Path, objectives: Sequence[SearchObjective]) -> RunReadings:
    """Read the events of rank 0; empty where the run has not begun."""
    found = RunReadings()
    current = run / "events" / "rank-0.jsonl"
    _read_rare(current, found)
    rates: list[float] = []
    logged = [one.metric for one in objectives if one.metric not in FACTS]
    for step, metrics, _ in logged_metrics(current, 2**62, math.inf):
        found.last_step = step
        found.metrics.update(metrics)
        if "train/samples_per_s" in metrics:
            rates.append(metrics["train/samples_per_s"])
        # All objectives that the run logs must come from the same validation.
        if logged and all(name in metrics for name in logged):
            row = {**found.facts, **metrics}
            values = tuple(row.get(one.metric, math.nan) for one in objectives)
            found.history.append(Validated(step, values))
    if rates:
        found.facts["samples_per_s"] = median(rates)
    if not logged and all(one.metric in found.facts for one in objectives):
        found.history = [Validated(0, tuple(found.facts[one.metric] for one in objectives))]
    return found


def final_values(
    readings: RunReadings, objectives: Sequence[SearchObjective], kind: str
) -> list[float]:
    """The result of a finished run: its last validation, or the best by the first objective."""
    rows = [found.values for found in readings.history]
    if not rows:
        return [math.nan] * len(objectives)
    known = [row for row in rows if not math.isnan(row[0])]
    chosen = rows[-1]
    if kind == "best" and known:
        chosen = (min if objectives[0].direction == "min" else max)(known, key=lambda row: row[0])
    # Facts such as the speed are known best at the end.
    return [
        readings.facts.get(one.metric, value) if one.metric in FACTS else value
        for one, value in zip(objectives, chosen, strict=True)
    ]


def _read_rare(current: Path, found: RunReadings) -> None:
    peaks = [0.0]
    for event in marked_events(current, [b'"event": "r', b'"event": "device"']):
        if event["event"] == "rank":
            found.finished = False
            if isinstance(event.get("parameters"), int):
                found.facts["parameters"] = float(event["parameters"])
        elif event["event"] == "run_end":
            found.finished = "error" not in event and "stopped" not in event
        elif event["event"] == "device":
            peaks.append(float(event.get("peak_bytes") or 0.0))
    if max(peaks) > 0:
        found.facts["peak_memory_mb"] = max(peaks) / 2**20
