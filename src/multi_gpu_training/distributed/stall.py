"""Stalls: a step that takes far longer than usual, which rank causes it, and where it stands.

How long is too long follows from the time that steps take here, unless the config sets it. The
launcher reads the progress of its ranks. Where no launcher of ours watches, under stock
`torchrun`, ranks watch each other (PeerWatch).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from multi_gpu_training.distributed import progress_slot
from multi_gpu_training.distributed.progress_slot import Phase, RankProgress
from multi_gpu_training.distributed.signal_thread import join
from multi_gpu_training.distributed.stacks import SAMPLE_EVERY_S, Stack, sample

SHORTEST_S = 120.0
LONGEST_S = 1440.0  # an exchange between ranks is given up after 30 minutes
TIMES_THE_STEP = 20  # the usual time of a step here, before it counts as a stall
# For phases that take long in healthy runs too, and for a first step, which may compile.
TIMES_LONGER = 10
FIRST_STEPS = 3
LONGEST_ABSENCE_S = 10.0
SILENT_S = 3.0  # a rank tells the others every second
SOON_S = 0.1  # between messages, until all ranks have sent one
_STEADY = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CALLBACK, Phase.INPUT})
# Nobody knows how long these usually take: they have a limit only if the user sets one.
_UNKNOWN = frozenset({Phase.SET_UP, Phase.BETWEEN_STEPS, Phase.ENDING})


def limit_s(configured: float, step_s: float | None, phase: Phase, settled: bool = True) -> float:
    """Seconds without any progress that count as a stall.

    configured=0: the limit follows the step time. settled: the first steps are done.
    """
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
    """Finds the rank that stands still, from the progress of all ranks, looked at repeatedly."""

    def __init__(self) -> None:
        self._moved: dict[int, float] = {}
        self._last: dict[int, tuple[object, ...]] = {}
        self._first: dict[int, int | None] = {}
        self._step: tuple[int, float] | None = None
        self._step_s: deque[float] = deque(maxlen=51)
        self._looked: float | None = None

    @property
    def step_s(self) -> float | None:
        """The median time of a step."""
        return statistics.median(self._step_s) if self._step_s else None

    def look(
        self, ranks: Mapping[int, RankProgress], now: float, stopped: Collection[int] = ()
    ) -> Stall | None:
        """Call it about once per second, with a monotonic clock. `stopped` ranks are suspended, so
        the long limits of their phase do not apply."""
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
        # The others wait for the one that is furthest behind.
        return min(over, key=lambda stall: position(ranks[stall.rank]), default=None)

    def _stall(self, rank: int, found: RankProgress, now: float, stopped: bool) -> Stall | None:
        if found.hang_s is None:
            return None
        first = self._first.get(rank)
        settled = first is not None and (found.step or 0) >= first + FIRST_STEPS
        phase = Phase.FORWARD if stopped else found.phase
        limit = limit_s(found.hang_s, self.step_s, phase, settled or stopped)
        for_s = now - self._moved[rank]
        return Stall(rank, for_s, limit) if for_s > limit else None

    def _time_steps(self, ranks: Mapping[int, RankProgress], now: float) -> None:
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


def position(found: RankProgress) -> tuple[int, int, int]:
    """How far a rank has come; comparable between ranks."""
    return (-1 if found.step is None else found.step), found.count, int(found.phase)


@dataclass(frozen=True)
class Hang:
    """A diagnosed stall: the rank to blame, where it stands, and a report for people.

    `kind` is the same for the same cause, as for other faults of a rank.
    """

    rank: int
    kind: str
    step: int | None
    begun: bool
    report: str
    ours: bool = True  # the rank to blame is on this machine


def diagnose(
    stall: Stall,
    ranks: Mapping[int, RankProgress],
    stacks: Mapping[int, Stack],
    states: Mapping[int, str],
    all_here: bool = True,
) -> Hang:
    """Name the rank that holds the others up.

    It is one that is stopped or does not answer; else one that does not wait for the others; else
    the one that is furthest behind.
    """
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
    frames = stacks[rank].frames[:8] if rank in stacks else ()
    rows += [f"      {file}:{number} in {name}" for file, number, name in frames]
    for other in sorted(ranks.keys() - {rank}):
        where = stacks[other].line if other in stacks else ranks[other].line
        waits = ", waits for the others" if other in stacks and stacks[other].waits else ""
        seen = "" if other in stacks else " (last seen)"
        rows.append(
            f"  rank {other}: step {ranks[other].step}, {ranks[other].phase.words}{waits}, "
            f"at {where or 'an unknown line'}{seen}"
        )
    kind = f"a hang in {found.phase.words} at {line}"
    return Hang(rank, kind, found.step, found.begun, "\n".join(rows), ours)


class PeerWatch:
    """Ranks that watch each other through the store they met at.

    A thread of each rank publishes its progress once per second and reads the others'. The lowest
    rank that still answers reports who holds the others up, and exits; its launcher does the rest.
    It cannot ask others for a stack: it shows what each rank saw of itself a second ago.

    The store may be in rank 0 and stop with it. Then nobody is heard any more, and a rank that
    stands still itself reports that. `store` must be a connection that nobody else uses.
    """

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self._rank = rank
        self._keys = [f"beat{rank}" for rank in range(world)]
        self._store = store
        self._beat = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._stacks: dict[int, Stack] = {}
        self._progress = ProgressWatch()
        # The store's last answer and its time. At first nothing is known of the others.
        nothing = json.dumps([0, None, False, int(Phase.SET_UP), 0, None, []]).encode()
        self._answer = [nothing] * world, time.monotonic()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"peers-{work.__name__}", daemon=True)
            for work in (self._talk, self._watch)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            join(thread)

    def _talk(self) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            try:
                self._store.set(self._keys[self._rank], self.message())
                everybody = self._store.check(self._keys)
                messages = self._store.multi_get(self._keys) if everybody else []
            except RuntimeError:  # the store is gone, with the launcher
                self._closed.set()
                return
            pause_s = SAMPLE_EVERY_S if everybody else SOON_S
            if everybody:
                self._answer = [bytes(raw) for raw in messages], time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(SAMPLE_EVERY_S):
            (messages, when), now = self._answer, time.monotonic()
            deaf = now - when > SILENT_S
            hang = self.look_alone(messages, now) if deaf else self.look(messages, now)
            if hang is not None and not self._closed.is_set():
                print(hang.report, file=sys.stderr, flush=True)
                os._exit(1)

    def message(self) -> bytes:
        """What this rank tells the others."""
        self._beat += 1
        here = progress_slot.here()
        place = [here.step, here.begun, int(here.phase), here.count, here.hang_s]
        return json.dumps([self._beat, *place, sample()]).encode()

    def look(self, messages: list[bytes], now: float) -> Hang | None:
        """A stall, on the one rank that must report it."""
        ranks = self._read(messages, now)
        awake = {rank for rank, (_, when) in self._heard.items() if now - when < SILENT_S}
        stall = self._progress.look(ranks, now, ranks.keys() - awake)
        if stall is None or self._rank != min(awake, default=-1):
            return None
        return diagnose(stall, ranks, {rank: self._stacks[rank] for rank in awake}, {})

    def look_alone(self, messages: list[bytes], now: float) -> Hang | None:
        """The same where the store does not answer; `messages` are its last.

        Rank 0 is to blame if this rank does not move either. Rank 1 reports first, and the next
        one if it does not.
        """
        ranks = self._read([*messages[: self._rank], self.message(), *messages[self._rank + 1 :]])
        stall = self._progress.look({self._rank: ranks[self._rank]}, now)
        if stall is None or stall.for_s < stall.limit_s + (self._rank - 1) * SILENT_S:
            return None
        return diagnose(stall, ranks, {r: s for r, s in self._stacks.items() if r > 0}, {})

    def _read(self, messages: list[bytes], now: float | None = None) -> dict[int, RankProgress]:
        """Decode messages; `now` is when they were heard."""
        ranks: dict[int, RankProgress] = {}
        for rank, raw in enumerate(messages):
            beat, step, begun, phase, count, hang_s, frames = json.loads(raw)
            if now is not None and self._heard.get(rank, (0, 0.0))[0] != beat:
                self._heard[rank] = beat, now
            stack = Stack(tuple((file, line, name) for file, line, name in frames))
            self._stacks[rank] = stack
            ranks[rank] = RankProgress(
                step, begun, phase=Phase(phase), count=count, hang_s=hang_s, line=stack.line
            )
        return ranks
