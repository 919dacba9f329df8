"""Turn inputs that wait into batches for a model.

A model computes thirty-two inputs in little more time than one, so the thread here takes
whatever is waiting, up to `max_batch`. It waits for company only briefly: `max_delay_s` after the
first input, or not at all if the batch is full.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

Predict = Callable[[list[Any]], Sequence[Any]]


class QueueFull(Exception):
    """Too many inputs are waiting already; nothing of this request was taken."""


class Closed(Exception):
    """The batcher answers what it has accepted and takes nothing new."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One input and the future of its answer."""

    item: Any
    answer: Future[Any]
    since: float


class Batcher:
    """Feeds `predict` from a queue, in one thread: the model is never called twice at once.

    Every input that `submit` takes gets an answer or an exception, also after `close`.
    `observe(size, seconds)` hears about each call of the model.
    """

    def __init__(
        self,
        predict: Predict,
        max_batch: int = 32,
        max_delay_s: float = 0.005,
        max_waiting: int = 1024,
        observe: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        self._predict, self._observe = predict, observe
        self._max_batch, self._max_delay_s, self._max_waiting = max_batch, max_delay_s, max_waiting
        self._queue: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(self, items: Sequence[Any]) -> list[Future[Any]]:
        """Queue all items or none of them. Futures come in the order of the items."""
        taken = [Waiting(item, Future(), time.monotonic()) for item in items]
        with self._changed:
            if self._closing:
                raise Closed("the server is shutting down")
            if len(self._queue) + len(taken) > self._max_waiting:
                raise QueueFull(f"{len(self._queue)} inputs wait, {self._max_waiting} at most may")
            self._queue.extend(taken)
            self._changed.notify()
        return [one.answer for one in taken]

    def close(self, timeout_s: float | None = None) -> bool:
        """Take nothing new and answer what was accepted. False if that took too long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while batch := self._next_batch():
            began = time.monotonic()
            self._answer(batch)
            self._observe(len(batch), time.monotonic() - began)

    def _next_batch(self) -> list[Waiting]:
        """Wait for a batch; an empty one means that everything accepted has been answered."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            if not self._queue:
                return []
            # Company may have come while the model was busy: then nobody waits any longer.
            until = self._queue[0].since + self._max_delay_s
            while len(self._queue) < self._max_batch and not self._closing:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            size = min(len(self._queue), self._max_batch)
            return [self._queue.popleft() for _ in range(size)]

    def _answer(self, batch: list[Waiting]) -> None:
        """Give each input its result. One bad input must not fail the others of its batch."""
        try:
            results = list(self._predict([one.item for one in batch]))
            if len(results) != len(batch):
                raise RuntimeError(f"the model gave {len(results)} results for {len(batch)} inputs")
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
                return
            for one in batch:
                self._answer([one])
            return
        for one, result in zip(batch, results, strict=True):
            one.answer.set_result(result)
