"""A step that takes far longer than usual: which rank holds the others up, and where it stands.

The launcher reads what each rank notes about itself. How long is too long follows the time that
steps take here, unless the config says it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.distributed import whereabouts
from multi_gpu_training.distributed.restarts import Fault
from multi_gpu_training.distributed.stacks import Stack
from multi_gpu_training.distributed.whereabouts import Phase, Whereabouts

SHORTEST_S = 120.0
LONGEST_S = 1440.0  # below the 30 minutes after which an exchange between ranks is given up
TIMES_THE_STEP = 20
# Of phases that take long in healthy runs too, and of a first step, which may compile.
TIMES_LONGER = 10
FIRST_STEPS = 3
LONGEST_ABSENCE_S = 10.0
_STEADY = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.HOOK, Phase.INPUT})


# Without a limit of the user's own: nobody knows what is usual there.
_UNKNOWN = frozenset({Phase.SET_UP, Phase.OWN_CODE, Phase.ENDING})


def limit_s(configured: float, step_s: float | None, phase: Phase, settled: bool = True) -> float:
    """Seconds without any progress that are a hang. configured=0: as the step time says.
    settled: the first steps are done."""
    times = 1 if settled and phase in _STEADY else TIMES_LONGER
    if configured:
        return times * configured
    if phase in _UNKNOWN:
        return math.inf
    return min(LONGEST_S, times * max(SHORTEST_S, TIMES_THE_STEP * (step_s or 0.0)))


@dataclass(frozen=True)
class Stall:
    """Rank `rank` has not moved for `for_s` seconds, which is over the limit."""

    rank: int
    for_s: float
    limit_s: float


class ProgressWatch:
    """Fed with the whereabouts of all ranks again and again, finds the one that stands still."""

    def __init__(self) -> None:
        self._moved: dict[int, float] = {}
        self._last: dict[int, tuple[object, ...]] = {}
        self._first: dict[int, int | None] = {}
        self._step: tuple[int, float] | None = None
        self._step_s: deque[float] = deque(maxlen=51)
        self._looked: float | None = None

    @property
    def step_s(self) -> float | None:
        """What a step takes, in the median."""
        return statistics.median(self._step_s) if self._step_s else None

    def look(
        self, ranks: Mapping[int, Whereabouts], now: float, stopped: Collection[int] = ()
    ) -> Stall | None:
        """Call it about every second, with a clock in seconds that never goes back. `stopped`
        ranks do nothing that could take its time."""
        absent = now - (now if self._looked is None else self._looked)
        self._looked = now
        if absent > LONGEST_ABSENCE_S:  # we were stopped ourselves, and the ranks with us
            self._moved = {rank: then + absent for rank, then in self._moved.items()}
        for rank, found in ranks.items():
            place = (found.step, found.begun, found.phase, found.count)
            if self._last.get(rank) != place:
                self._last[rank], self._moved[rank] = place, now
            if found.begun and rank not in self._first:
                self._first[rank] = found.step
        self._time_steps(ranks, now)
        stalls = [self._stall(rank, found, now, rank in stopped) for rank, found in ranks.items()]
        over = [stall for stall in stalls if stall is not None]
        # Others wait for the one that is behind them.
        return min(over, key=lambda stall: position(ranks[stall.rank]), default=None)

    def _stall(self, rank: int, found: Whereabouts, now: float, stopped: bool) -> Stall | None:
        if found.hang_s is None:
            return None
        first = self._first.get(rank)
        settled = first is not None and (found.step or 0) >= first + FIRST_STEPS
        phase = Phase.FORWARD if stopped else found.phase
        limit = limit_s(found.hang_s, self.step_s, phase, settled or stopped)
        for_s = now - self._moved[rank]
        return Stall(rank, for_s, limit) if for_s > limit else None

    def _time_steps(self, ranks: Mapping[int, Whereabouts], now: float) -> None:
        begun = [found.step for found in ranks.values() if found.begun and found.step is not None]
        if not begun:
            return
        step = min(begun)
        if self._step is None or step < self._step[0]:
            self._step = step, now
        elif step > self._step[0]:
            before, then = self._step
            self._step_s.append((now - then) / (step - before))
            self._step = step, now


def position(found: Whereabouts) -> tuple[int, int, int]:
    """How far a rank has come; comparable between ranks."""
    return (-1 if found.step is None else found.step), found.count, int(found.phase)


@dataclass(frozen=True)
class Hang:
    """What to say of a stall, and to judge it by."""

    rank: int
    fault: Fault
    report: str
    ours: bool = True  # the rank that is to blame is on this machine


def diagnose(
    stall: Stall,
    ranks: Mapping[int, Whereabouts],
    stacks: Mapping[int, Stack],
    states: Mapping[int, str],
    all_here: bool = True,
) -> Hang:
    """Name the rank that holds the others up. One that is stopped or does not answer is it; else
    one that does not wait for the others; else the one that is behind."""
    stopped = [rank for rank in ranks if states.get(rank) in ("T", "t")]
    silent = [rank for rank in ranks if rank not in stacks]
    busy = [rank for rank in ranks if rank in stacks and not stacks[rank].waits]
    suspects = stopped or silent or busy or list(ranks)
    rank = min(suspects, key=lambda r: (position(ranks[r]), r != stall.rank, r))
    found = ranks[rank]
    line = stacks[rank].line if rank in stacks else found.line
    how = ""
    if rank in stopped:
        how = "; the process is stopped (SIGSTOP or a debugger)"
    elif rank not in stacks:
        how = "; it does not answer"
    place = "before its first step" if found.step is None else f"step {found.step}"
    verdict = f"rank {rank} holds the others up"
    ours = all_here or bool(stopped or silent or busy)
    if not ours:
        verdict = "every rank here waits: a rank on another machine holds them up"
    rows = [
        f"hang: no progress for {stall.for_s:.1f} s (limit {stall.limit_s:.1f} s); {verdict}",
        f"  rank {rank}: {place}, {found.phase.words}, at {line or 'an unknown line'}{how}",
    ]
    rows += [f"      {file}:{number} in {name}" for file, number, name in _deep(stacks.get(rank))]
    for other in sorted(ranks.keys() - {rank}):
        where = stacks[other].line if other in stacks else ranks[other].line
        waits = ", waits for the others" if other in stacks and stacks[other].waits else ""
        seen = "" if other in stacks else " (last seen)"
        rows.append(
            f"  rank {other}: step {ranks[other].step}, {ranks[other].phase.words}{waits}, "
            f"at {where or 'an unknown line'}{seen}"
        )
    kind = f"a hang in {found.phase.words} at {line}"
    return Hang(rank, Fault(rank, kind, found.step, found.begun), "\n".join(rows), ours)


def _deep(stack: Stack | None) -> tuple[tuple[str, int, str], ...]:
    return () if stack is None else stack.frames[:8]


def process_state(pid: int) -> str:
    """The kernel's letter for it: T is stopped, D is stuck in the kernel."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(") ")[2][:1]


def whereabouts_of(error_files: Mapping[int, str]) -> dict[int, Whereabouts]:
    return {rank: whereabouts.of_rank(file) for rank, file in error_files.items()}
