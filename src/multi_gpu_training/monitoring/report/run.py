"""What a run's folder says, read whatever became of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.phase_names import PHASES
from multi_gpu_training.monitoring.report.lines import (
    MOST_READINGS,
    MOST_SAMPLES,
    MOST_STEPS,
    EventLines,
    read_lines,
    thinned,
)
from multi_gpu_training.reliability.lock import owner

INTERVAL = ("interval_steps", "interval_s", "interval_input_s", "interval_checkpoint_s")
QUEUED = tuple(f"queued_{phase}_s" for phase in PHASES)
COLUMNS = (*(f"{phase}_s" for phase in PHASES), "step_s", *INTERVAL, "cpu_s", *QUEUED)
Event = dict[str, Any]


@dataclass
class Samples:
    """Timed steps of one rank: a row a step, a column as in COLUMNS. NaN is not known."""

    steps: np.ndarray
    values: np.ndarray
    from_checks: bool = False

    def column(self, name: str) -> np.ndarray:
        return np.asarray(self.values[:, COLUMNS.index(name)])


@dataclass
class Run:
    """A run as its folder tells it. Steps that were computed again after a restart count once."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    forecast: dict[str, Any]
    ranks: list[int]
    world_size: int
    steps: list[Event] = field(default_factory=list)
    epochs: list[Event] = field(default_factory=list)
    samples: dict[int, Samples] = field(default_factory=dict)
    devices: dict[int, list[Event]] = field(default_factory=dict)
    facts: dict[int, Event] = field(default_factory=dict)
    work: dict[int, Event] = field(default_factory=dict)
    notable: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    state: str = "unknown"
    began: float = 0.0
    ended: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def last_step(self) -> int:
        found = [self.steps[-1]["step"]] if self.steps else []
        found += [int(s.steps[-1]) for s in self.samples.values() if len(s.steps)]
        found += [e["step"] for e in self.epochs if isinstance(e.get("step"), int)]
        return max(found, default=0)

    def column(self, name: str) -> list[float]:
        return [float(event[name]) for event in self.steps if is_number(event.get(name))]


def read_run(folder: Path | str) -> Run:
    """Read a run that ended, crashed or is still going. Raises ConfigError where there is none."""
    path = Path(folder)
    files = sorted((path / "events").glob("rank-*.jsonl"), key=_rank_of)
    if not path.is_dir():
        raise ConfigError(f"mgt report: {folder} is not there; give runs/RECIPE/NAME")
    if not files:
        raise ConfigError(_no_run(path))
    lines = {_rank_of(f): read_lines(f, with_steps=f is files[0]) for f in files}
    sizes = [e.get("world_size") for found in lines.values() for _, e in found.rare]
    world = next((size for size in reversed(sizes) if isinstance(size, int)), 0)
    world = world or _world_of(lines)
    run = Run(
        path=path,
        config=_yaml(path / "config.yaml"),
        environment=_json(path / "environment.json"),
        forecast=_json(path / "forecast.json"),
        ranks=list(lines),
        world_size=max(world, 1),
    )
    if not any(found.count for found in lines.values()):
        raise ConfigError(
            f"mgt report: {path} has event files but no event in them; the run ended before it "
            "wrote anything: look at its console output"
        )
    cuts = {rank: Timeline(found) for rank, found in lines.items()}
    _take_steps(run, lines, cuts)
    _take_samples(run, lines, cuts)
    for rank, found in lines.items():
        readings = thinned(found.frequent["device"], MOST_READINGS)
        run.devices[rank] = list(found.events(readings))
        _take_rare(run, rank, found, cuts[rank])
    _judge(run, lines)
    return run


class Timeline:
    """Which lines of a rank still count, where a run went back to a checkpoint.

    Each start of the rank says from which step it goes on; what was computed beyond it before is
    computed again.
    """

    def __init__(self, lines: EventLines) -> None:
        self.starts = [
            (place, int(event.get("step", 0)), event)
            for place, event in lines.rare
            if event["event"] == "rank"
        ]
        if not self.starts:
            self.starts = _guessed_starts(lines)

    def valid(self, lines: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the (place, step) that were not computed again later."""
        if not any(start > place for start, _, _ in self.starts for place, _ in lines[:1]):
            return lines
        return [
            (place, step)
            for place, step in lines
            if all(step <= first for start, first, _ in self.starts if start > place)
        ]


def _guessed_starts(lines: EventLines) -> list[tuple[int, int, Event]]:
    """Where steps went back, in files that do not say when a rank was started."""
    found: list[tuple[int, int, Event]] = []
    for kind in ("step", "phases"):
        before = -1
        for place, step in lines.frequent[kind]:
            if step <= before:
                found.append((place, step - 1, {}))
            before = step
    return found


def _take_steps(run: Run, lines: dict[int, EventLines], cuts: dict[int, Timeline]) -> None:
    rank = run.ranks[0]
    valid = cuts[rank].valid(lines[rank].frequent["step"])
    by_step: dict[int, Event] = {}
    for event in lines[rank].events(thinned(valid, MOST_STEPS)):
        if isinstance(event.get("step"), int):
            by_step[event["step"]] = event
    run.steps = [by_step[step] for step in sorted(by_step)]


def _take_samples(run: Run, lines: dict[int, EventLines], cuts: dict[int, Timeline]) -> None:
    wanted: set[int] | None = None
    for rank, found in lines.items():
        valid = cuts[rank].valid(found.frequent["phases"])
        if not valid:
            continue
        if wanted is None:  # the same steps of every rank
            wanted = set(thinned(sorted({line[1] for line in valid}), MOST_SAMPLES))
        rows = {}
        for event in found.events([line for line in valid if line[1] in wanted]):
            rows[event["step"]] = event
        steps = sorted(rows)
        values = [[_number(rows[step].get(name)) for name in COLUMNS] for step in steps]
        checks = sum(rows[step].get("source") == "check" for step in steps)
        run.samples[rank] = Samples(
            np.array(steps, dtype=np.int64),
            np.array(values, dtype=np.float64).reshape(len(steps), len(COLUMNS)),
            2 * checks > len(steps),
        )


def _take_rare(run: Run, rank: int, found: EventLines, cut: Timeline) -> None:
    for number, (_, _, event) in enumerate(cut.starts):
        if event and number:
            run.notable.append({**event, "event": "restart" if event["attempt"] else "resume"})
    for _, event in found.rare:
        kind = event["event"]
        if kind == "rank":
            run.facts[rank] = event
        elif kind == "work":
            run.work[rank] = event
        elif kind == "epoch":
            if rank == run.ranks[0]:
                run.epochs.append(event)
        else:
            run.notable.append(event)


def _judge(run: Run, lines: dict[int, EventLines]) -> None:
    """State, times, and what is odd about the files."""
    latest = {event.get("epoch"): event for event in run.epochs}  # a replayed epoch counts once
    run.epochs = [latest[key] for key in sorted(latest, key=lambda key: (key is None, key))]
    run.notable = _told_once(sorted(run.notable, key=lambda e: _number(e.get("time"), 0.0)))
    times = [_number(e.get("time"), 0.0) for e in (*run.steps, *run.notable, *run.facts.values())]
    times += [_number(e.get("time"), 0.0) for readings in run.devices.values() for e in readings]
    known = [t for t in times if t > 0]
    run.began, run.ended = (min(known), max(known)) if known else (0.0, 0.0)
    missing = sorted(set(range(run.world_size)) - set(run.ranks))
    if missing:
        names = ", ".join(map(str, missing))
        run.problems.append(f"no events of rank {names}: their files are missing")
    for rank, found in lines.items():
        if found.torn:
            run.problems.append(f"rank {rank}: the last line is torn, it was left out")
        if found.damaged:
            run.problems.append(f"rank {rank}: {found.damaged} damaged lines were left out")
    ends = [e for e in run.notable if e["event"] == "run_end"]
    starts = [_number(e.get("time"), 0.0) for e in run.facts.values()]
    last = ends[-1] if ends else None
    if owner(run.path) is not None:
        run.state = "running"
    elif last is not None and _number(last.get("time"), 0.0) >= max(starts, default=0.0):
        failed = next((e for e in ends if e.get("error")), None)
        run.state = "failed" if failed is not None else "finished"
    elif run.facts:
        run.state = "ended without a word"


def _told_once(found: list[Event]) -> list[Event]:
    """Every rank tells of a restart and of messages to all; once is enough."""
    kept: list[Event] = []
    seen: set[Any] = set()
    for event in found:
        if event["event"] in ("restart", "resume", "log", "shares", "run_end"):
            names = ("event", "attempt", "step", "message", "error")
            key = tuple(event.get(name) for name in names)
            if key in seen:
                continue
            seen.add(key)
        kept.append(event)
    return kept


def _no_run(path: Path) -> str:
    inside = sorted(str(found.parent) for found in path.glob("**/events") if found.is_dir())
    hint = f"did you mean {', '.join(inside[:3])}?" if inside else "give runs/RECIPE/NAME"
    return f"mgt report: {path} is no run folder: it has no events/rank-*.jsonl; {hint}"


def _rank_of(path: Path) -> int:
    digits = path.stem.removeprefix("rank-")
    return int(digits) if digits.isdigit() else 1_000_000


def _world_of(lines: dict[int, EventLines]) -> int:
    for found in lines.values():
        for kind in found.frequent.values():
            for event in found.events(kind[-1:]):
                if isinstance(event.get("world_size"), int):
                    return int(event["world_size"])
    return max(lines) + 1


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any, default: float = float("nan")) -> float:
    return float(value) if is_number(value) else default


def read_runs(folders: Sequence[Path | str]) -> list[Run]:
    return [read_run(folder) for folder in folders]
