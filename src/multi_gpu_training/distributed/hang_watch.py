"""The launcher's eye on ranks that stand still: it reports, and kills the one that is to blame.

What follows is as after any other death of a rank: the policy for restarts decides.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from multi_gpu_training.distributed.hangs import (
    Hang,
    ProgressWatch,
    diagnose,
    process_state,
    whereabouts_of,
)
from multi_gpu_training.distributed.restarts import Fault
from multi_gpu_training.distributed.stacks import collect
from multi_gpu_training.errors import RankFailure

EVERY_S = 0.25


class HangWatch:
    """Of one attempt. `ranks` are the numbers of the local ranks in the whole run."""

    def __init__(self, pids: Mapping[int, int], files: Mapping[int, str], ranks: list[int]) -> None:
        self._pids = {ranks[local]: pid for local, pid in pids.items()}
        self._files = {ranks[local]: file for local, file in files.items()}
        self._progress = ProgressWatch()
        self._next = 0.0
        self._found: Hang | None = None

    def look(self, all_here: bool) -> None:
        """Call it often. all_here: the run has no ranks on other machines."""
        now = time.monotonic()
        if now < self._next or self._found is not None:
            return
        self._next = now + EVERY_S
        states = {rank: process_state(pid) for rank, pid in self._pids.items()}
        stopped = {rank for rank, state in states.items() if state in ("T", "t")}
        stall = self._progress.look(whereabouts_of(self._files), now, stopped)
        if stall is None:
            return
        answering = {rank: pid for rank, pid in self._pids.items() if rank not in stopped}
        stacks = collect(answering, self._files)
        hang = diagnose(stall, whereabouts_of(self._files), stacks, states, all_here)
        if not hang.ours and stall.for_s < 2 * stall.limit_s:
            return  # the launcher beside the rank that is to blame is about to act
        self._found = hang
        print(hang.report, file=sys.stderr, flush=True)
        with suppress(ProcessLookupError):
            os.kill(self._pids[hang.rank], signal.SIGKILL)

    def verdict(self) -> tuple[Fault, RankFailure] | None:
        """What ended the attempt, where it was a hang."""
        if self._found is None:
            return None
        fault = self._found.fault
        text = f"rank {fault.rank} on {socket.gethostname()}, {fault.place}: {fault.kind}"
        return fault, RankFailure(f"[rank{fault.rank}]: {text}")
