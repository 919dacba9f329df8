"""The search itself: one process asks, starts trials, reads their values, decides and tells."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multi_gpu_training.launch.signals import AskedToEnd, LauncherSignals
from multi_gpu_training.search.objectives import SearchObjective
from multi_gpu_training.search.study import SearchError, Study, TrialRecord, storage_problem
from multi_gpu_training.search.trial_run import RunningTrial, TrialEnd, TrialEnding

LOOK_EVERY_S = 0.2
FAILURES_AT_FIRST = 3  # if so many trials fail before any works, the others would too


@dataclass
class ActiveTrial:
    """A trial that runs in slot `slot`. `reported` validations are in the storage; `seen` ones
    were read here, the last of them at step `step` of the training."""

    record: TrialRecord
    slot: int
    running: RunningTrial
    reported: int = 0
    seen: int = 0
    step: int = -1
    latest: tuple[float, ...] = ()


Start = Callable[[TrialRecord, int], RunningTrial]
Shown = Callable[[Sequence[ActiveTrial], TrialRecord | None], None]


@dataclass
class Searcher:
    """Runs `trials` trials of `study`, as many at a time as there are `slots`.

    start: begins a trial in a slot, or continues it.
    run_of: the folder of a trial's run, by its number.
    infeasible: why a trial cannot run, asked before it starts; None if it can.
    shown: called with the running trials, and with one that has just ended.
    """

    study: Study
    trials: int
    start: Start
    slots: int = 1
    run_of: Callable[[int], str] | None = None
    infeasible: Callable[[Mapping[str, Any]], str | None] = lambda params: None
    shown: Shown = lambda active, ended: None
    pruning: bool = True
    pause_s: float = LOOK_EVERY_S

    def __post_init__(self) -> None:
        self._active: dict[int, ActiveTrial] = {}
        self._waiting: list[TrialRecord] = []
        self._made = 0
        self._worked = False
        self._failed: list[TrialEnd] = []

    def run(self, signals: LauncherSignals) -> None:
        """Return when every trial has ended. AskedToEnd stops the running ones, which save."""
        try:
            self._reattach()
            while True:
                signals.check()
                self._fill()
                if not self._active:
                    return
                moved = [self._look(active) for active in list(self._active.values())]
                self.shown(list(self._active.values()), None)
                if not any(moved):
                    signals.pause(self.pause_s)
        except BaseException as error:
            save = isinstance(error, AskedToEnd | KeyboardInterrupt)
            save = save or storage_problem(error) is not None
            for active in self._active.values():
                active.running.stop(save=save)
            raise

    def _reattach(self) -> None:
        """Find what an earlier search left: trials to finish, and trials to continue."""
        known = self.study.records()
        self._made = len(known)
        self._worked = any(one.state == TrialEnding.COMPLETE for one in known)
        for record in known:
            if record.finished:
                continue
            end = self.study.noted_ending(record.number)
            if end is not None:  # decided, and killed before it was told
                self.study.tell(record.number, end)
                continue
            self._waiting.append(self.study.reattach(record.number, self.run_of))

    def _fill(self) -> None:
        """Start trials in the free slots: those that were running before come first."""
        taken = {active.slot for active in self._active.values()}
        for slot in (slot for slot in range(self.slots) if slot not in taken):
            record = self._next()
            if record is None:
                return
            running = self.start(record, slot)
            active = ActiveTrial(record, slot, running, reported=len(record.reported))
            self._active[record.number] = active

    def _next(self) -> TrialRecord | None:
        while self._waiting or self._made < self.trials:
            if self._waiting:
                record = self._waiting.pop(0)
            elif not self.study.ready():
                return None
            else:
                self._made += 1
                record = self.study.ask(self.run_of)
            reason = self.infeasible(record.params)
            if reason is None:
                return record
            self._tell(record, TrialEnd(TrialEnding.PRUNED, reason=reason))
        return None

    def _look(self, active: ActiveTrial) -> bool:
        """Read a trial once; True where something has changed."""
        history, end = active.running.look()
        moved = False
        for found in history:
            if found.step <= active.step:
                continue
            moved, active.step, active.latest = True, found.step, found.values
            active.seen += 1
            # Optuna takes reports of one objective only. Of a trial that is continued, the last
            # value that the storage has is judged again: the search may have died in between.
            if len(found.values) > 1 or active.seen < active.reported:
                continue
            active.reported = active.seen
            value = found.values[0]
            if self.study.report(active.record.number, active.reported, value) and self.pruning:
                reason = f"pruned after validation {active.reported} at {value:.6g}"
                self._end(active, TrialEnd(TrialEnding.PRUNED, reason=reason))
                return True
        if end is not None:
            self._end(active, end)
        return moved or end is not None

    def _end(self, active: ActiveTrial, end: TrialEnd) -> None:
        number = active.record.number
        if end.reason:  # before the processes end, so that a kill between finds the decision
            self.study.note_ending(number, end.ending, end.reason)
        active.running.stop(save=False)
        del self._active[number]
        if end.ending is TrialEnding.COMPLETE:
            end = checked(end, self.study.objectives)
        self._tell(active.record, end)
        self._judge(end)

    def _tell(self, record: TrialRecord, end: TrialEnd) -> None:
        self.study.tell(record.number, end)
        self.shown(list(self._active.values()), self.study.record(record.number))

    def _judge(self, end: TrialEnd) -> None:
        """Give up where every trial would fail like the first ones."""
        self._worked = self._worked or end.ending is not TrialEnding.FAILED
        if self._worked or end.ending is not TrialEnding.FAILED:
            return
        self._failed.append(end)
        if end.fatal or len(self._failed) >= min(FAILURES_AT_FIRST, self.trials):
            count = len(self._failed)
            what = "the first trial failed" if count == 1 else f"the first {count} trials failed"
            error = SearchError(f"{what}, so the search ends: {end.reason}")
            error.exit_code = 2 if end.fatal else 1
            raise error


def checked(end: TrialEnd, objectives: Sequence[SearchObjective]) -> TrialEnd:
    """A result that Optuna can take; NaN is a failure with its reason, and so is a loss of minus
    infinity, which would be the best of all."""
    names = [one.metric for one in objectives]
    if len(end.values) != len(names):
        reason = f"it gave {len(end.values)} values for {len(names)} metrics ({', '.join(names)})"
        return TrialEnd(TrialEnding.FAILED, reason=reason, fatal=True)
    wrong = [name for name, value in zip(names, end.values, strict=True) if math.isnan(value)]
    if wrong:
        return TrialEnd(TrialEnding.FAILED, reason=f"{', '.join(wrong)} is NaN at the end")
    for one, value in zip(objectives, end.values, strict=True):
        if math.isinf(value) and one.better(value, 0.0):
            return TrialEnd(TrialEnding.FAILED, reason=f"{one.metric} is {value:g} at the end")
    return end


def elapsed(record: TrialRecord) -> float:
    """Seconds from the start of a trial to its end, or until now."""
    return (record.ended or time.time()) - record.began
