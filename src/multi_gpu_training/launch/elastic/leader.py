"""The node that leads a run: when a round begins, whether ranks restart, what others are told.

Leader acts on the decisions of membership.py: it hosts the ranks' store and answers the other
launchers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TypeVar

from pydantic import TypeAdapter

from multi_gpu_training.distributed.authenticated_channel import printable
from multi_gpu_training.distributed.round_lease import now
from multi_gpu_training.distributed.store_relay import HostedStore
from multi_gpu_training.launch.elastic.membership import (
    Beat,
    Ending,
    FaultReport,
    Membership,
    Node,
    View,
)
from multi_gpu_training.launch.elastic.messages import Gone, Message, ask
from multi_gpu_training.launch.elastic.quorum import Quorum
from multi_gpu_training.launch.restart_policy import Limits, RestartPolicy, RestartVerdict

# With many nodes looking at all of them for each message would cost n * n.
REFRESH_S = 0.2
# Nodes that know the whole roster, and can lead when the leader is lost.
SUCCESSORS = 16
_AT_ONCE = 16  # threads that ask other nodes
_ENDING, _REPORT, _BEAT = TypeAdapter(Ending), TypeAdapter(FaultReport), TypeAdapter(Beat)
_Answer = TypeVar("_Answer")


class Leader:
    """State of the leading node. Its owner makes sure that one thread at a time is in here."""

    def __init__(
        self,
        least: int,
        quorum: Quorum,
        me: Node,
        timeout_s: float,
        key: bytes,
        run: str | None = None,
        full_world: int = 0,
        term: int = 0,
    ) -> None:
        self.members = Membership(least, quorum, me, now())
        self.term = term
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
        self._heard_end: set[str] = set()  # nodes that know how the run ended
        self._view: View | None = None
        self._serial = 0  # of the view
        self._text = self._roster = ""  # the view as JSON
        self._refreshed = 0.0

    @classmethod
    def in_place_of(
        cls,
        view: View,
        least: int,
        quorum: Quorum,
        me: Node,
        timeout_s: float,
        key: bytes,
        term: int,
        left: Iterable[Node] = (),
    ) -> Leader:
        """Continue after the leader of `view` was lost; `left` are nodes that said goodbye."""
        found = cls(least, quorum, me, timeout_s, key, view.run, view.full_world, term)
        members, gone_by = found.members, {node.name for node in left}
        members.take_up(view.number, view.roster)
        for node in view.roster:
            if node.name in gone_by:
                found.hear_left(node)
            elif node.name != view.leader.name:
                members.hear(replace(node, phase="training", round=view.number), now())
            else:
                members.lose(node.name, "is gone")
        return found

    def view(self, me: Node) -> View:
        """What the other nodes are told now."""
        members, at = self.members, now()
        self._refreshed = at
        members.hear(me, at)
        members.forget_silent(at)
        broken = members.broken(at)
        found = View(
            self._run,
            me,
            self.term,
            members.number,
            members.roster,
            len(members.roster),
            sum(node.ranks for node in members.roster),
            0 if self._store is None else self._store.port,
            self._full_world,
            broken,
            broken is not None and broken == members.joining(),
            members.others_stopped,
            self._cause,
            members.finished(),
            self._ended,
        )
        before, self._view = self._view, found
        if found != before:
            self._serial += 1
            values = asdict(replace(found, roster=[]))
            for own in ("roster", "place", "first_rank"):
                del values[own]
            self._text = json.dumps(values)[:-1]
            if before is None or found.roster != before.roster:
                self._roster = json.dumps([asdict(node) for node in found.roster])
        return found

    def _told(self, name: str, has_roster: bool) -> str:
        """The view as JSON, for the node `name`. All rosters for all nodes would be n * n."""
        assert self._view is not None
        place, first_rank = self.members.places.get(name, (0, 0))
        roster = self._view.roster
        if has_roster:
            text = "null"
        elif len(roster) <= SUCCESSORS or 0 < place < SUCCESSORS:
            text = self._roster
        else:
            text = json.dumps([asdict(node) for node in (roster[0], *roster[place : place + 1])])
        return f'{self._text}, "roster": {text}, "place": {place}, "first_rank": {first_rank}}}'

    def gather(self) -> None:
        """The leading node itself waits for the next round."""
        self._cause = None
        self.members.gather(now())

    def open_round(self, me: Node) -> str | None:
        """Begin the next round if its nodes are there; what to say about it."""
        self.members.hear(me, now())
        ready = self.members.ready(now())
        if ready is None:
            return None
        self.close()
        self._store = HostedStore(me.address, 0, self._timeout_s, self._key)
        self.members.open(ready)
        ranks = sum(node.ranks for node in ready)
        if not self._full_world:
            # The global batch counts ranks that may come later: as many as the largest node has.
            away = self.members.most - len(ready)
            self._full_world = ranks + away * max(node.ranks for node in ready)
        titles = ", ".join(node.title for node in ready)
        return f"round {self.members.number}: {titles}; {ranks} ranks"

    def close(self) -> None:
        """Close the store of the last round."""
        if self._store is not None:
            self._store.close()
        self._store = None

    # What others say

    def hear_beat(self, message: Message, me: Node) -> bytes | Message:
        members, beat = self.members, _BEAT.validate_python(_without_op(message))
        node = beat.node
        problem = self._other_flags(beat, me)
        if problem is not None:
            return {"problem": problem}
        if node.node_rank >= members.most or node.name == me.name:
            raise ValueError(f"{node.title} is not one of {members.most} nodes")
        at, news = now(), False
        other = members.claim(node, at)
        if other is node:
            return {}
        if other is not None:
            where = f"{other.address}:{other.port}, whose launcher runs"
            return {
                "problem": f"--node-rank {node.node_rank} is taken by the machine at {where}; give "
                f"each machine its own number, from 0 to {members.most - 1}"
            }
        self.term = max(self.term, beat.term)
        # A leader that has just been started does not count nodes of a run that goes on.
        if members.number or not node.round:
            news = members.hear(node, at)
            if beat.leader == me.name and beat.echo is not None and beat.echo <= at:
                members.confirm(node.name, beat.echo, beat.fresh)
        if news or self._view is None or at - self._refreshed > REFRESH_S:
            self.view(me)
        assert self._view is not None
        if self._view.ended is not None or self._view.finished:
            self._heard_end.add(node.name)
        answer = f'"stamp": {at!r}, "serial": {self._serial}'
        if beat.leader == me.name and beat.known[0] == self._serial:
            return f"{{{answer}}}".encode()
        has_roster = beat.leader == me.name and beat.known[1] == self._view.number
        return f'{{{answer}, "view": {self._told(node.name, has_roster)}}}'.encode()

    def _other_flags(self, beat: Beat, me: Node) -> str | None:
        """What is wrong where a node was started with other flags than this one."""
        members, (least, most) = self.members, beat.nodes
        pairs = {
            "--nnodes": (f"{least}:{most}", f"{members.least}:{members.most}"),
            "--witness": (beat.witness, members.quorum.witness),
            "--allow-minority": (beat.allow_minority, members.quorum.allow_minority),
        }
        for flag, (theirs, ours) in pairs.items():
            if theirs != ours:
                return f"{flag} {theirs} here, but {ours} on {me.title}; give the same everywhere"
        return None

    def hear_fault(self, message: Message) -> Message:
        """Give one verdict per round, unless a later fault says more than the first."""
        values = {key: message[key] for key in ("fault", "limits", "title", "round")}
        report = _REPORT.validate_python(values)
        fault, number = replace(report.fault, kind=printable(report.fault.kind)), report.round
        if report.limits is not None and self.policy.limits is None:
            self.policy.limits = Limits(*report.limits)
        known = self._verdict
        if known is None or known[0] != number or (known[1] and not fault.contact):
            verdict = self.policy.judge(fault, now())
            self._verdict = known = (number, fault.contact, verdict)
        if not fault.contact and self._cause is None:
            self._cause = f"rank {fault.rank} on {report.title} failed ({fault.kind})"
        return known[2].__dict__

    def hear_end(self, message: Message) -> None:
        values = {key: message[key] for key in ("code", "text", "title", "name")}
        ending = _ENDING.validate_python(values)
        if self._ended is None:
            self._ended = ending
        self._heard_end.add(ending.name)

    def hear_left(self, node: Node) -> None:
        """A node has ended its ranks and leaves."""
        self.members.leave(node)

    def untold(self, me: Node) -> bool:
        """Whether nodes that are there have still to hear that the run has ended."""
        view = self.view(me)
        if not (view.finished or view.ended):
            return False
        return bool(self.members.nodes.keys() - self._heard_end - {me.name})


def _without_op(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "op"}


def ask_all(
    asked: list[Node], question: Callable[[Node], _Answer], at_once: int = _AT_ONCE
) -> list[tuple[Node, _Answer]]:
    """Ask nodes at the same time; `question` is called in threads and must not raise."""
    if not asked:
        return []
    with ThreadPoolExecutor(min(at_once, len(asked))) as threads:
        return list(zip(asked, threads.map(question, asked), strict=True))


def gone(nodes: list[Node], key: bytes) -> list[Node]:
    """Those of `nodes` whose port refuses us: the launcher has ended, or a firewall is there."""

    def is_gone(node: Node) -> bool:
        try:
            ask(node.address, node.port, {"op": "ping"}, key, 1.0)
        except Gone:
            return True
        except OSError:
            return False
        return False

    # Not all at once: those that stay silent are lost by their silence.
    return [node for node, found in ask_all(nodes[:_AT_ONCE], is_gone) if found]


def announce(where: tuple[str, int], me: Node, term: int, number: int, key: bytes) -> None:
    """Tell whoever listens there that this node leads the run: node 0, once it is back."""
    message = {"op": "lead", "leader": asdict(me), "term": term, "number": number}
    with suppress(OSError):
        ask(*where, message, key, 1.0)
