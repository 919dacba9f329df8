"""Ranks that watch each other for hangs, where no launcher of ours does: under stock `torchrun`.

A thread of each rank puts where that rank is into the store, once a second, and reads the others'.
The first rank that still answers says who holds the others up, and exits: the launcher does the
rest. It cannot ask for a stack: what is shown is what each rank saw of itself a second ago.
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
from multi_gpu_training.distributed.stacks import Stack
from multi_gpu_training.distributed.whereabouts import Phase, Whereabouts

SILENT_S = 3.0


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
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="peers", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                self._store.set(self._keys[self._rank], self.message())
                if not self._store.check(self._keys):
                    continue
                messages = [bytes(raw) for raw in self._store.multi_get(self._keys)]
            except RuntimeError:  # the store is gone, with the launcher
                return
            hang = self.look(messages, time.monotonic())
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
        ranks: dict[int, Whereabouts] = {}
        for rank, raw in enumerate(messages):
            beat, step, begun, phase, count, hang_s, frames = json.loads(raw)
            if self._heard.get(rank, (0, 0.0))[0] != beat:
                self._heard[rank] = beat, now
            stack = Stack(tuple((file, line, name) for file, line, name in frames))
            self._stacks[rank] = stack
            ranks[rank] = Whereabouts(
                step, begun, phase=Phase(phase), count=count, hang_s=hang_s, line=stack.line
            )
        awake = {rank for rank, (_, when) in self._heard.items() if now - when < SILENT_S}
        stall = self._progress.look(ranks, now, ranks.keys() - awake)
        if stall is None or self._rank != min(awake, default=-1):
            return None
        return diagnose(stall, ranks, {rank: self._stacks[rank] for rank in awake}, {})
