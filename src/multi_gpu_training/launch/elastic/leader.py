"""The node that leads a run: which nodes take part, when a round begins, whether ranks restart.

A *round* is one set of nodes that train together; when it changes or fails, a new one follows.
Membership makes pure decisions (`now` is any monotonic clock in seconds); Leader acts on them: it
hosts the ranks' store and answers the other launchers.
"""

from __future__ import annotations

import ipaddress
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from multi_gpu_training.config import name_problem
from multi_gpu_training.distributed.authenticated_channel import printable
from multi_gpu_training.distributed.store_relay import HostedStore
from multi_gpu_training.launch.elastic.messages import Gone, Message, ask
from multi_gpu_training.launch.restart_policy import Fault, Limits, RestartPolicy, RestartVerdict

# A node is lost after so long a silence. Shorter absences are not a fault: the ranks' connections
# wait and then continue.
LOST_S = 10.0
# A run that may have more nodes than it needs waits this long for them before it begins.
LAST_CALL_S = 10.0


def _plain(name: str) -> str:
    problem = name_problem(name)
    if problem is not None:
        raise ValueError(problem)
    return name


def _numeric(address: str) -> str:
    ipaddress.ip_address(address.partition("%")[0])
    return address


def _long_text(text: str) -> str:
    return printable(text, 20_000)


# The token proves that a message is from one of our machines; a mistake there, or an older version,
# still must not do harm here: everything has its bounds.
PlainName = Annotated[str, Field(strict=True), AfterValidator(_plain)]
Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=4096)]  # of one machine
Address = Annotated[str, Field(strict=True, max_length=64), AfterValidator(_numeric)]
# Nothing in a text that is printed may control the terminal.
Text = Annotated[str, Field(strict=True, max_length=100_000), AfterValidator(_long_text)]
Title = Annotated[str, Field(strict=True, max_length=1000), AfterValidator(printable)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NodePhase = Literal["waiting", "training", "failed", "done"]


@dataclass(frozen=True)
class Node:
    """What a node says about itself. `name` is new each time the node is started."""

    name: PlainName
    node_rank: Count
    address: Address
    port: Port
    ranks: Ranks
    phase: NodePhase = "waiting"
    round: Count = 0  # the last that it took part in

    @property
    def title(self) -> str:
        return f"node {self.node_rank} ({self.address})"


@dataclass(frozen=True)
class Ending:
    """How a node gave the run up. Success is not among it: a run ends well on every node."""

    code: Annotated[int, Field(strict=True, ge=1, le=255)]
    text: Text
    title: Title
    name: PlainName


@dataclass(frozen=True)
class FaultReport:
    """A fault on one of the nodes, and what its config allows."""

    fault: Fault
    limits: tuple[Count, Seconds] | None
    title: Title
    round: Count


@dataclass(frozen=True)
class View:
    """What the leader says: the round, who is in it, and whether it can go on."""

    run: PlainName
    leader: Node
    number: Count
    roster: list[Node]
    store_port: Port
    full_world: Count  # ranks of the run when all its nodes are there
    broken: Text | None
    joining: bool  # the only change is a node that joins
    stopped: bool  # every other node of the round has stopped, too
    cause: Text | None  # the first fault of the round that no other one caused
    finished: bool
    ended: Ending | None  # by a node that gave the run up


_NODE, _VIEW = TypeAdapter(Node), TypeAdapter(View)
_COUNTS: TypeAdapter[tuple[int, int]] = TypeAdapter(tuple[Count, Count])
_ENDING, _REPORT = TypeAdapter(Ending), TypeAdapter(FaultReport)


def parse_node(values: Any) -> Node:
    """Check what another launcher, or a stranger, says about itself. ValueError: it is wrong."""
    return _NODE.validate_python(values)


def parse_view(values: Any) -> View:
    """Check what a leader answers. ValueError: it is wrong."""
    return _VIEW.validate_python(values)


class Membership:
    """Nodes from `least` to `most`; `leader` is the name of the one that keeps this."""

    def __init__(self, least: int, most: int, leader: str, now: float) -> None:
        self.least = least
        self.most = most
        self.leader = leader
        self.number = 0  # of the round
        self.roster: list[Node] = []  # who takes part in it, as it began
        self.nodes: dict[str, Node] = {}
        self._seen: dict[str, float] = {}
        self._lost: dict[str, str] = {}  # name -> why
        self._since = now  # when the gathering of the next round began

    def hear(self, node: Node, now: float) -> None:
        """A node has told about itself."""
        for other in list(self.nodes.values()):
            if other.node_rank == node.node_rank and other.name != node.name:
                self.lose(other.name, "was started anew")
        if node.name in self._lost and node.phase != "waiting":
            return  # it will learn that its round went on without it
        self.nodes[node.name] = node
        self._seen[node.name] = now

    def lose(self, name: str, why: str) -> None:
        """A node is gone, for this round at least."""
        self.nodes.pop(name, None)
        self._seen.pop(name, None)
        if name in self._names:
            self._lost.setdefault(name, why)

    def forget_silent(self, now: float) -> None:
        for name, seen in list(self._seen.items()):
            if name != self.leader and now - seen > LOST_S:
                self.lose(name, f"was silent for {LOST_S:g} s")

    def quiet(self, now: float, for_s: float) -> list[Node]:
        """Nodes that should have said something by now."""
        return [
            node
            for name, node in self.nodes.items()
            if name != self.leader and now - self._seen[name] > for_s
        ]

    @property
    def _names(self) -> set[str]:
        return {node.name for node in self.roster}

    @property
    def losses(self) -> list[str]:
        """Who of the present round is gone, and how."""
        return [f"{n.title} {self._lost[n.name]}" for n in self.roster if n.name in self._lost]

    @property
    def others_stopped(self) -> bool:
        """Every other node of the round that is there has stopped training, too."""
        others = [n for n in self.roster if n.name != self.leader and n.name in self.nodes]
        return all(self.nodes[n.name].phase in ("waiting", "failed") for n in others)

    def broken(self) -> str | None:
        """Why the present round cannot go on as it is, or None."""
        if not self.roster:
            return None
        if self.losses:
            return "; ".join(self.losses)
        for node in self.roster:
            now = self.nodes[node.name]
            if now.phase == "waiting" and now.round >= self.number:
                return f"the ranks of {node.title} have to be started again"
        return self.joining()

    def joining(self) -> str | None:
        """Who waits to join the present round, where there is room."""
        new = [n for n in self.nodes.values() if n.name not in self._names and n.phase == "waiting"]
        return f"{new[0].title} joins" if new and len(self.roster) < self.most else None

    def finished(self) -> bool:
        """Every node of the round has done its work, as far as it is still there."""
        phases = [self.nodes[n.name].phase for n in self.roster if n.name in self.nodes]
        return bool(phases) and all(phase == "done" for phase in phases)

    def gather(self, now: float) -> None:
        """The leader itself waits for the next round from now on."""
        self._since = now

    def ready(self, now: float) -> list[Node] | None:
        """The nodes of the next round, the leader first; None while others are waited for."""
        waiting = [node for node in self.nodes.values() if node.phase == "waiting"]
        if self.leader not in {node.name for node in waiting} or len(waiting) < self.least:
            return None
        # Nodes of the present round that are there still have to end their ranks.
        expected = [n for n in self.roster if n.name in self.nodes]
        if any(self.nodes[n.name].phase != "waiting" for n in expected):
            return None
        if len(waiting) < self.most and not self.roster and now - self._since < LAST_CALL_S:
            return None
        waiting.sort(key=lambda node: (node.name != self.leader, node.node_rank, node.name))
        return waiting[: self.most]

    def open(self, nodes: list[Node]) -> None:
        """The next round begins."""
        self.number += 1
        self.roster = list(nodes)
        self._lost.clear()


class Leader:
    """State of the leading node. Its owner makes sure that one thread at a time is in here."""

    def __init__(
        self,
        least: int,
        most: int,
        me: Node,
        timeout_s: float,
        key: bytes,
        run: str | None = None,
        full_world: int = 0,
    ) -> None:
        self.members = Membership(least, most, me.name, time.monotonic())
        self.policy = RestartPolicy(None)
        self._run = run or uuid.uuid4().hex
        self._timeout_s = timeout_s
        self._key = key
        self._full_world = full_world
        self._store: HostedStore | None = None
        self._cause: str | None = None
        # Its round, and whether it was about a lost contact alone.
        self._verdict: tuple[int, bool, RestartVerdict] | None = None
        self._ended: Ending | None = None
        self._told: set[str] = set()  # nodes that know how the run ended

    @classmethod
    def in_place_of(
        cls, view: View, least: int, most: int, me: Node, timeout_s: float, key: bytes
    ) -> Leader:
        """Continue where the leader of `view` has ended."""
        found = cls(least, most, me, timeout_s, key, view.run, view.full_world)
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
        self.close()
        self._store = HostedStore(me.address, 0, self._timeout_s, self._key)
        self.members.open(ready)
        ranks = sum(node.ranks for node in ready)
        self._full_world = self._full_world or self.members.most * max(n.ranks for n in ready)
        titles = ", ".join(node.title for node in ready)
        return f"round {self.members.number}: {titles}; {ranks} ranks"

    def close(self) -> None:
        """Close the store of the last round."""
        if self._store is not None:
            self._store.close()
        self._store = None

    # What others say

    def hear_beat(self, message: Message, me: Node) -> Message:
        members = self.members
        least, most = _COUNTS.validate_python(message["nodes"])
        if (members.least, members.most) != (least, most):
            return {
                "problem": f"--nnodes {least}:{most} here, but {members.least}:{members.most} on "
                f"{me.title}; give the same everywhere"
            }
        node = parse_node(message["node"])
        if node.node_rank >= most or node.name == me.name:
            raise ValueError(f"{node.title} is not one of {most} nodes")
        members.hear(node, time.monotonic())
        view = self.view(me)
        if view.ended is not None or view.finished:
            self._told.add(node.name)
        return asdict(view)

    def hear_fault(self, message: Message) -> Message:
        """Give one verdict per round, unless a later fault says more than the first."""
        values = {key: message[key] for key in ("fault", "limits", "title", "round")}
        report = _REPORT.validate_python(values)
        fault, number = replace(report.fault, kind=printable(report.fault.kind)), report.round
        if report.limits is not None and self.policy.limits is None:
            self.policy.limits = Limits(*report.limits)
        known = self._verdict
        if known is None or known[0] != number or (known[1] and not fault.contact):
            verdict = self.policy.judge(fault, time.monotonic())
            self._verdict = known = (number, fault.contact, verdict)
        if not fault.contact and self._cause is None:
            self._cause = f"rank {fault.rank} on {report.title} failed ({fault.kind})"
        return known[2].__dict__

    def hear_end(self, message: Message) -> None:
        values = {key: message[key] for key in ("code", "text", "title", "name")}
        ending = _ENDING.validate_python(values)
        if self._ended is None:
            self._ended = ending
        self._told.add(ending.name)

    def untold(self, me: Node) -> bool:
        """Whether nodes that are there have still to hear that the run has ended."""
        view = self.view(me)
        if not (view.finished or view.ended):
            return False
        return bool(self.members.nodes.keys() - self._told - {me.name})


def gone(nodes: list[Node], key: bytes) -> list[Node]:
    """Those of `nodes` whose launcher has ended: their machine answers that nobody listens."""
    found = []
    for node in nodes:
        try:
            ask(node.address, node.port, {"op": "ping"}, key, 1.0)
        except Gone:
            found.append(node)
        except OSError:
            continue
    return found


def announce(where: tuple[str, int], me: Node, number: int, key: bytes) -> None:
    """Tell whoever listens there that this node leads the run: node 0, once it is back."""
    with suppress(OSError):
        ask(*where, {"op": "lead", "leader": asdict(me), "number": number}, key, 1.0)
