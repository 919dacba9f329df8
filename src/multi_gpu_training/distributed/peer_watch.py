"""Ranks that watch each other for hangs, where no launcher of ours does: under stock `torchrun`.

A thread of each rank puts where that rank is into the store, once a second, and reads the others'.
The first rank that still answers says who holds the others up, and exits: the launcher does the
rest. It cannot ask for a stack: what is shown is what each rank saw of itself a second ago.

The store may lie in rank 0 and stop with it. Then nobody is heard any more: a rank that stands
still itself says so.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from multi_gpu_training.distributed import whereabouts
from multi_gpu_training.distributed.hangs import Hang, ProgressWatch, diagnose
from multi_gpu_training.distributed.heartbeat import EVERY_S, sample
from multi_gpu_training.distributed.listening import join
from multi_gpu_training.distributed.stacks import Stack
from multi_gpu_training.distributed.whereabouts import Phase, Whereabouts

SILENT_S = 3.0
SOON_S = 0.1  # until all ranks have begun to talk


class PeerWatch:
    """`store` is this thread's own connection, shared in name with all ranks."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self._rank = rank
        self._keys = [f"beat{rank}" for rank in range(world)]
        self._store = store
        self._beat = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._stacks: dict[int, Stack] = {}
        self._progress = ProgressWatch()
        # What the store said last, and when. At first: nothing is known of the others.
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
            pause_s = EVERY_S if everybody else SOON_S
            if everybody:
                self._answer = [bytes(raw) for raw in messages], time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(EVERY_S):
            (messages, when), now = self._answer, time.monotonic()
            deaf = now - when > SILENT_S
            hang = self.look_alone(messages, now) if deaf else self.look(messages, now)
            if hang is not None and not self._closed.is_set():
                print(hang.report, file=sys.stderr, flush=True)
                os._exit(1)

    def message(self) -> bytes:
        """What this rank tells the others."""
        self._beat += 1
        here = whereabouts.here()
        place = [here.step, here.begun, int(here.phase), here.count, here.hang_s]
        return json.dumps([self._beat, *place, sample()]).encode()

    def look(self, messages: list[bytes], now: float) -> Hang | None:
        """A hang, on the one rank that is to report it."""
        ranks = self._read(messages, now)
        awake = {rank for rank, (_, when) in self._heard.items() if now - when < SILENT_S}
        stall = self._progress.look(ranks, now, ranks.keys() - awake)
        if stall is None or self._rank != min(awake, default=-1):
            return None
        return diagnose(stall, ranks, {rank: self._stacks[rank] for rank in awake}, {})

    def look_alone(self, messages: list[bytes], now: float) -> Hang | None:
        """The same where the store does not answer: `messages` are its last. Rank 0 is to blame,
        if this rank does not move either; the next one reports if the first does not."""
        ranks = self._read([*messages[: self._rank], self.message(), *messages[self._rank + 1 :]])
        stall = self._progress.look({self._rank: ranks[self._rank]}, now)
        if stall is None or stall.for_s < stall.limit_s + (self._rank - 1) * SILENT_S:
            return None
        return diagnose(stall, ranks, {r: s for r, s in self._stacks.items() if r > 0}, {})

    def _read(self, messages: list[bytes], now: float | None = None) -> dict[int, Whereabouts]:
        """now: when they were heard."""
        ranks: dict[int, Whereabouts] = {}
        for rank, raw in enumerate(messages):
            beat, step, begun, phase, count, hang_s, frames = json.loads(raw)
            if now is not None and self._heard.get(rank, (0, 0.0))[0] != beat:
                self._heard[rank] = beat, now
            stack = Stack(tuple((file, line, name) for file, line, name in frames))
            self._stacks[rank] = stack
            ranks[rank] = Whereabouts(
                step, begun, phase=Phase(phase), count=count, hang_s=hang_s, line=stack.line
            )
        return ranks
