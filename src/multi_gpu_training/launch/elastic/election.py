"""Who leads after a leader was lost: terms, votes, and the word a node has given.

A node that confirms a leader keeps to it for PROMISE_S. After that it may vote for another, once
per term. Whoever has the votes of a quorum (quorum.py) leads. A refused connection does not shorten
a promise: a firewall's REJECT looks the same. A leader that leaves in an orderly way says so, and
frees the others at once.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from multi_gpu_training.distributed.round_lease import now
from multi_gpu_training.launch.elastic.leader import ask_all
from multi_gpu_training.launch.elastic.membership import (
    Address,
    Count,
    Node,
    Port,
    View,
    VoteRequest,
)
from multi_gpu_training.launch.elastic.messages import Message, ask
from multi_gpu_training.launch.elastic.quorum import PROMISE_S

VOTE_S = 3.0  # a candidate that has not won by then may be forgotten
RETRY_S = 1.0
_REQUEST = TypeAdapter(VoteRequest)


@dataclass(frozen=True)
class Vote:
    """The answer to a request. `leader`: where a leader is that the voter keeps to."""

    granted: bool
    term: Count
    leader: tuple[Address, Port] | None = None


_VOTE = TypeAdapter(Vote)


@dataclass
class Ballot:
    """What this node has promised, and when it may ask for votes itself."""

    term: int = 0
    kept: str = ""  # the name of the leader that this node keeps to
    until: float = 0.0
    left: set[str] = field(default_factory=set)  # names of nodes that left in an orderly way
    started: float = field(default_factory=now)
    ask_at: float | None = None  # when to ask for votes; None: the leader is there

    @property
    def fresh(self) -> bool:
        """Whether an earlier start of this node may still be bound by its word."""
        return now() - self.started < PROMISE_S

    def all_met(self) -> None:
        """Every node of the run, as it is now, follows one leader: no older word binds anybody."""
        self.started = now() - PROMISE_S

    def free_for(self, name: str) -> bool:
        """Whether this node may keep to the leader `name` now."""
        return self.kept in (name, "") or self.kept in self.left or now() >= self.until

    def keep_to(self, name: str, seconds: float | None = None) -> None:
        seconds = PROMISE_S if seconds is None else seconds
        self.kept, self.until, self.ask_at = name, now() + seconds, None

    def grant(self, request: VoteRequest) -> bool:
        """Vote for a candidate, if this node's word and an earlier vote allow it."""
        if self.fresh or request.term <= self.term or not self.free_for(request.node.name):
            return False
        self.term = request.term
        self.keep_to(request.node.name, VOTE_S)
        return True

    def due(self, place: int) -> bool:
        """Whether to ask for votes now, as the node at `place` in the roster: one after another."""
        if self.ask_at is None:
            self.ask_at = now() + min(place, 5) * RETRY_S
        return now() >= self.ask_at

    def again(self) -> None:
        """The votes were not enough: ask later. At random, so that two do not stay in step."""
        self.ask_at = now() + RETRY_S * (0.5 + random.random())


def parse_request(message: Message) -> VoteRequest:
    """Check what a candidate says. ValueError: it is wrong."""
    return _REQUEST.validate_python({k: v for k, v in message.items() if k != "op"})


@dataclass(frozen=True)
class Votes:
    """The answers to a request for votes."""

    votes: list[tuple[Node, Vote]]

    @property
    def granted(self) -> set[int]:
        """The node ranks that voted for the candidate."""
        return {node.node_rank for node, vote in self.votes if vote.granted}

    @property
    def term(self) -> int:
        """The highest term that anybody knows."""
        return max((vote.term for _, vote in self.votes), default=0)

    def leader(self, not_at: Collection[tuple[str, int]]) -> tuple[str, int] | None:
        """Where somebody leads already, unless it is at one of these places."""
        places = [vote.leader for _, vote in self.votes if vote.leader is not None]
        return next((place for place in places if place not in not_at), None)


def voters(view: View, me: Node, left: Collection[str], master: tuple[str, int]) -> list[Node]:
    """Whom to ask: the nodes of the round, and node 0, which may have been started again."""
    found = [n for n in view.roster if n.name != me.name and n.name not in left]
    if master not in {(n.address, n.port) for n in (*found, me)}:
        found.append(Node("0-anew", 0, *master, me.ranks))
    return found


def collect_votes(request: VoteRequest, asked: list[Node], key: bytes) -> Votes:
    """Ask these nodes; those that do not answer are left out."""
    message = {"op": "vote", **asdict(request)}

    def answer(node: Node) -> Vote | None:
        try:
            return _VOTE.validate_python(ask(node.address, node.port, message, key, 1.0))
        except (OSError, ValueError):
            return None

    answers = ask_all(asked, answer, at_once=64)
    return Votes([(node, vote) for node, vote in answers if vote is not None])
