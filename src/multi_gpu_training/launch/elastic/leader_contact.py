"""A node's contact with its leader: what it tells it, and what it makes of the answers.

An answer carries the leader's clock. The next beat returns it, and so confirms the leader at a time
of the leader's own clock, after which this node has kept to it: no clocks need to agree.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from multi_gpu_training.distributed.authenticated_channel import printable
from multi_gpu_training.distributed.round_lease import now
from multi_gpu_training.launch.elastic.election import Ballot
from multi_gpu_training.launch.elastic.membership import (
    Address,
    Count,
    Node,
    Port,
    Seconds,
    View,
    parse_view,
)
from multi_gpu_training.launch.elastic.messages import Message
from multi_gpu_training.launch.elastic.quorum import Quorum

_COUNT: TypeAdapter[int] = TypeAdapter(Count)
_SECONDS: TypeAdapter[float] = TypeAdapter(Seconds)
_WHERE: TypeAdapter[tuple[str, int]] = TypeAdapter(tuple[Address, Port])


class LeaderContact:
    """Where the leader listens as far as this node knows, and when and what it answered."""

    def __init__(self, where: tuple[str, int], ballot: Ballot) -> None:
        self.where = where
        self.heard = now()
        self.confirmed = 0.0  # when this node asked for the last answer
        self.refusals = 0  # in a row: nobody listens there, or nobody who leads this run
        self.problem: str | None = None  # this node was started with other flags
        self.refused: str | None = None  # why the leader and this node do not talk
        self._ballot = ballot
        self._name = ""  # of the leader
        self._echo: float | None = None  # its clock, as it said
        self._serial = 0  # of the view that it sent

    @property
    def title(self) -> str:
        return f"the leader at {self.where[0]}:{self.where[1]}"

    def follow(self, where: tuple[str, int]) -> None:
        """Tell the node at `where` from now on. It counts as heard once it has answered."""
        self.where, self.refusals = where, 0
        self._name, self._echo, self._serial = "", None, 0

    def beat(self, me: Node, least: int, quorum: Quorum, view: View | None) -> Message:
        return {
            "op": "beat",
            "node": asdict(me),
            "nodes": [least, quorum.most],
            "witness": quorum.witness,
            "allow_minority": quorum.allow_minority,
            "term": self._ballot.term,
            "leader": self._name,
            "echo": self._echo,
            "fresh": self._ballot.fresh,
            "known": [self._serial, view.number if view is not None else 0],
        }

    def take(self, answer: Message, began: float, me: Node, before: View | None) -> View | None:
        """What the leader says, if it is this node's; with that the node keeps to it.

        `before` is the view that this node has, `began` when it asked.
        """
        self.refused = None
        if "problem" in answer:
            self.problem = printable(str(answer["problem"]))
            return None
        try:
            if "ask" in answer:
                where = _WHERE.validate_python(answer["ask"])
                if where in (self.where, (me.address, me.port)):
                    self.refusals += 1  # it does not lead, and knows of nobody else
                else:
                    self.follow(where)
                return None
            serial = _COUNT.validate_python(answer["serial"])
            stamp = _SECONDS.validate_python(answer["stamp"])
            view = self._view(answer, serial, before)
        except (KeyError, TypeError, ValueError):
            return None
        leads = view.leader.name
        if before is not None and view.number < me.round and leads != before.leader.name:
            self.refusals += 1  # it was started again and knows nothing of the run
            return None
        if not self._ballot.free_for(leads):
            return None
        self._ballot.keep_to(leads)
        self._ballot.term = max(self._ballot.term, view.term)
        self.heard, self.confirmed, self.refusals = now(), began, 0
        self._name, self._echo, self._serial = leads, stamp, serial
        return view

    def _view(self, answer: dict[str, Any], serial: int, before: View | None) -> View:
        """The leader's view; it sends only what is new."""
        if "view" in answer:
            values = dict(answer["view"])
            if values["roster"] is None and before is not None:
                if values["number"] != before.number:
                    raise ValueError("the roster of another round is needed")
                values["roster"] = [asdict(node) for node in before.roster]
            return parse_view(values)
        if before is None or serial != self._serial:
            raise ValueError("another view is needed")
        return before
