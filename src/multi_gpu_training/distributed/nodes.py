"""The launchers of a run on several nodes: who leads, who takes part, what became of the others.

Every launcher listens on its own address and tells the leader about itself twice a second. The
leader, node 0 at first, forms the rounds (membership.py) and hosts the ranks' store.

    answer                  means                       follows
    connection refused      the launcher has ended      lost at once; of the leader: the next node
                                                        in the roster leads
    none for LOST_S         cut off, or switched off    the leader goes on without it; a node that
                                                        lost the leader waits: only one side trains
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from multi_gpu_training.distributed.membership import LOST_S, Membership, Node, Phase
from multi_gpu_training.distributed.messages import Gone, Listener, Message, ask
from multi_gpu_training.distributed.rank_store import host_store, meeting
from multi_gpu_training.distributed.restarts import Fault, Limits, RestartPolicy, Verdict
from multi_gpu_training.errors import ConfigError, RankFailure

BEAT_S = 0.5
_QUIET_S = 3 * BEAT_S  # from then on a node is asked whether it is there
_REFUSALS = 2


@dataclass(frozen=True)
class View:
    """What the leader says: the round, who is in it, and whether it can go on."""

    run: str
    leader: Node
    number: int
    roster: list[Node]
    store_port: int
    full_world: int
    broken: str | None
    losses: list[str]
    stopped: bool  # every other node of the round has stopped, too
    cause: str | None  # the first fault of the round that is nobody else's doing
    finished: bool
    ended: dict[str, Any] | None

    def plain(self) -> Message:
        nodes = {"leader": self.leader.plain(), "roster": [node.plain() for node in self.roster]}
        return {**self.__dict__, **nodes}

    @classmethod
    def parse(cls, values: Message) -> View:
        known = {key: values[key] for key in cls.__dataclass_fields__}
        roster = [Node.parse(node) for node in values["roster"]]
        return cls(**{**known, "leader": Node.parse(values["leader"]), "roster": roster})


class Ended(RankFailure):
    """Another node ended the run."""


class Nodes(RendezvousHandler):
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
    ) -> None:
        self.least, self.most = least, most
        self.timeout_s = timeout_s
        self.policy = RestartPolicy(None)
        self._master = master
        self._lock = threading.RLock()
        self._listener = Listener(address, master[1] if node_rank == 0 else 0, self._answer)
        name = f"{node_rank}-{uuid.uuid4().hex[:8]}"
        self.me = Node(name, node_rank, address, self._listener.port, ranks)
        self.run_id = uuid.uuid4().hex
        self._membership: Membership | None = None  # on the leader
        self._view: View | None = None
        self._leader = master  # where the leader listens, as far as this node knows
        self._heard = time.monotonic()  # when the leader answered last
        self._refusals = 0
        self._problem: str | None = None
        self._cause: str | None = None
        self._ended: dict[str, Any] | None = None
        self._told: set[str] = set()  # nodes that know how the run ended
        self._verdict: tuple[int, bool, Verdict] | None = None
        self._store: TCPStore | None = None
        self._full_world = 0
        self._closing = False
        self._wake = threading.Event()  # something is to be told now
        if node_rank == 0:
            self._membership = Membership(least, most, name, time.monotonic())
        self._beats = threading.Thread(target=self._beat, name="launcher-beats", daemon=True)
        self._beats.start()

    # What the agent asks

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "mgt"

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """1 where this node's ranks must be started again, with other nodes or others gone."""
        return int(self._why_again() is not None)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round with this node in it."""
        before = self.me.round
        why = self._why_again() if before else None
        if why is not None:
            say(why)
        deadline = time.monotonic() + self.timeout_s
        with self._lock:
            self._cause = None
            self.me = replace(self.me, phase="waiting")
            if self._membership is not None:
                self._membership.gather(time.monotonic())
        self._wake.set()
        while True:
            with self._lock:
                self._raise_if_ended()
                self._open_round()
                info = self._joined(before)
            if info is not None:
                return info
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(self._missing())
            time.sleep(0.05)

    def shutdown(self) -> bool:
        """Leave: the others see at once that this launcher is gone. How the run ended is told
        first."""
        deadline = time.monotonic() + LOST_S
        while self._untold() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._closing = True
        self._wake.set()
        self._beats.join()
        self._listener.close()
        self._store = None
        return True

    # What our agent asks

    @property
    def attempt(self) -> int:
        return self.me.round - 1

    @property
    def full_world(self) -> int:
        """Ranks of the run when all its nodes are there: what a global batch is made for."""
        return self._full_world

    @property
    def first_rank(self) -> int:
        """Of this node; with `world` the ranks of the round."""
        assert self._view is not None
        names = [node.name for node in self._view.roster]
        return sum(node.ranks for node in self._view.roster[: names.index(self.me.name)])

    @property
    def world(self) -> int:
        assert self._view is not None
        return sum(node.ranks for node in self._view.roster)

    def phase(self, phase: Phase) -> None:
        with self._lock:
            self.me = replace(self.me, phase=phase)
        self._refresh()
        self._wake.set()

    def finished(self) -> bool:
        """Every node of the round has done its work."""
        return self._view is not None and self._view.finished

    def fault_elsewhere(self) -> str | None:
        """What other node's fault ended ours; None if it cannot be told to be one's."""
        self.phase("failed")
        deadline = time.monotonic() + LOST_S + 2.0
        while time.monotonic() < deadline:
            why = self._why_again()
            if why is not None and (self._membership is not None or self._cut_off() is None):
                return why
            view = self._view
            if view is not None and view.cause is not None:
                return view.cause
            if view is not None and view.stopped and self._membership is not None:
                return None
            if self._cut_off() is not None:
                return self._cut_off()
            time.sleep(0.05)
        return None

    def judge(self, fault: Fault, limits: Limits | None) -> Verdict:
        """The leader decides for all whether a fault is followed by a restart."""
        told = {
            "op": "fault",
            "fault": fault.__dict__,
            "limits": None if limits is None else [limits.restarts, limits.window_s],
            "title": self.me.title,
            "round": self.me.round,
        }
        if self._membership is None:
            try:
                answer = ask(*self._leader, told)
                return Verdict(answer["restart"], answer["reason"], answer["pause_s"])
            except (OSError, KeyError):
                pass  # the leader is gone: whoever leads next is asked the next time
        answer = self._hear_fault(told)
        return Verdict(answer["restart"], answer["reason"], answer["pause_s"])

    def end(self, code: int, text: str) -> None:
        """This node gives the run up; so do all."""
        told = {"op": "end", "code": code, "text": text, **self.me.plain(), "title": self.me.title}
        if self._membership is not None:
            self._hear_end(told)
            return
        with suppress(OSError):  # nobody leads any more
            ask(*self._leader, told)

    # The leader's part

    def _open_round(self) -> None:
        members = self._membership
        if members is None:
            return
        now = time.monotonic()
        members.hear(self.me, now)
        ready = members.ready(now)
        if ready is None:
            return
        self._store = None
        self._store = host_store(self.me.address, 0, self.timeout_s)
        members.open(ready)
        self._verdict = None
        self._full_world = self._full_world or self.most * max(node.ranks for node in ready)
        if self.most > 1:
            titles = ", ".join(node.title for node in ready)
            say(f"round {members.number}: {titles}; {sum(n.ranks for n in ready)} ranks")
        self._refresh()

    def _refresh(self) -> None:
        """On the leader: its own view."""
        with self._lock:
            members = self._membership
            if members is None:
                return
            now = time.monotonic()
            members.hear(self.me, now)
            members.forget_silent(now)
            self._heard = now
            self._view = View(
                self.run_id,
                self.me,
                members.number,
                members.roster,
                0 if self._store is None else self._store.port,
                self._full_world,
                members.broken(),
                members.losses,
                members.others_stopped,
                self._cause,
                members.finished(),
                self._ended,
            )

    def _answer(self, message: Message) -> Message:
        """What another launcher asks this one; in a thread of its own."""
        operation = message["op"]
        with self._lock:
            if operation == "beat":
                return self._hear_beat(message)
            if operation == "fault":
                return self._hear_fault(message)
            if operation == "end":
                return self._hear_end(message)
            if operation == "lead":
                self._hear_leader(message)
            return {"name": self.me.name, "leads": self._membership is not None}

    def _hear_beat(self, message: Message) -> Message:
        if self._membership is None:
            return {"ask": list(self._leader)}
        if [self.least, self.most] != message["nodes"]:
            asked = ":".join(map(str, message["nodes"]))
            return {
                "problem": f"--nnodes {asked} here, but {self.least}:{self.most} on "
                f"{self.me.title}; give the same everywhere"
            }
        node = Node.parse(message["node"])
        self._membership.hear(node, time.monotonic())
        self._refresh()
        assert self._view is not None
        if self._view.ended is not None or self._view.finished:
            self._told.add(node.name)
        return self._view.plain()

    def _hear_fault(self, message: Message) -> Message:
        """One verdict a round, unless a later fault says more than the first."""
        fault = Fault(**message["fault"])
        limits = message["limits"]
        if limits is not None and self.policy.limits is None:
            self.policy.limits = Limits(*limits)
        with self._lock:
            known = self._verdict
            if known is None or known[0] != message["round"] or (known[1] and not fault.contact):
                verdict = self.policy.judge(fault, time.monotonic())
                self._verdict = known = (message["round"], fault.contact, verdict)
            if not fault.contact and self._cause is None:
                self._cause = f"rank {fault.rank} on {message['title']} failed ({fault.kind})"
            self._refresh()
        verdict = known[2]
        return {"restart": verdict.restart, "reason": verdict.reason, "pause_s": verdict.pause_s}

    def _hear_end(self, message: Message) -> Message:
        with self._lock:
            if self._ended is None:
                self._ended = {key: message[key] for key in ("code", "text", "title")}
            self._told.add(message["name"])
            self._refresh()
        return {}

    def _hear_leader(self, message: Message) -> None:
        """Another node leads a run that is further on: this one joins it."""
        leader, number = Node.parse(message["leader"]), int(message["number"])
        ours = -1 if self._membership is None else self._membership.number
        if self._membership is not None and number <= ours:
            return
        if self._membership is not None:
            say(f"{leader.title} leads this run since this node was gone; joining it")
        self._membership = None
        self._leader, self._refusals = (leader.address, leader.port), 0
        self._heard = time.monotonic()

    # The beats, in a thread of its own

    def _beat(self) -> None:
        while not self._closing:
            self._wake.wait(BEAT_S if self.me.phase == "training" else 0.2)
            self._wake.clear()
            if self._membership is not None:
                self._look_after_others()
            else:
                self._tell_leader()

    def _look_after_others(self) -> None:
        members = self._membership
        assert members is not None
        with self._lock:
            self._refresh()
            quiet = members.quiet(time.monotonic(), _QUIET_S)
        for node in quiet:
            try:
                ask(node.address, node.port, {"op": "ping"}, 1.0)
            except Gone:
                with self._lock:
                    members.lose(node.name, "ended")
            except OSError:
                pass
        if self._master != (self.me.address, self.me.port) and members.number:
            # Node 0 may have been started again and think that it leads.
            try:
                lead = {"op": "lead", "leader": self.me.plain(), "number": members.number}
                ask(*self._master, lead, 1.0)
            except OSError:
                pass

    def _tell_leader(self) -> None:
        message = {"op": "beat", "node": self.me.plain(), "nodes": [self.least, self.most]}
        try:
            answer = ask(*self._leader, message)
        except Gone:
            self._refusals += 1
            if self._refusals >= _REFUSALS and self._view is not None and self.me.round:
                self._follow_the_next()
            return
        except OSError:
            return
        self._refusals = 0
        with self._lock:
            new = self._membership is None and self._take(answer)
        if new:
            self._follow_the_next()

    def _take(self, answer: Message) -> bool:
        """Note what the leader says. True: it was started anew and knows nothing of the run."""
        if "problem" in answer:
            self._problem = str(answer["problem"])
            return False
        try:
            if "ask" in answer:
                self._leader = (str(answer["ask"][0]), int(answer["ask"][1]))
                return False
            view, before = View.parse(answer), self._view
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
        other = before is not None and view.leader.name != before.leader.name
        if other and view.number < self.me.round:
            return True
        self._view, self._heard = view, time.monotonic()
        self.run_id, self._full_world = view.run, view.full_world
        self._ended = view.ended
        return False

    def _follow_the_next(self) -> None:
        """The leader's launcher has ended: the first node of the roster that is there leads."""
        assert self._view is not None
        gone = self._view.leader
        for node in self._view.roster:
            if node.name == gone.name:
                continue
            if node.name == self.me.name:
                self._take_over(gone)
                return
            try:
                ask(node.address, node.port, {"op": "ping"})
                self._leader, self._refusals = (node.address, node.port), 0
                return
            except Gone:
                continue
            except OSError:
                return  # it may lead already: wait for it

    def _take_over(self, gone: Node) -> None:
        view, now = self._view, time.monotonic()
        assert view is not None
        with self._lock:
            members = Membership(self.least, self.most, self.me.name, now)
            members.number, members.roster = view.number, view.roster
            for node in view.roster:
                if node.name != gone.name:
                    members.hear(replace(node, phase="training", round=view.number), now)
            members.lose(gone.name, "ended")
            self._membership = members
            self._leader = (self.me.address, self.me.port)
            self._refresh()
        say(f"{gone.title} ended; {self.me.title} leads the run from here on")

    # States

    def _cut_off(self) -> str | None:
        """Why this node knows nothing of the run: the leader is silent."""
        if self._membership is not None or time.monotonic() - self._heard <= LOST_S:
            return None
        return f"the leader at {self._leader[0]}:{self._leader[1]} was silent for {LOST_S:g} s"

    def _why_again(self) -> str | None:
        view = self._view
        if self._ended is not None:
            return "the run was ended"
        if self._cut_off() is not None:
            return self._cut_off()
        if view is None or not self.me.round:
            return None
        if view.number != self.me.round or self.me.name not in {n.name for n in view.roster}:
            return "the others went on without this node"
        return view.broken

    def _joined(self, before: int) -> RendezvousInfo | None:
        view = self._view
        if view is None or view.number <= before or self._cut_off() is not None:
            return None
        names = [node.name for node in view.roster]
        if self.me.name not in names or view.broken is not None:
            return None
        self.me = replace(self.me, phase="training", round=view.number)
        self._refresh()
        return meeting(names.index(self.me.name), len(names), view.leader.address, view.store_port)

    def _raise_if_ended(self) -> None:
        if self._problem is not None:
            raise ConfigError(self._problem)
        if self._ended is not None:
            error = Ended(f"{self._ended['title']} ended the run:\n{self._ended['text']}")
            error.exit_code = int(self._ended["code"])
            raise error
        if self._view is not None and self._view.finished and self._membership is None:
            over = Ended("the run has ended: nothing is left to do for this node")
            over.exit_code = 0
            raise over

    def _untold(self) -> bool:
        """On the leader: whether other nodes have still to hear that the run has ended."""
        with self._lock:
            self._refresh()
            view, members = self._view, self._membership
            if view is None or members is None or not (view.finished or view.ended):
                return False
            others = {n.name for n in members.nodes.values() if n.name != self.me.name}
            return bool(others - self._told)

    def _missing(self) -> str:
        members = self._membership
        if members is not None:
            there = sum(node.phase == "waiting" for node in members.nodes.values())
            return f"{there} of at least {self.least} nodes came"
        if self._cut_off() is not None and self.me.round:
            return (
                f"{self._cut_off()}. Whether it trains on cannot be known from here, so this node "
                "does not: start the same command again when it is reachable. If it is gone for "
                "good, start the run anew on the nodes that are left with --resume auto"
            )
        if self._view is not None:
            return f"the run has its {self.most} nodes" if self._view.broken is None else "busy"
        return "the leader did not answer"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
