"""Which nodes take part in a run: what they say about themselves, and who is in a round.

A *round* is one set of nodes that train together; when it changes or fails, a new one follows.
Membership makes pure decisions; `now` is any monotonic clock in seconds.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from multi_gpu_training.distributed.authenticated_channel import printable
from multi_gpu_training.launch.elastic.quorum import LEASE_S, Quorum
from multi_gpu_training.launch.restart_policy import Fault
from multi_gpu_training.run_places import name_problem

# A node is lost after so long a silence. Shorter absences are not a fault: the ranks' connections
# wait and then continue.
LOST_S = 10.0
# A run that may have more nodes than it needs waits this long for them before it begins.
LAST_CALL_S = 10.0
# A second launcher for a node number waits so long for a sign of life of the first.
CLAIM_S = 2.0


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
    term: Count  # which election made it the leader
    number: Count
    # Who is in it, the leader first; of a large round most nodes are told themselves alone.
    roster: list[Node]
    size: Count  # nodes in the round
    world: Count  # ranks in the round
    store_port: Port
    full_world: Count  # ranks of the run when all its nodes are there
    broken: Text | None
    joining: bool  # the only change is a node that joins
    stopped: bool  # every other node of the round has stopped, too
    cause: Text | None  # the first fault of the round that no other one caused
    finished: bool
    ended: Ending | None  # by a node that gave the run up
    place: Count = 0  # of the node that is told this, in the whole roster
    first_rank: Count = 0  # of that node


@dataclass(frozen=True)
class Beat:
    """What a node tells its leader all the time. It confirms the leader at the time `echo`.

    `known` is the number of the leader's view that the node has, and of the roster in it.
    """

    node: Node
    nodes: tuple[Count, Count]  # the least and the most of them
    witness: Title | None = None
    allow_minority: Annotated[bool, Field(strict=True)] = False
    term: Count = 0
    leader: Annotated[str, Field(strict=True, max_length=200)] = ""  # that it keeps to
    echo: Seconds | None = None  # that leader's own clock, from its last answer
    fresh: Annotated[bool, Field(strict=True)] = True  # see quorum.py
    known: tuple[Count, Count] = (0, 0)


@dataclass(frozen=True)
class VoteRequest:
    """A node asks to lead after the leader of round `number` was lost; `left` are names."""

    node: Node
    term: Count
    number: Count
    left: Annotated[list[PlainName], Field(max_length=10_000)]


_NODE, _VIEW = TypeAdapter(Node), TypeAdapter(View)


def parse_node(values: Any) -> Node:
    """Check what another launcher, or a stranger, says about itself. ValueError: it is wrong."""
    return _NODE.validate_python(values)


def parse_view(values: Any) -> View:
    """Check what a leader answers. ValueError: it is wrong."""
    return _VIEW.validate_python(values)


class Membership:
    """At least `least` nodes, and a quorum of them; `leader` is the node that keeps this."""

    def __init__(self, least: int, quorum: Quorum, leader: Node, now: float) -> None:
        self.least = least
        self.most = quorum.most
        self.quorum = quorum
        self.leader = leader.name
        self.number = 0  # of the round
        self.roster: list[Node] = []  # who takes part in it, as it began
        self.nodes: dict[str, Node] = {}
        self.left: set[int] = set()  # node ranks whose launchers ended in an orderly way
        self.witness_at: float | None = None  # when the witness last confirmed this leader
        self.fresh: set[str] = set()
        self.places: dict[str, tuple[int, int]] = {}  # in the roster: index, and first rank
        self._names: set[str] = set()  # of the roster
        self._by_rank: dict[int, str] = {}
        self._claims: dict[str, float] = {}  # second launchers for a number, and since when
        self._replaced: dict[str, Node] = {}  # launchers that fell silent, and who took their place
        self._seen: dict[str, float] = {}
        self._confirmed: dict[str, float] = {}
        self._lost: dict[str, str] = {}  # name -> why
        self._since = now  # when the gathering of the next round began
        self._highest = 0  # round that any node has taken part in

    def claim(self, node: Node, now: float) -> Node | None:
        """The other launcher that has the number of this one; None if this one may have it.

        The node itself is returned while that is not known yet.
        """
        if node.name in self._replaced:
            return self._replaced[node.name]
        other = self._by_rank.get(node.node_rank)
        if other is None or other == node.name:
            return None
        since = self._claims.setdefault(node.name, now)
        if other == self.leader or self._seen[other] > since:
            return self.nodes[other]
        # It was started anew, and the first one ended without a word.
        return node if now - since < CLAIM_S else None

    def hear(self, node: Node, now: float) -> bool:
        """A node has told about itself; whether that is news."""
        other = self._by_rank.get(node.node_rank)
        if other is not None and other != node.name:
            self.lose(other, "was started anew")
            self._replaced[other] = node
        if node.name in self._lost and node.phase != "waiting":
            return False  # it will learn that its round went on without it
        news = self.nodes.get(node.name) != node
        self.nodes[node.name] = node
        self._by_rank[node.node_rank] = node.name
        self._highest = max(self._highest, node.round)
        self._seen[node.name] = now
        return news

    def confirm(self, name: str, at: float, fresh: bool) -> None:
        """A node keeps to this leader since `at`; fresh: see `Quorum.confirmed_at`."""
        if name in self.nodes:
            self._confirmed[name] = at
            self.mark(name, fresh)

    def mark(self, name: str, fresh: bool) -> None:
        """Note whether a node was started recently."""
        if fresh:
            self.fresh.add(name)
        else:
            self.fresh.discard(name)

    def lose(self, name: str, why: str) -> None:
        """A node is gone, for this round at least."""
        node = self.nodes.pop(name, None)
        if node is not None and self._by_rank.get(node.node_rank) == name:
            del self._by_rank[node.node_rank]
        self._seen.pop(name, None)
        self._confirmed.pop(name, None)
        self.fresh.discard(name)
        if name in self._names:
            self._lost.setdefault(name, why)

    def leave(self, node: Node) -> None:
        """A node has ended its ranks and leaves."""
        other = self._by_rank.get(node.node_rank)
        self.lose(node.name, "has left")
        if other in (None, node.name):  # else another launcher is that node by now
            self.left.add(node.node_rank)

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

    def lease_until(self, now: float, joining: Collection[int] = ()) -> float:
        """Until when the leader may train: a quorum keeps to it at least as long.

        `joining` are node ranks that are about to be in a round again, after they had left.
        """
        heard = {self.nodes[name].node_rank: at for name, at in self._confirmed.items()}
        fresh = {self.nodes[name].node_rank for name in self.fresh if name in self.nodes}
        if self.leader in self.nodes:
            heard[self.nodes[self.leader].node_rank] = now
        at = self.quorum.confirmed_at(heard, self.left - {*joining}, self.witness_at, fresh)
        return 0.0 if at is None else at + LEASE_S

    @property
    def losses(self) -> list[str]:
        """Who of the present round is gone, and how."""
        return [f"{n.title} {self._lost[n.name]}" for n in self.roster if n.name in self._lost]

    @property
    def others_stopped(self) -> bool:
        """Every other node of the round that is there has stopped training, too."""
        others = [n for n in self.roster if n.name != self.leader and n.name in self.nodes]
        return all(self.nodes[n.name].phase in ("waiting", "failed") for n in others)

    def broken(self, now: float) -> str | None:
        """Why the present round cannot go on as it is, or None."""
        if not self.roster or self.finished():
            return None
        if self.losses:
            return "; ".join(self.losses)
        for node in self.roster:
            present = self.nodes[node.name]
            if present.phase == "waiting" and present.round >= self.number:
                return f"the ranks of {node.title} have to be started again"
        if now - self.lease_until(now) > LOST_S - LEASE_S:
            return self.quorum.words(len(self.nodes))
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
        held = self.witness_at is not None and now < self.witness_at + LEASE_S
        ranks = {node.node_rank for node in waiting}
        if not self.quorum.enough(ranks, self.left, held) or now > self.lease_until(now, ranks):
            return None
        # By number, so that ranks keep theirs from round to round.
        waiting.sort(key=lambda node: (node.name != self.leader, node.node_rank, node.name))
        return waiting[: self.most]

    def open(self, nodes: list[Node]) -> None:
        """The next round begins."""
        self.take_up(max(self.number, self._highest) + 1, nodes)
        self.left -= {node.node_rank for node in nodes}

    def take_up(self, number: int, roster: list[Node]) -> None:
        """Stand in a round, with nobody lost."""
        self.number, self.roster = number, list(roster)
        self._names = {node.name for node in roster}
        first = list(itertools.accumulate((node.ranks for node in roster), initial=0))
        self.places = {node.name: (i, first[i]) for i, node in enumerate(roster)}
        self._lost.clear()
