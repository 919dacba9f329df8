"""Whether a failed run is restarted, and when: limits, back-off, and faults that repeat.

Pure decisions, without processes or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SAME_FAULT_STOPS = 3  # in a row: a restart does not mend what comes back at the same step
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Fault:
    """What ended an attempt: the rank that failed first, where, and of what.

    `kind` is the same for the same cause: an error with its message, a signal, an exit code.
    `step` is the one that was being computed; None where it is not known. `begun`: whether the
    attempt had reached its first step. `hopeless`: no restart can help. `contact`: the rank lost
    the others, which may be another rank's fault.
    """

    rank: int
    kind: str
    step: int | None = None
    begun: bool = False
    hopeless: bool = False
    contact: bool = False

    @property
    def cause(self) -> tuple[int | None, str]:
        """Equal for faults with the same cause. Any rank may meet it first."""
        # Process ids, ports and addresses differ from attempt to attempt.
        return self.step, "".join("#" if c.isdigit() else c for c in self.kind)

    @property
    def place(self) -> str:
        return "before its first step" if self.step is None else f"at step {self.step}"


@dataclass(frozen=True)
class Limits:
    """How many restarts a run may have within `window_s` seconds."""

    restarts: int
    window_s: float


@dataclass(frozen=True)
class RestartVerdict:
    """What to do after a fault: restart after `pause_s`, or stop. `reason` says which and why."""

    restart: bool
    reason: str
    pause_s: float = 0.0


class RestartPolicy:
    """Judges one fault after another of one launch."""

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits  # None: unknown until a rank reports what its config allows
        self._faults: list[Fault] = []
        self._restarted_at: list[float] = []

    def judge(self, fault: Fault, now: float) -> RestartVerdict:
        """Decide what follows a fault; `now` is any monotonic clock in seconds."""
        self._faults.append(fault)
        if fault.hopeless:
            return RestartVerdict(False, "")
        if self.limits is None or self.limits.restarts == 0:
            return RestartVerdict(False, "")
        window, allowed = self.limits.window_s, self.limits.restarts
        recent = [then for then in self._restarted_at if now - then < window]
        # First, because its diagnosis says more than that the restarts are used up.
        if self._came_back(fault):
            return RestartVerdict(False, self._diagnosis(fault))
        if len(recent) >= allowed:
            return RestartVerdict(
                False,
                f"stopped: {_times(len(recent) + 1, 'failure')} within restart_window_s={window:g}"
                f", and max_restarts={allowed} is used up. The last was rank {fault.rank}, "
                f"{fault.place}, with {fault.kind}",
            )
        self._restarted_at = [*recent, now]
        pause = back_off(len(recent))
        when = f" in {pause:g} s" if pause else ""
        return RestartVerdict(
            True,
            f"restarting every rank{when} from the newest checkpoint "
            f"({len(recent) + 1} of {allowed} within {window:g} s)",
            pause,
        )

    def _came_back(self, fault: Fault) -> bool:
        last = self._faults[-SAME_FAULT_STOPS:]
        return len(last) == SAME_FAULT_STOPS and all(f.cause == fault.cause for f in last)

    def _diagnosis(self, fault: Fault) -> str:
        ranks = sorted({f.rank for f in self._faults[-SAME_FAULT_STOPS:]})
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"
        return (
            f"stopped: {who} failed three times {fault.place} with {fault.kind}. Restarting will "
            "not fix a failure that repeats at the same step: look at its code and data"
        )


class NodeLosses:
    """Whether a lost node is nobody's fault: as long as the run gets further from loss to loss.

    Where a scheduler replaces nodes for ever, a training that brings its nodes down would never
    end.
    """

    def __init__(self) -> None:
        self._furthest: int | None = None

    def excused(self, step: int | None) -> bool:
        """Whether this loss is not counted as a failure. A step that is not known excuses it."""
        if step is None:
            return True
        further = self._furthest is None or step > self._furthest
        self._furthest = step if self._furthest is None else max(step, self._furthest)
        return further


def back_off(restarts: int) -> float:
    """Seconds to wait before the next restart, after so many recent ones: 0, 1, 2, 4 ..."""
    return 0.0 if restarts == 0 else min(LONGEST_PAUSE_S, float(2 ** min(restarts - 1, 16)))


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
