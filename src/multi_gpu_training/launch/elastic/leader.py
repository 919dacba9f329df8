"""The node that leads a run: it forms the rounds, hosts the ranks' store and decides restarts."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from multi_gpu_training.config import name_problem
from multi_gpu_training.launch.elastic.membership import Membership, Node
from multi_gpu_training.launch.elastic.messages import Gone, Message, ask
from multi_gpu_training.launch.restart_policy import Fault, Limits, RestartPolicy, RestartVerdict
from multi_gpu_training.launch.sockets import host_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


@dataclass(frozen=True)
class View:
    """What the leader says: the round, who is in it, and whether it can go on."""

    run: str
    leader: Node
    number: int
    roster: list[Node]
    store_port: int
    full_world: int  # ranks of the run when all its nodes are there
    broken: str | None
    joining: bool  # the only change is a node that joins
    stopped: bool  # every other node of the round has stopped, too
    cause: str | None  # the first fault of the round that is nobody else's doing
    finished: bool
    ended: dict[str, Any] | None  # by a node that gave the run up: code, text, title

    def plain(self) -> Message:
        nodes = {"leader": self.leader.plain(), "roster": [node.plain() for node in self.roster]}
        return {**self.__dict__, **nodes}

    @classmethod
    def parse(cls, values: Message) -> View:
        known = {key: values[key] for key in cls.__dataclass_fields__}
        roster = [Node.parse(node) for node in values["roster"]]
        # It becomes an environment variable of the ranks, and is compared with what is on disk.
        if name_problem(values["run"]) is not None:
            raise ValueError(f"run={values['run']!r:.200}")
        return cls(**{**known, "leader": Node.parse(values["leader"]), "roster": roster})


class Leader:
    """State of the leading node. Its owner makes sure that one thread at a time is in here."""

    def __init__(
        self,
        least: int,
        most: int,
        me: Node,
        timeout_s: float,
        run: str | None = None,
        full_world: int = 0,
    ) -> None:
        self.members = Membership(least, most, me.name, time.monotonic())
        self.policy = RestartPolicy(None)
        self._run = run or uuid.uuid4().hex
        self._timeout_s = timeout_s
        self._full_world = full_world
        self._store: TCPStore | None = None
        self._cause: str | None = None
        # Its round, and whether it was about a lost contact alone.
        self._verdict: tuple[int, bool, RestartVerdict] | None = None
        self._ended: dict[str, Any] | None = None
        self._told: set[str] = set()  # nodes that know how the run ended

    @classmethod
    def in_place_of(cls, view: View, least: int, most: int, me: Node, timeout_s: float) -> Leader:
        """Continue where the leader of `view` has ended."""
        found = cls(least, most, me, timeout_s, view.run, view.full_world)
        members, now = found.members, time.monotonic()
        members.number, members.roster = view.number, view.roster
        for node in view.roster:
            if node.name != view.leader.name:
                members.hear(replace(node, phase="training", round=view.number), now)
        members.lose(view.leader.name, "ended")
        return found

    def view(self, me: Node) -> View:
        members, now = self.members, time.monotonic()
        members.hear(me, now)
        members.forget_silent(now)
        broken = members.broken()
        return View(
            self._run,
            me,
            members.number,
            members.roster,
            0 if self._store is None else self._store.port,
            self._full_world,
            broken,
            broken is not None and broken == members.joining(),
            members.others_stopped,
            self._cause,
            members.finished(),
            self._ended,
        )

    def gather(self) -> None:
        """The leading node itself waits for the next round."""
        self._cause = None
        self.members.gather(time.monotonic())

    def open_round(self, me: Node) -> str | None:
        """Begin the next round if its nodes are there; what to say about it."""
        self.members.hear(me, time.monotonic())
        ready = self.members.ready(time.monotonic())
        if ready is None:
            return None
        self._store = None
        self._store = host_store(me.address, 0, self._timeout_s)
        self.members.open(ready)
        ranks = sum(node.ranks for node in ready)
        self._full_world = self._full_world or self.members.most * max(n.ranks for n in ready)
        titles = ", ".join(node.title for node in ready)
        return f"round {self.members.number}: {titles}; {ranks} ranks"

    # What others say

    def hear_beat(self, message: Message, me: Node) -> Message:
        members = self.members
        if [members.least, members.most] != message["nodes"]:
            asked = ":".join(map(str, message["nodes"]))
            return {
                "problem": f"--nnodes {asked} here, but {members.least}:{members.most} on "
                f"{me.title}; give the same everywhere"
            }
        node = Node.parse(message["node"])
        members.hear(node, time.monotonic())
        view = self.view(me)
        if view.ended is not None or view.finished:
            self._told.add(node.name)
        return view.plain()

    def hear_fault(self, message: Message) -> Message:
        """Give one verdict per round, unless a later fault says more than the first."""
        fault, limits, number = Fault(**message["fault"]), message["limits"], message["round"]
        if limits is not None and self.policy.limits is None:
            self.policy.limits = Limits(*limits)
        known = self._verdict
        if known is None or known[0] != number or (known[1] and not fault.contact):
            verdict = self.policy.judge(fault, time.monotonic())
            self._verdict = known = (number, fault.contact, verdict)
        if not fault.contact and self._cause is None:
            self._cause = f"rank {fault.rank} on {message['title']} failed ({fault.kind})"
        return known[2].__dict__

    def hear_end(self, message: Message) -> None:
        if self._ended is None:
            self._ended = {key: message[key] for key in ("code", "text", "title")}
        self._told.add(message["name"])

    def untold(self, me: Node) -> bool:
        """Whether nodes that are there have still to hear that the run has ended."""
        view = self.view(me)
        if not (view.finished or view.ended):
            return False
        return bool(self.members.nodes.keys() - self._told - {me.name})


def gone(nodes: list[Node]) -> list[Node]:
    """Those of `nodes` whose launcher has ended: their machine answers that nobody listens."""
    found = []
    for node in nodes:
        try:
            ask(node.address, node.port, {"op": "ping"}, 1.0)
        except Gone:
            found.append(node)
        except OSError:
            continue
    return found


def announce(where: tuple[str, int], me: Node, number: int) -> None:
    """Tell whoever listens there that this node leads the run: node 0, once it is back."""
    with suppress(OSError):
        ask(*where, {"op": "lead", "leader": me.plain(), "number": number}, 1.0)
