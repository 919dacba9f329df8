"""A wish to stop, agreed on by all ranks for one boundary, without a collective.

Every rank passes the same boundaries in the same order: one before each step, one at the end of
each validation. A small thread beside training listens for signals, here and in the store that the
ranks met at. Once there is one,

    each thread holds its rank at the boundary ahead and publishes that boundary's number
    when all are published, the largest is where everybody stops; ranks go on until there

A rank that is held waits for threads alone, never for another rank's training: no deadlock,
however far the ranks are apart. Without a signal a boundary costs an addition and a look.

A request, which rank 0 finds beside the run, takes the same way in numbered rounds, one at a time:
all ranks do it at the boundary that they agreed on, and train on. A rank that has been asked to
stop joins no further round, so ranks never differ in what they did before they stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as c10d

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.progress_slot import launcher_reads, note_asked, note_grace
from multi_gpu_training.distributed.signal_thread import SignalThread
from multi_gpu_training.distributed.stall import PeerWatch
from multi_gpu_training.portability import process_state
from multi_gpu_training.torch_internals import default_store

NAMES = {signal.SIGINT: "Ctrl-C"}
POLL_S = 0.25  # between two looks of the thread; a person waits so long for an answer
LOOKS = 4  # of the thread, from one look for requests to the next
MARGIN_S = 2.0  # of grace_s, left for the process to end in
_ASKED = "asked"
_NEVER = 2**62  # a boundary that no run reaches


def exit_code(number: int) -> int:
    """130 for Ctrl-C, 143 for everything else that asks a run to end."""
    return 130 if number == signal.SIGINT else 143


class LeaveWait(BaseException):
    """Ends a wait for data that nobody needs any more: all ranks stop behind it."""


class Boundary:
    """Counts the boundaries of a loop. This one never stops it."""

    def __init__(self) -> None:
        self.passed = 0
        self.held = False  # whether `halt` must be asked at a boundary

    def halt(self, between_steps: bool = True) -> None:
        """Stand at boundary number `passed`: do there what all ranks agreed on, or stop the run.
        between_steps: False inside a validation, where a request has to wait."""


class Control(Boundary):
    """One rank's end of the channel. Made by all ranks together; `listen` starts it.

    The main thread first counts a boundary and then looks at `held`; the watching thread first
    sets `held` and then reads the count: whichever comes first, the number that is published is
    one that the main thread does not pass unasked.
    """

    def __init__(self, placement: Placement, grace_s: float) -> None:
        super().__init__()
        self.grace_s = grace_s
        self.asked: signal.Signals | None = None  # the signal that came, here or elsewhere
        self.waiting = False  # for data, right before a boundary
        self.on_stop: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] = lambda: None
        self.on_request: Callable[[str], None] = lambda _: None
        self._main = placement.is_main
        identity = placement.identity
        mine = {"host": identity.host, "pid": os.getpid(), "token": uuid.uuid4().hex}
        everybody = placement.gather_json(mine)
        self._neighbours = [
            (rank, other["pid"])
            for rank, other in enumerate(everybody)
            if other["host"] == identity.host and other["pid"] != os.getpid()
            if _runs(other["pid"])  # a container may hide it from us
        ]
        self._store: Any = None
        if placement.dp_size > 1:
            # A manager before this one, in the same processes, may have left its wish in the
            # store. On a shared connection a rank that waits would make the thread wait.
            store = default_store().clone()
            self._store = c10d.PrefixStore(f"mgt/control/{everybody[0]['token']}", store)
        self._peers: PeerWatch | None = None
        if placement.dp_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ and not launcher_reads():
            connection = self._store.clone()
            self._peers = PeerWatch(placement.dp_rank, placement.dp_size, connection)
        self._keys = [f"rank{rank}" for rank in range(placement.dp_size)]
        self._key = self._keys[placement.dp_rank]
        # A launcher of ours tells all its ranks what one of them was told.
        self._polls = not launcher_reads() or len(self._neighbours) + 1 < placement.dp_size
        self._stop_at: int | None = None
        self._deadline: float | None = None
        self._agreed = threading.Event()
        self._interrupted_at: float | None = None
        self._next_request: Callable[[], str | None] = lambda: None
        self._requester: str | None = None  # who asked the run to stop, if it was no signal
        self._closed = False
        self._looks = 0
        self._round = 0  # of requests: how many were settled
        self._request: str | None = None  # the one that ranks agree on, or are to do
        self._request_at: int | None = None
        self._turn = threading.Lock()  # between the thread that settles and the one that acts
        self._listener = SignalThread(self._heard, self._look, self._wanted_elsewhere, POLL_S)

    # For the loop

    @property
    def is_main(self) -> bool:
        return self._main

    @property
    def asked_by(self) -> str:
        """What asked the run to end, as people call it."""
        if self._requester is not None:
            return self._requester
        asked = self.asked or signal.SIGTERM
        return NAMES.get(asked, asked.name)

    @property
    def time_left_s(self) -> float:
        """Seconds until a run that was asked to end must have ended; grace_s before that."""
        if self._deadline is None:
            return self.grace_s
        return max(0.0, self._deadline - time.monotonic() - MARGIN_S)

    @property
    def ends_next(self) -> bool:
        """Whether the boundary ahead is the last one: what is under way may be left."""
        return self._stop_at is not None and self.passed + 1 == self._stop_at

    def arrive(self) -> None:
        """Pass a boundary. Every rank must call it."""
        self.waiting = False
        self.passed += 1
        if self.held:
            self.halt(between_steps=False)

    def halt(self, between_steps: bool = True) -> None:
        self._agreed.wait()  # the thread ends the process when grace_s is over
        if between_steps and self._request_at is not None and self.passed >= self._request_at:
            self._do_request()
        if self.passed == self._stop_at:
            self.on_stop()

    def _do_request(self) -> None:
        with self._turn:
            request, self._request, self._request_at = self._request, None, None
            # A stop may be on its way: then its boundary is still to be looked for.
            self.held = self._deadline is not None
        assert request is not None
        self.on_request(request)

    # Its life

    def listen(self, next_request: Callable[[], str | None] = lambda: None) -> None:
        """Catch signals from now on. A handler of the user's own stays. next_request: gives what
        was asked of the run, on rank 0; called in a thread, every POLL_S."""
        self._next_request = next_request
        self._listener.start()
        if self._peers is not None:
            self._peers.start()
        if self._listener.catches:
            note_grace(self.grace_s)

    def close(self) -> None:
        """Listen no more, and give the signals back."""
        self._listener.close()
        if self._peers is not None:
            self._peers.close()
        note_grace(0.0)
        self._leave_rounds()

    def _leave_rounds(self) -> None:
        """Let ranks that still train not wait for this one to agree on a request."""
        if self._store is None or self._closed or self.asked is not None:
            return
        self._closed = True
        if self._request is None:
            with contextlib.suppress(RuntimeError):  # the store is gone, with the rank that held it
                self._store.set(self._round_key(self._key), str(_NEVER))

    # The thread

    def _heard(self, number: signal.Signals) -> None:
        """A signal came to this process."""
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
                if self._main:
                    _say("Ctrl-C: saving after this step; once more stops now")
            elif now - self._interrupted_at > 0.1:  # one key press may come twice
                _end_now("Ctrl-C twice: stopped now", 130)
        if self.asked is None:
            self.asked = number
            note_asked(number)

    def _look(self) -> None:
        """Called by the thread after each signal, and every POLL_S."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._give_up(f"not done within grace_s={self.grace_s:g} s")
        if self._stop_at is not None:
            return
        try:
            if self.asked is None and self._asked_elsewhere():
                self.asked = signal.Signals(int(self._store.get(_ASKED)))
            if self.asked is not None:
                self._agree()
            else:
                self._agree_on_request()
        except RuntimeError:  # the store is gone, with the rank that held it
            if self.asked is not None:
                self._give_up("another rank has ended")

    def _asked_elsewhere(self) -> bool:
        return self._store is not None and self._polls and bool(self._store.check([_ASKED]))

    def _agree(self) -> None:
        assert self.asked is not None
        if self._deadline is None:
            with self._turn:
                self._deadline = time.monotonic() + self.grace_s
                aim = self._hold()
            if self._store is None:
                self._settle(aim)
                return
            if not self._store.check([_ASKED]):
                self._store.set(_ASKED, str(int(self.asked)))
            self._store.set(self._key, str(aim))
        if self._store.check(self._keys):
            # Two ranks may have been asked in two ways: all take the last one that was written.
            self.asked = signal.Signals(int(self._store.get(_ASKED)))
            # No rank joins a round any more: whether all had joined this one is the same for all.
            self._settle_request()
            self._settle(max(int(self._store.get(key)) for key in self._keys))
            return
        for rank, pid in self._neighbours:
            if not _runs(pid):
                self._give_up(f"rank {rank} has ended")

    def _hold(self) -> int:
        """Let the main thread wait at the boundary ahead; returns its number."""
        self._agreed.clear()
        self.held = True
        return self.passed + 1

    def _agree_on_request(self) -> None:
        """Take part in the round of the next request, if there is one."""
        if self._request is not None:
            self._settle_request()
            return
        key = self._round_key("request")
        request = self._next_request() if self._main else None
        if self._store is None:
            if request is not None and not self._is_stop(request):
                with self._turn:
                    self._request, self._request_at = request, self._hold()
                    self._agreed.set()
            return
        if request is not None and not self._is_stop(request):
            self._store.set(key, request)
        elif self._main or not self._is_asked(key):
            return
        text = self._store.get(key).decode()
        with self._turn:
            self._request, aim = text, self._hold()
        self._store.set(self._round_key(self._key), str(aim))

    def _is_asked(self, key: str) -> bool:
        """Whether rank 0 has begun the round. Looked for once per second: all ranks ask one store,
        and people are not that quick."""
        self._looks += 1
        return self._looks % LOOKS == 0 and bool(self._store.check([key]))

    def _is_stop(self, request: str) -> bool:
        """A request to stop is what a signal is: it goes the way of one."""
        asked = json.loads(request)
        if asked.get("action") != "stop":
            return False
        self._requester = asked.get("by") or "a request"
        self._heard(signal.SIGTERM)
        return True

    def _settle_request(self) -> None:
        """Once all ranks have joined the round, the largest boundary is where everybody acts."""
        if self._request is None or self._request_at is not None or self._store is None:
            return
        keys = [self._round_key(key) for key in self._keys]
        if self._store.check(keys):
            with self._turn:
                self._request_at = max(int(self._store.get(key)) for key in keys)
                self._round += 1
                if self._deadline is None:
                    self._agreed.set()

    def _round_key(self, key: str) -> str:
        return f"round{self._round}/{key}"

    def _settle(self, aim: int) -> None:
        self._stop_at = aim
        self._agreed.set()
        if self.waiting and self.ends_next:
            self._listener.wake_main()

    def _wanted_elsewhere(self) -> None:
        """In the main thread, after a signal: leave a wait for data if the run ends behind it."""
        if self.waiting and self.ends_next:
            self.waiting = False
            self.on_leave()
            raise LeaveWait

    def _give_up(self, why: str) -> None:
        assert self.asked is not None
        name = NAMES.get(self.asked, self.asked.name)
        text = f"{name}: {why}; ended without a new checkpoint, earlier ones are untouched"
        _end_now(text if self._main else "", exit_code(self.asked))


def _end_now(text: str, code: int) -> None:
    """End this process at once; loader workers die with it."""
    if text:
        _say(text)
    os._exit(code)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return process_state(pid) not in ("", "Z", "X")
