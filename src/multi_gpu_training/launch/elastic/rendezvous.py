"""How the launchers of a run on several nodes find each other, again and again.

Every launcher listens on its own address and tells the leader about itself twice per second. The
leader, node 0 at first, forms the rounds (leader.py).

    answer                  means                       consequence
    connection refused      the launcher has ended      lost at once; if it led: the next node in
                                                        the roster leads
    none for LOST_S         cut off, or switched off    the leader continues without it; a node that
                                                        lost the leader waits: only one side trains
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace

from pydantic import TypeAdapter

from multi_gpu_training.distributed.authenticated_channel import Refused, printable
from multi_gpu_training.errors import ConfigError, RankFailure
from multi_gpu_training.launch.elastic.leader import (
    LOST_S,
    Address,
    Count,
    Leader,
    Node,
    NodePhase,
    Port,
    View,
    announce,
    gone,
    parse_node,
    parse_view,
)
from multi_gpu_training.launch.elastic.messages import Gone, Message, MessageServer, ask
from multi_gpu_training.launch.restart_policy import Fault, Limits, RestartVerdict

BEAT_S = 0.5
_HASTY_BEAT_S = 0.2  # while a change is under way
_QUIET_S = 3 * BEAT_S  # after that a node is asked whether it is there
_REFUSALS = 2
_COUNT: TypeAdapter[int] = TypeAdapter(Count)
_WHERE: TypeAdapter[tuple[str, int]] = TypeAdapter(tuple[Address, Port])
_VERDICT = TypeAdapter(RestartVerdict)


class Ended(RankFailure):
    """Another node ended the run."""


class NotMet(Exception):
    """No round with this node in it came about in time."""


class Rendezvous:
    """This node's part in a run on `least` to `most` nodes.

    `master` is where node 0 listens, `address` this node's own address on the way there.
    """

    def __init__(
        self,
        least: int,
        most: int,
        node_rank: int,
        ranks: int,
        master: tuple[str, int],
        address: str,
        timeout_s: float,
        key: bytes,
    ) -> None:
        self.least, self.most = least, most
        self.timeout_s = timeout_s
        self._key = key  # of every message between launchers
        self._master = master
        self._where = master  # the leader listens there, as far as this node knows
        self._heard = time.monotonic()  # when the leader answered last
        self._refusals = 0
        self._view: View | None = None
        self._leader: Leader | None = None  # on the node that leads
        self._problem: str | None = None
        self._refused: str | None = None  # why the leader and this node do not talk
        self._failed_beats: set[str] = set()
        self._closing = False
        self._wake = threading.Event()  # something is to be told now
        self._lock = threading.RLock()
        with self._lock:
            port = master[1] if node_rank == 0 else 0
            self._server = MessageServer(address, port, self._answer, key)
            name = f"{node_rank}-{uuid.uuid4().hex[:8]}"
            self.me = Node(name, node_rank, address, self._server.port, ranks)
            if node_rank == 0:
                self._leader = Leader(least, most, self.me, timeout_s, key)
        self._beats = threading.Thread(target=self._beat, name="launcher-beats", daemon=True)
        self._beats.start()

    # What the engine of this node asks

    def next_round(self, check: Callable[[], None] = lambda: None) -> tuple[int, int]:
        """Wait for the next round with this node in it: its place there, and how many nodes.

        `check` is called often, and may raise to end the waiting.
        """
        before = self.me.round
        why = self.why_again() if before else None
        if why is not None:
            say(why)
        deadline = time.monotonic() + self.timeout_s
        with self._lock:
            self.me = replace(self.me, phase="waiting")
            if self._leader is not None:
                self._leader.gather()
        self._wake.set()
        while True:
            check()
            with self._lock:
                self._raise_if_ended()
                if self._leader is not None:
                    said = self._leader.open_round(self.me)
                    self._look()
                    if said is not None:
                        say(said)
                joined = self._joined(before)
            if joined is not None:
                return joined
            if time.monotonic() > deadline:
                raise NotMet(self._missing())
            time.sleep(0.05)

    def shutdown(self) -> None:
        """Leave, after all others have heard how the run ended. They see at once that we left."""
        deadline = time.monotonic() + LOST_S
        while time.monotonic() < deadline:
            with self._lock:
                if self._leader is None or not self._leader.untold(self.me):
                    break
            time.sleep(0.05)
        self._closing = True
        self._wake.set()
        self._beats.join()
        self._server.close()
        if self._leader is not None:
            self._leader.close()
        self._leader = None

    @property
    def round(self) -> View:
        assert self._view is not None
        return self._view

    @property
    def elastic(self) -> bool:
        """Whether the run continues without some of its nodes."""
        return self.least < self.most

    @property
    def attempt(self) -> int:
        return self.me.round - 1

    @property
    def first_rank(self) -> int:
        """The number of this node's first rank."""
        names = [node.name for node in self.round.roster]
        return sum(node.ranks for node in self.round.roster[: names.index(self.me.name)])

    @property
    def world(self) -> int:
        return sum(node.ranks for node in self.round.roster)

    def phase(self, phase: NodePhase) -> None:
        with self._lock:
            self.me = replace(self.me, phase=phase)
            self._look()
        self._wake.set()

    def fault_elsewhere(self) -> str | None:
        """The fault on another node that ended the ranks here; None if none is known."""
        self.phase("failed")
        deadline = time.monotonic() + LOST_S + 2.0
        while time.monotonic() < deadline:
            why = self.why_again() or self.round.cause
            if why is not None:
                return why
            if self._leader is not None and self.round.stopped:
                return None
            time.sleep(0.05)
        return None

    def judge(self, fault: Fault, limits: Limits | None) -> RestartVerdict:
        """Have the leader decide for all nodes whether to restart after a fault."""
        told = {
            "op": "fault",
            "fault": fault.__dict__,
            "limits": None if limits is None else [limits.restarts, limits.window_s],
            "title": self.me.title,
            "round": self.me.round,
        }
        answer = self._tell(told)
        if answer is None:  # whoever leads next counts restarts from there
            return RestartVerdict(True, "the leader is gone; restarting with the nodes left")
        return _VERDICT.validate_python(answer)

    def end(self, code: int, text: str) -> None:
        """Give the run up, on this node and all others."""
        named = {"title": self.me.title, "name": self.me.name}
        # A process has one byte for its code, and a run that was given up did not succeed.
        code = code if 1 <= code <= 255 else 1
        self._tell({"op": "end", "code": code, "text": text[:20_000], **named})

    def why_again(self) -> str | None:
        """Why the ranks here must be restarted; None if they need not."""
        view = self._view
        if view is None or not self.me.round:
            return None
        if view.ended is not None:
            return "the run was given up"
        if self._cut_off() is not None:
            return self._cut_off()
        if view.number != self.me.round or self.me.name not in {n.name for n in view.roster}:
            return "the others continued without this node"
        return view.broken

    def change(self) -> str | None:
        """Like `why_again`, but wait as long as it may take to become known."""
        deadline = time.monotonic() + LOST_S
        while self.why_again() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.why_again()

    # What other launchers ask, in the server's threads

    def _answer(self, message: Message) -> Message:
        with self._lock:
            operation = message["op"]
            if operation == "lead":
                self._hear_leader(message)
            elif operation != "ping" and self._leader is None:
                return {"ask": list(self._where)}
            elif operation == "beat" and self._leader is not None:
                return self._leader.hear_beat(message, self.me)
            elif operation == "fault" and self._leader is not None:
                return self._leader.hear_fault(message)
            elif operation == "end" and self._leader is not None:
                self._leader.hear_end(message)
            return {}

    def _hear_leader(self, message: Message) -> None:
        """Join another node that leads a run which is further on.

        Nothing but its address and the number of the round is used: what the run is called and
        where it is kept follows from this node's own config.
        """
        leader, number = parse_node(message["leader"]), _COUNT.validate_python(message["number"])
        if self._leader is not None:
            if number <= self._leader.members.number:
                return
            say(f"{leader.title} took over the run while this node was gone; joining it")
            self._leader.close()
        self._leader = None
        self._where, self._refusals = (leader.address, leader.port), 0
        self._heard = time.monotonic()

    def _tell(self, message: Message) -> Message | None:
        """The answer of the leader, which may be this node."""
        with self._lock:
            if self._leader is not None:
                answer = self._answer(message)
                self._look()
                return answer
        with suppress(OSError):
            answer = ask(*self._where, message, self._key)
            return None if "ask" in answer else answer
        return None

    # The beats, in their own thread

    def _beat(self) -> None:
        while not self._closing:
            self._wake.wait(BEAT_S if self.me.phase == "training" else _HASTY_BEAT_S)
            self._wake.clear()
            try:
                leader = self._leader
                if leader is not None:
                    self._look_after_others(leader)
                else:
                    self._tell_leader()
            except Exception:
                # A node without beats would be lost in silence: say it, and go on.
                text = traceback.format_exc()
                if text not in self._failed_beats:
                    self._failed_beats.add(text)
                    say(f"an error between launchers, which go on:\n{printable(text, 5000)}")

    def _look_after_others(self, leader: Leader) -> None:
        with self._lock:
            self._look()
            quiet = leader.members.quiet(time.monotonic(), _QUIET_S)
        for node in gone(quiet, self._key):
            with self._lock:
                leader.members.lose(node.name, "ended")
        if self._master != (self.me.address, self.me.port) and leader.members.number:
            announce(self._master, self.me, leader.members.number, self._key)

    def _look(self) -> None:
        """On the leading node: refresh its own view."""
        if self._leader is not None:
            self._view, self._heard = self._leader.view(self.me), time.monotonic()

    def _tell_leader(self) -> None:
        message = {"op": "beat", "node": asdict(self.me), "nodes": [self.least, self.most]}
        try:
            answer = ask(*self._where, message, self._key)
        except Refused as error:
            if self._refused is None:
                say(f"the launcher at {self._where[0]}:{self._where[1]}: {error}")
            self._refused = str(error)
            return
        except Gone:
            self._refusals += 1
            if self._refusals >= _REFUSALS and self.me.round:
                self._follow_the_next()
            return
        except OSError:
            return
        self._refusals, self._refused = 0, None
        with self._lock:
            new = self._leader is None and self._take(answer)
        if new:
            self._follow_the_next()

    def _take(self, answer: Message) -> bool:
        """Note what the leader says. True: it was restarted and knows nothing of the run."""
        if "problem" in answer:
            self._problem = printable(str(answer["problem"]))
            return False
        try:
            if "ask" in answer:
                self._where = _WHERE.validate_python(answer["ask"])
                return False
            view, before = parse_view(answer), self._view
        except (KeyError, TypeError, ValueError):
            return False
        other = before is not None and view.leader.name != before.leader.name
        if other and view.number < self.me.round:
            return True
        self._view, self._heard = view, time.monotonic()
        return False

    def _follow_the_next(self) -> None:
        """After the leader's launcher has ended: the first node of the roster still there leads."""
        view = self.round
        for node in view.roster:
            if node.name == view.leader.name:
                continue
            if node.name == self.me.name:
                with self._lock:
                    self._leader = Leader.in_place_of(
                        view, self.least, self.most, self.me, self.timeout_s, self._key
                    )
                    self._where = (self.me.address, self.me.port)
                    self._look()
                say(f"{view.leader.title} ended; {self.me.title} leads the run from now on")
                return
            try:
                ask(node.address, node.port, {"op": "ping"}, self._key)
                self._where, self._refusals = (node.address, node.port), 0
                return
            except Gone:
                continue
            except OSError:
                return  # it may lead already: wait for it

    # States

    def _cut_off(self) -> str | None:
        """Why this node is cut off from the run: the leader is silent."""
        if self._leader is not None or time.monotonic() - self._heard <= LOST_S:
            return None
        return f"the leader at {self._where[0]}:{self._where[1]} was silent for {LOST_S:g} s"

    def _joined(self, before: int) -> tuple[int, int] | None:
        view = self._view
        if view is None or view.number <= before or self._cut_off() is not None:
            return None
        names = [node.name for node in view.roster]
        if self.me.name not in names or view.broken is not None:
            return None
        self.me = replace(self.me, phase="training", round=view.number)
        self._look()
        return names.index(self.me.name), len(names)

    def _raise_if_ended(self) -> None:
        if self._problem is not None:
            raise ConfigError(self._problem)
        view = self._view
        if view is None:
            return
        error: Ended | None = None
        if view.ended is not None:
            error = Ended(f"{view.ended.title} ended the run:\n{view.ended.text}")
            error.exit_code = view.ended.code
        elif view.finished and self._leader is None:
            error = Ended("the run has ended: nothing is left to do for this node")
            error.exit_code = 0
        if error is not None:
            raise error

    def _missing(self) -> str:
        """Why no round came about."""
        if self._leader is not None:
            waiting = [n for n in self._leader.members.nodes.values() if n.phase == "waiting"]
            return f"{len(waiting)} of at least {self.least} nodes came"
        if self._refused is not None:
            return self._refused
        silent = self._cut_off()
        if silent is not None and self.me.round:
            return (
                f"{silent}. Whether it still trains cannot be known from here, so this node does "
                "not: start the same command again when it is reachable. If it is gone for good, "
                "start the run anew on the nodes that are left, with --resume auto"
            )
        if silent is not None or self._view is None:
            return "the leader did not answer"
        titles = ", ".join(node.title for node in self._view.roster) or "nobody yet"
        return f"the run of at most {self.most} nodes has {titles}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
