"""What a run's folder says, read whatever became of the run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from multi_gpu_training.checkpoint.run_lock import owner
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.event_segments import segments
from multi_gpu_training.monitoring.memory_view import MemorySnapshot, peaks_of
from multi_gpu_training.monitoring.phase_names import PHASES
from multi_gpu_training.monitoring.profiling.trace_view import ShownProfile, profiles_of
from multi_gpu_training.monitoring.report.event_schema import is_number
from multi_gpu_training.monitoring.report.history import (
    Event,
    Timeline,
    latest_ends,
    newest_start,
    time_of,
    told_once,
)
from multi_gpu_training.monitoring.report.lines import (
    MOST_READINGS,
    MOST_SAMPLES,
    MOST_STEPS,
    EventLines,
    EventTail,
    thinned,
)
from multi_gpu_training.safe_files import digest, read_bytes, read_json, read_yaml

MOST_RANKS = 2**20
INTERVAL = ("interval_steps", "interval_s", "interval_input_s", "interval_checkpoint_s")
QUEUED = tuple(f"queued_{phase}_s" for phase in PHASES)
TIMED = (*(f"{phase}_s" for phase in PHASES), "step_s")
COLUMNS = (*(f"{phase}_s" for phase in PHASES), "step_s", *INTERVAL, "cpu_s", *QUEUED, "time")


@dataclass
class Samples:
    """Timed steps of one rank: a row a step, a column as in COLUMNS. NaN is not known."""

    steps: np.ndarray
    values: np.ndarray
    from_checks: bool = False

    def column(self, name: str) -> np.ndarray:
        return np.asarray(self.values[:, COLUMNS.index(name)])


@dataclass
class RunRecord:
    """A run as its folder tells it. Steps that were computed again after a restart count once.

    `ranks` are those of the latest start that have events. Of ranks that are gone only `notable`
    tells, and `samples` are of the time when there were as many ranks as now.
    """

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
    ends: list[Event] = field(default_factory=list)  # of the latest start
    problems: list[str] = field(default_factory=list)
    profiles: list[ShownProfile] = field(default_factory=list)
    memory: dict[str, MemorySnapshot] = field(default_factory=dict)
    state: str = "unknown"
    began: float = 0.0
    trained_s: float = 0.0  # without the pauses between a stop and the next start

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def last_step(self) -> int:
        found = [self.steps[-1]["step"]] if self.steps else []
        found += [int(s.steps[-1]) for s in self.samples.values() if len(s.steps)]
        told = (*self.epochs, *self.ends)
        found += [e["step"] for e in told if isinstance(e.get("step"), int)]
        return max(found, default=0)

    def column(self, name: str) -> list[float]:
        return [float(event[name]) for event in self.steps if is_number(event.get(name))]

    def rates(self) -> list[float]:
        """Samples a second as they were logged, with as many ranks as now."""
        size = self.world_size
        now = [event for event in self.steps if event.get("world_size", size) == size]
        return [float(e["samples_per_s"]) for e in now if is_number(e.get("samples_per_s"))]


@dataclass(frozen=True)
class Most:
    """How many lines of the frequent kinds are parsed: logged steps, timed steps of each rank,
    readings of each device. They are evenly spread over the run."""

    steps: int = MOST_STEPS
    samples: int = MOST_SAMPLES
    readings: int = MOST_READINGS


def read_run(folder: Path | str) -> RunRecord:
    """Read a run that ended, crashed or is still going. Raises ConfigError where there is none."""
    return RunReader(folder).read()


class RunReader:
    """Reads a run, and later again: only what was added to its files since."""

    def __init__(self, folder: Path | str, most: Most | None = None) -> None:
        self.folder = folder
        self.most = most or Most()
        self._tails: dict[tuple[Path, bool], EventTail] = {}

    def read(self) -> RunRecord:
        """The run as its folder tells it now."""
        folder, path = self.folder, Path(self.folder)
        try:
            if not path.is_dir():
                there = "is a file, not a run folder" if os.path.lexists(path) else "does not exist"
                raise ConfigError(
                    f"mgt report: {folder} {there}; give runs/RECIPE/NAME", code="MGT104"
                )
            files = event_files(path)
            if not files:
                raise ConfigError(_no_run(path), code="MGT104")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"mgt report: {folder!r:.200} cannot be read: {reason}") from None
        lines = self._lines(files)
        if not any(found.count for found in lines.values()):
            damaged = sum(found.damaged + found.torn for found in lines.values())
            raise ConfigError(
                f"mgt report: {path} has event files but no event in them; "
                + (
                    f"{damaged} lines are damaged: restore events/ from a copy"
                    if damaged
                    else "the run ended before it wrote anything: look at its console output"
                )
            )
        return _record(path, lines, self.most)

    def _lines(self, files: dict[int, Path]) -> dict[int, EventLines]:
        """The lines of each rank; what is logged of steps is the same on all, so of one alone."""
        first = next((rank for rank, file in files.items() if _has_events(file)), min(files))
        wanted = {(file, rank == first): rank for rank, file in files.items()}
        self._tails = {
            key: self._tails.get(key) or EventTail(*key) for key in wanted
        }  # without those of files that are gone
        return {rank: _lines(self._tails[key]) for key, rank in wanted.items()}


def _record(path: Path, lines: dict[int, EventLines], most: Most) -> RunRecord:
    cuts = {rank: Timeline(found) for rank, found in lines.items()}
    world = _world_of(lines, newest_start(cuts))
    problems: list[str] = []
    described = _read_facts(path, problems)
    run = RunRecord(
        path=path,
        config=described["config.yaml"],
        environment=described["environment.json"],
        forecast=described["forecast.json"],
        ranks=[rank for rank, found in lines.items() if found.count and rank < world],
        world_size=world,
    )
    _take_steps(run, lines, cuts, most.steps)
    _take_samples(run, lines, cuts, most.samples)
    for rank, found in lines.items():
        _take_rare(run, rank, found, cuts[rank])
        if rank in run.ranks:
            readings = thinned(found.frequent["device"], most.readings)
            run.devices[rank] = list(found.events(readings))
    _judge(run, lines, cuts)
    run.profiles = profiles_of(path, problems)
    run.memory = peaks_of(path, problems)
    run.problems += problems
    return run


def event_files(run: Path) -> dict[int, Path]:
    """The current event file of each rank, by rank. It may be missing where segments are there."""
    found = {}
    for path in (run / "events").glob("rank-*.jsonl"):
        name = path.name.split(".")[0]
        digits = name.removeprefix("rank-")
        if digits.isascii() and digits.isdigit() and len(digits) <= 7 and int(digits) < MOST_RANKS:
            found[int(digits)] = path.with_name(f"{name}.jsonl")
    return dict(sorted(found.items()))


def _has_events(file: Path) -> bool:
    return bool(segments(file)) or (os.path.lexists(file) and file.lstat().st_size > 0)


def _lines(tail: EventTail) -> EventLines:
    try:
        return tail.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"mgt report: {tail.path} cannot be read: {reason}") from None


def _take_steps(
    run: RunRecord, lines: dict[int, EventLines], cuts: dict[int, Timeline], most: int
) -> None:
    rank = run.ranks[0]
    valid = cuts[rank].valid(lines[rank].frequent["step"])
    by_step: dict[int, Event] = {}
    for event in lines[rank].events(thinned(valid, most)):
        if isinstance(event.get("step"), int):
            by_step[event["step"]] = event
    run.steps = [by_step[step] for step in sorted(by_step)]


def _take_samples(
    run: RunRecord, lines: dict[int, EventLines], cuts: dict[int, Timeline], most: int
) -> None:
    wanted: np.ndarray | None = None
    for rank in run.ranks:
        found, cut = lines[rank], cuts[rank]
        valid = cut.among(run.world_size, cut.valid(found.frequent["phases"]))
        if not len(valid):
            continue
        if wanted is None:  # the same steps of every rank
            wanted = np.array(thinned(np.unique(valid[:, 1]), most))
        rows = {}
        for event in found.events(valid[np.isin(valid[:, 1], wanted)]):
            if isinstance(event.get("step"), int):
                rows[event["step"]] = event
        # A step is compared only where all its phases are known.
        steps = sorted(s for s in rows if all(is_number(rows[s].get(name)) for name in TIMED))
        if not steps:
            continue
        values = [[_number(rows[step].get(name)) for name in COLUMNS] for step in steps]
        checks = sum(rows[step].get("source") == "check" for step in steps)
        run.samples[rank] = Samples(
            np.array(steps, dtype=np.int64),
            np.array(values, dtype=np.float64).reshape(len(steps), len(COLUMNS)),
            2 * checks > len(steps),
        )


def _take_rare(run: RunRecord, rank: int, found: EventLines, cut: Timeline) -> None:
    for number, (_, _, event) in enumerate(cut.starts):
        if event and number:
            run.notable.append({**event, "event": "restart" if event.get("attempt") else "resume"})
    for _, event in found.rare:
        kind = event["event"]
        if kind in ("rank", "work"):
            if rank in run.ranks:  # of ranks that are gone only what happened to them
                (run.facts if kind == "rank" else run.work)[rank] = event
        elif kind == "epoch":
            if rank == run.ranks[0]:
                run.epochs.append(event)
        else:
            run.notable.append(event)


def _judge(run: RunRecord, lines: dict[int, EventLines], cuts: dict[int, Timeline]) -> None:
    """State, times, and what is odd about the files."""
    latest = {event.get("epoch"): event for event in run.epochs}  # a replayed epoch counts once
    run.epochs = [latest[key] for key in sorted(latest, key=lambda key: (key is None, key))]
    run.notable = told_once(sorted(run.notable, key=time_of))
    begun = [event for cut in cuts.values() for _, _, event in cut.starts]
    read = [event for readings in run.devices.values() for event in readings]
    times = [time_of(event) for event in (*run.steps, *run.notable, *begun, *read)]
    first = [time_of(event) for _, _, event in cuts[run.ranks[0]].starts[:1] if event]
    run.began = next(filter(None, first), min((time for time in times if time), default=0.0))
    # Of one rank: others write their last line a moment later, and the summary does not wait.
    run.trained_s = cuts[run.ranks[0]].trained_s()
    run.ends = latest_ends(cuts)
    holder = owner(run.path)
    if holder is not None and not (run.ends and holder.get("pid") == os.getpid()):
        run.state = "running"
    elif run.ends:
        endings = {ending(end) for end in run.ends}
        run.state = next(end for end in ("failed", "stopped", "finished") if end in endings)
    elif run.facts:
        run.state = "ended without a word"
    run.problems = list(_problems(run, lines, cuts))


def ending(end: Event) -> str:
    """How a rank ended: failed, stopped (by a signal: somebody wanted it) or finished."""
    error = str(end.get("error") or "")
    if end.get("stopped") or error.startswith(("Stopped:", "KeyboardInterrupt")):  # of 0.1, too
        return "stopped"
    return "failed" if error else "finished"


def _problems(
    run: RunRecord, lines: dict[int, EventLines], cuts: dict[int, Timeline]
) -> Iterator[str]:
    sizes = {event.get("world_size") for cut in cuts.values() for _, _, event in cut.starts}
    others = sorted(size for size in sizes if isinstance(size, int) and size != run.world_size)
    if others:
        before = " and ".join(map(str, others))
        yield (
            f"ranks were {before} before, {run.world_size} at last: speed and verdict are of the "
            f"time with {run.world_size}"
        )
    missing = sorted(set(range(run.world_size)) - set(run.ranks))
    if missing:
        more = f" and {len(missing) - 20:,} more" if len(missing) > 20 else ""
        names = ", ".join(map(str, missing[:20])) + more
        files = "its file is" if len(missing) == 1 else "their files are"
        yield f"no events of rank {names}: {files} missing or empty"
    for rank, found in lines.items():
        if found.torn:
            yield f"rank {rank}: the last line is torn, it was left out"
        if found.damaged:
            count = found.damaged
            what = f"{count} damaged lines were" if count > 1 else "a damaged line was"
            yield f"rank {rank}: {what} left out"
    dropped = sum(found.dropped for found in lines.values())
    if dropped:
        yield f"this is a long run: {dropped:,} lines of its past are thinned out"


def _no_run(path: Path) -> str:
    inside = sorted(str(found.parent) for found in path.glob("**/events") if found.is_dir())
    hint = f"did you mean {', '.join(inside[:3])}?" if inside else "give runs/RECIPE/NAME"
    return f"mgt report: {path} is not a run folder: it has no events/rank-*.jsonl; {hint}"


def _world_of(lines: dict[int, EventLines], newest: Event) -> int:
    """How many ranks there were at last."""
    told = [newest, *(event for found in lines.values() for _, event in found.rare[-1:])]
    for found in lines.values():
        for kind in found.frequent.values():
            told += found.events(kind[-1:])
    sizes = [size for event in told if isinstance(size := event.get("world_size"), int)]
    # At least one of the files is of a rank that is there.
    least = min(rank for rank, found in lines.items() if found.count) + 1
    return max(sizes[0] if sizes else max(lines) + 1, least)


def _other_file(name: str, facts: dict[str, Any]) -> str | None:
    """What shows that this is another JSON file in the place of `name`; None if nothing does."""
    if name == "environment.json" and not isinstance(facts.get("host"), str):
        return f"{name} is not a description of the machine: it has no `host`"
    bare = all(key.isdecimal() for key in facts)  # forecasts once were the table by GPUs alone
    if name == "forecast.json" and not (isinstance(facts.get("gpus"), dict) or bare):
        return f"{name} is not a forecast: it has no `gpus`"
    return None


def _read_facts(path: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The files that describe a run, and what is wrong with them."""
    readers: dict[str, Callable[[Path], dict[str, Any]]] = {
        "environment.json": lambda file: read_json(file, dict[str, Any]),
        "config.yaml": read_yaml,
        "forecast.json": lambda file: read_json(file, dict[str, Any]),
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in readers}
    hashes: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            found[name] = read(path / name)
            problem = _other_file(name, found[name])
            if problem is not None:
                found[name] = {}
                problems.append(problem)
            elif name == "environment.json":
                if "sha256" in found[name] and found[name].pop("sha256") != digest(found[name]):
                    problems.append(f"{name} was changed after the run wrote it")
                else:
                    hashes = found[name].pop("files", {})
            elif name in hashes and _sha256(path / name) != hashes[name]:
                problems.append(f"{name} was changed after the run wrote it")
        except FileNotFoundError:
            if name != "forecast.json" or name in hashes:
                problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        except (ValueError, RecursionError) as error:
            problems.append(str(error) or f"{name} is nested too deeply")
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()


def _number(value: Any, default: float = float("nan")) -> float:
    return float(value) if is_number(value) else default


def read_runs(folders: Sequence[Path | str]) -> list[RunRecord]:
    return [read_run(folder) for folder in folders]
