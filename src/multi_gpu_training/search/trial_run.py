"""A trial as a run: an ordinary training in its own folder and process, read through its events.

The process dies with the search. Started again, it goes on from its newest checkpoint.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from multi_gpu_training.errors import MemoryShortError
from multi_gpu_training.measure.request import VARIABLE, MeasureRequest
from multi_gpu_training.measure.script_runner import MEMORY_IS_SHORT, complaint
from multi_gpu_training.safe_files import make_private, write_atomically
from multi_gpu_training.safe_output import brief
from multi_gpu_training.search.objectives import (
    RunReadings,
    SearchObjective,
    Validated,
    final_values,
    read_events,
)

MOST_RESTARTS = 5  # of a trial that somebody keeps killing, without a validation in between
READ_EVERY_S = 0.25
READING_SHARE = 0.05  # of the search's time, where event files are long
TO_SAVE_S = 45.0  # that a run has after SIGTERM; its own grace_s is 30
TO_DIE_S = 5.0  # a pruned trial has nothing to save: its GPUs are wanted
CONFIG_ERROR = 2
TAIL_BYTES = 2**16


class TrialEnding(StrEnum):
    """How a trial ended; the values are those of Optuna's states."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "fail"


@dataclass(frozen=True)
class TrialEnd:
    """The result of a trial, or why it has none. `fatal`: every other trial would end like it."""

    ending: TrialEnding
    values: tuple[float, ...] = ()
    reason: str = ""
    fatal: bool = False


class RunningTrial(Protocol):
    """What the search asks of a trial, whatever runs it."""

    def look(self) -> tuple[Sequence[Validated], TrialEnd | None]:
        """The validations so far, and the end where it has come."""
        ...

    def stop(self, save: bool) -> None:
        """End it; `save`: it will be continued later."""
        ...


@dataclass
class RunPlace:
    """Where one trial runs: its folder, command and variables. `settings` go to a script.
    begin_from: a checkpoint of another run, until it has its own."""

    folder: Path
    log: Path
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    begin_from: Path | None = None
    working_dir: Path | None = None

    def resume(self) -> str:
        own = any((self.folder / "checkpoints").glob("step-*"))
        return "auto" if own or self.begin_from is None else str(self.begin_from)


@dataclass
class TrialLimits:
    """Seconds that a trial may take in all, and without a sign of life."""

    trial_s: float | None = None
    silent_s: float = 1800.0


class TrialRun:
    """One trial in its own process."""

    def __init__(
        self,
        place: RunPlace,
        objectives: Sequence[SearchObjective],
        value: str = "last",
        limits: TrialLimits | None = None,
    ) -> None:
        self._place = place
        self._objectives = objectives
        self._value = value
        self._limits = limits or TrialLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = 0
        self._seen_at_restart = -1
        self._readings = read_events(place.folder, objectives)
        self._next_read = 0.0
        self._begun = self._alive_at = time.monotonic()
        self._sign: tuple[int, ...] = ()
        self._log_start = 0  # of this process, in the log of all that the trial had
        if not self._readings.finished:  # finished, and killed before anybody was told
            self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def look(self) -> tuple[Sequence[Validated], TrialEnd | None]:
        code = self._process.poll() if self._process is not None else 0
        self._read(now=code is not None)
        if code is None:
            return self._readings.history, self._too_long()
        return self._readings.history, self._after(code)

    def stop(self, save: bool) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TO_SAVE_S if save else TO_DIE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks die with it
            process.wait()

    def _start(self) -> None:
        place = self._place
        make_private(place.log.parent)
        variables = {**os.environ, "NO_COLOR": "1", **place.variables}
        if place.settings is not None:
            out = place.log.with_suffix("")
            given = {**place.settings, "resume": place.resume()}
            request = MeasureRequest("search_trial", str(out), 1, 1, settings=given)
            variables[VARIABLE] = request.save()
        self._log_start = max(0, _size(place.log))
        with place.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "multi_gpu_training.launch.rank_main", *self._words()],
                env=variables,
                cwd=place.working_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the search, which lets its trials save
            )

    def _words(self) -> list[str]:
        place = self._place
        resume = [] if place.settings is not None else ["--resume", place.resume()]
        return [f"--launcher={os.getpid()}", *place.command, *resume]

    def _read(self, now: bool) -> None:
        begun = time.monotonic()
        if begun < self._next_read and not now:
            return
        self._readings = read_events(self._place.folder, self._objectives)
        took = time.monotonic() - begun
        self._next_read = begun + max(READ_EVERY_S, took / READING_SHARE)
        # Not the size of the event files: a hung process still records its device there.
        readings = self._readings
        sign = (_size(self._place.log), readings.last_step, len(readings.history))
        if sign != self._sign:
            self._sign, self._alive_at = sign, time.monotonic()

    def _too_long(self) -> TrialEnd | None:
        now, limits = time.monotonic(), self._limits
        if limits.trial_s is not None and now - self._begun > limits.trial_s:
            reason = f"not done after {limits.trial_s:g} s (--trial-timeout)"
        elif now - self._alive_at > limits.silent_s:
            reason = f"no sign of life for {limits.silent_s:g} s (--hang-timeout)"
        else:
            return None
        self.stop(save=False)
        return TrialEnd(TrialEnding.FAILED, reason=reason)

    def _after(self, code: int) -> TrialEnd | None:
        """What the end of the process means; None where it was started again."""
        if code == 0:
            return self._finished()
        if code > 0 and code not in (130, 137, 143):  # not ended by a signal
            text = _tail(self._place.log, self._log_start)
            reason = complaint(text, code)[:500]
            if MEMORY_IS_SHORT.search(text):
                return TrialEnd(TrialEnding.PRUNED, reason=f"out of memory: {reason}")
            return TrialEnd(TrialEnding.FAILED, reason=reason, fatal=code == CONFIG_ERROR)
        count = len(self._readings.history)
        if count > self._seen_at_restart:
            self._seen_at_restart, self._restarts = count, 0
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            name = f"signal {-code}" if code < 0 else f"exit code {code}"
            return TrialEnd(
                TrialEnding.FAILED,
                reason=f"ended {self._restarts} times by {name} without a validation in between",
            )
        self._start()
        return None

    def _finished(self) -> TrialEnd:
        missing = self._readings.missing(self._objectives)
        if missing:
            return TrialEnd(
                TrialEnding.FAILED, reason=not_logged(missing, self._readings), fatal=True
            )
        if not self._readings.history:
            names = ", ".join(one.metric for one in self._objectives)
            reason = f"--metric {names}: the run never logs them all at the same step"
            return TrialEnd(TrialEnding.FAILED, reason=reason, fatal=True)
        values = final_values(self._readings, self._objectives, self._value)
        return TrialEnd(TrialEnding.COMPLETE, tuple(values))


def not_logged(missing: Sequence[str], readings: RunReadings) -> str:
    known = sorted({**readings.metrics, **readings.facts})
    names = ", ".join(known[:30]) if known else "nothing; does it validate?"
    return f"--metric {', '.join(missing)}: the run does not log it; it logs {names}"


def write_config(path: Path, text: str) -> None:
    """Write the config file of a trial where it is not there yet."""
    make_private(path.parent)
    write_atomically(path, text)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return -1


def _tail(log: Path, start: int) -> str:
    """The end of what was written since `start`."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, _size(log) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class FunctionTrial:
    """A trial that a Python function computes in this process.

    It returns its value, or one for each objective, or yields them, one validation at a time.
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Any]) -> None:
        self._history: list[Validated] = []
        self._found: Any = None
        self._end: TrialEnd | None = None
        try:
            self._found = function(dict(params))
        except Exception as error:
            self._end = raised(error)

    def look(self) -> tuple[Sequence[Validated], TrialEnd | None]:
        if self._end is not None:
            return self._history, self._end
        try:
            if isinstance(self._found, Iterator):
                self._history.append(Validated(len(self._history) + 1, _row(next(self._found))))
            else:
                self._end = TrialEnd(TrialEnding.COMPLETE, _row(self._found))
        except StopIteration:
            last = self._history[-1].values if self._history else ()
            self._end = TrialEnd(TrialEnding.COMPLETE, last)
        except Exception as error:
            self._end = raised(error)
        return self._history, self._end

    def stop(self, save: bool) -> None:
        self._found = None


def raised(error: Exception) -> TrialEnd:
    """The end of a trial whose function raised: out of memory is pruned, as for runs."""
    text = f"{type(error).__name__}: {error}"[:500]
    if isinstance(error, MemoryShortError) or MEMORY_IS_SHORT.search(text):
        return TrialEnd(TrialEnding.PRUNED, reason=f"out of memory: {error}"[:500])
    return TrialEnd(TrialEnding.FAILED, reason=text)


def _row(found: Any) -> tuple[float, ...]:
    values = found if isinstance(found, list | tuple) else [found]
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise TypeError(
            f"the function gave {brief(found)}; return or yield a number, or one for each metric"
        ) from None
