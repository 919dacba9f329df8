"""How the launchers of a run on several nodes find each other, again and again.

Every launcher listens on its own address and tells the leader about itself twice per second. The
leader, node 0 at first, forms the rounds (leader.py, membership.py). A round begins only with a
quorum of the nodes (quorum.py), so that two parts of a run never train at once.

    answer                means                        consequence
    "left"                the launcher ended in order  the others continue without it; if it led,
                                                       the next one asks for votes
    connection refused    ended, or a firewall         not in the next round; if it led: votes, once
                                                       nobody is bound to it any more
    none for LOST_S       cut off, or switched off     the same
    less than a quorum    others may train             wait for them, then give up
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
from multi_gpu_training.distributed.round_lease import RoundLease, now
from multi_gpu_training.errors import ConfigError, RankFailure
from multi_gpu_training.launch.elastic.election import (
    Ballot,
    Vote,
    collect_votes,
    parse_request,
    voters,
)
from multi_gpu_training.launch.elastic.leader import Leader, announce, ask_all, gone
from multi_gpu_training.launch.elastic.leader_contact import LeaderContact
from multi_gpu_training.launch.elastic.membership import (
    LOST_S,
    Count,
    Node,
    NodePhase,
    View,
    VoteRequest,
    parse_node,
)
from multi_gpu_training.launch.elastic.messages import Gone, Message, MessageServer, ask
from multi_gpu_training.launch.elastic.quorum import LEASE_S, Quorum
from multi_gpu_training.launch.elastic.witness import Witness
from multi_gpu_training.launch.restart_policy import Fault, Limits, RestartVerdict

BEAT_S = 0.5
_HASTY_BEAT_S = 0.2  # while a change is under way
_BEATS_PER_S = 400  # that a leader gets at most; with many nodes each of them speaks less often
_QUIET_BEATS = 3  # after that a node is asked whether it is there
_REFUSALS = 2
_COUNT: TypeAdapter[int] = TypeAdapter(Count)
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
        witness: Witness | None = None,
        quorum: Quorum | None = None,
    ) -> None:
        self.least, self.most = least, most
        self.timeout_s = timeout_s
        self.quorum = quorum or Quorum(most)
        self._key = key  # of every message between launchers
        self._witness = witness
        self._witness_silent = False
        self._release_witness = False
        self._master = master
        self._ballot = Ballot()
        self._contact = LeaderContact(master, self._ballot)
        self._lease: RoundLease | None = None
        self._view: View | None = None
        self._leader: Leader | None = None  # on the node that leads
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
                self._leader = Leader(least, self.quorum, self.me, timeout_s, key)
        self._beats = threading.Thread(target=self._beat, name="launcher-beats", daemon=True)
        self._beats.start()

    # What the engine of this node asks

    def set_lease(self, lease: RoundLease) -> None:
        """Keep `lease` up to date: how long the ranks here may train."""
        self._lease = lease

    def next_round(self, check: Callable[[], None] = lambda: None) -> tuple[int, int]:
        """Wait for the next round with this node in it: its place there, and how many nodes.

        `check` is called often, and may raise to end the waiting.
        """
        before = self.me.round
        why = self.why_again() if before else None
        if why is not None:
            say(why)
        begun, told = time.monotonic(), False
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
            waited = time.monotonic() - begun
            if waited > self.timeout_s:
                raise NotMet(self._missing())
            if before and waited > 3.0 and not told:
                told = True
                say(f"not training, and waiting for up to {self.timeout_s:g} s: {self._missing()}")
            time.sleep(0.05)

    def shutdown(self) -> None:
        """Leave, after all others have heard how the run ended, and tell those that go on.

        The ranks here must have ended.
        """
        deadline = time.monotonic() + LOST_S
        while time.monotonic() < deadline:
            with self._lock:
                if self._leader is None or not self._leader.untold(self.me):
                    break
            time.sleep(0.05)
        self._closing = True
        self._wake.set()
        self._beats.join()
        if self._witness is not None and (self._leader is not None or self._release_witness):
            with suppress(OSError):
                self._witness.release(self.me.name)
        self._say_goodbye()
        self._server.close()
        if self._leader is not None:
            self._leader.close()
        self._leader = None

    def _say_goodbye(self) -> None:
        view = self._view
        if view is None or not self.me.round or view.finished or view.ended is not None:
            return
        message = {"op": "left", "node": asdict(self.me)}

        def tell(node: Node) -> None:
            with suppress(OSError):
                ask(node.address, node.port, message, self._key, 1.0)

        ask_all([node for node in view.roster if node.name != self.me.name], tell)

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
        return self.round.first_rank

    @property
    def world(self) -> int:
        return self.round.world

    def phase(self, phase: NodePhase) -> None:
        with self._lock:
            self.me = replace(self.me, phase=phase)
            self._look()
        self._wake.set()

    def fault_elsewhere(self) -> str | None:
        """The fault on another node that ended the ranks here; None if none is known."""
        self.phase("failed")
        deadline = time.monotonic() + LOST_S + 4.0
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
        if self._contact.problem is not None:
            return "the leader refuses this node"
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

    def _answer(self, message: Message) -> Message | bytes:
        with self._lock:
            operation = message["op"]
            if operation == "lead":
                self._hear_leader(message)
            elif operation == "vote":
                return asdict(self._hear_candidate(parse_request(message)))
            elif operation == "left":
                self._hear_left(parse_node(message["node"]))
            elif operation != "ping" and self._leader is None:
                return {"ask": list(self._contact.where)}
            elif operation == "beat" and self._leader is not None:
                return self._leader.hear_beat(message, self.me)
            elif operation == "fault" and self._leader is not None:
                return self._leader.hear_fault(message)
            elif operation == "end" and self._leader is not None:
                self._leader.hear_end(message)
            return {}

    @property
    def _leads(self) -> bool:
        """Whether this node leads a round, and a quorum keeps to it."""
        leader = self._leader
        return bool(leader and leader.members.number) and self._lease_until() > now()

    def _hear_leader(self, message: Message) -> None:
        """Join another node that leads a run which is further on.

        Nothing but its address and the number of the round is used: what the run is called and
        where it is kept follows from this node's own config.
        """
        leader = parse_node(message["leader"])
        number, term = map(_COUNT.validate_python, (message["number"], message["term"]))
        if self._leads or not (self._leader or self._ballot.free_for(leader.name)):
            return
        if self._leader is not None:
            if (term, number) <= (self._leader.term, self._leader.members.number):
                return
            say(f"{leader.title} took over the run while this node was gone; joining it")
        self._follow((leader.address, leader.port))

    def _hear_candidate(self, request: VoteRequest) -> Vote:
        """Vote for a node that wants to lead, unless there is a leader or it knows too little."""
        ballot, candidate = self._ballot, request.node
        if self._view is not None:
            ballot.left |= set(request.left) & {node.name for node in self._view.roster}
        number = self._leader.members.number if self._leader is not None else self.me.round
        if self._leads:
            return Vote(False, ballot.term, (self.me.address, self.me.port))
        if request.number < number or not ballot.grant(request):
            bound = self._leader is None and not ballot.free_for(candidate.name)
            return Vote(False, ballot.term, self._contact.where if bound else None)
        self._follow((candidate.address, candidate.port))
        return Vote(True, ballot.term)

    def _hear_left(self, node: Node) -> None:
        self._ballot.left.add(node.name)
        if self._leader is not None:
            self._leader.hear_left(node)
        self._wake.set()

    def _follow(self, where: tuple[str, int]) -> None:
        """Tell the node at `where` about this one from now on; this node does not lead."""
        if self._leader is None and where == self._contact.where:
            self._contact.refusals = 0
            return  # what was heard from there stays: a leader announces itself again and again
        if self._leader is not None:
            self._leader.close()
            self._release_witness = True
            if not self.me.round:
                self._view = None
        self._leader = None
        self._contact.follow(where)

    def _tell(self, message: Message) -> Message | None:
        """The answer of the leader, which may be this node."""
        with self._lock:
            if self._leader is not None:
                answer = self._answer(message)
                self._look()
                assert isinstance(answer, dict)
                return answer
        with suppress(OSError):
            answer = ask(*self._contact.where, message, self._key)
            return None if "ask" in answer else answer
        return None

    # The beats, in their own thread

    def _beat(self) -> None:
        while not self._closing:
            pace_s = BEAT_S if self.me.phase == "training" else _HASTY_BEAT_S
            many = self._view.size if self._view is not None else 0
            self._wake.wait(max(pace_s, many / _BEATS_PER_S))
            self._wake.clear()
            try:
                leader = self._leader
                if leader is not None:
                    self._look_after_others(leader)
                else:
                    self._tell_leader()
                self._extend_lease()
                if self._release_witness and self._witness is not None:
                    self._release_witness = False
                    self._witness.release(self.me.name)
                if self._should_lead():
                    self._ask_for_votes()
            except Exception:
                # A node without beats would be lost in silence: say it, and go on.
                text = traceback.format_exc()
                if text not in self._failed_beats:
                    self._failed_beats.add(text)
                    say(f"an error between launchers, which continue:\n{printable(text, 5000)}")

    def _look_after_others(self, leader: Leader) -> None:
        self._ask_witness(leader)
        with self._lock:
            self._look()
            quiet_s = _QUIET_BEATS * max(BEAT_S, len(leader.members.roster) / _BEATS_PER_S)
            quiet = leader.members.quiet(now(), quiet_s)
        self._extend_lease()
        for node in gone(quiet, self._key):
            with self._lock:
                leader.members.lose(node.name, "ended")
        if self._master != (self.me.address, self.me.port) and leader.members.number:
            announce(self._master, self.me, leader.term, leader.members.number, self._key)

    def _ask_witness(self, leader: Leader) -> None:
        """Have the witness keep to this leader."""
        if self._witness is None:
            return
        began, members = now(), leader.members
        try:
            held = self._witness.hold(self.me.name, began < (members.witness_at or 0.0) + LEASE_S)
        except OSError as error:
            if not self._witness_silent:
                say(f"the witness {self.quorum.witness} does not answer: {error}")
            self._witness_silent = True
            return
        self._witness_silent = False
        with self._lock:
            members.witness_at = began if held else None

    def _look(self) -> None:
        """On the leading node: refresh its own view."""
        if self._leader is not None:
            self._leader.members.mark(self.me.name, self._ballot.fresh)
            self._view, self._contact.heard = self._leader.view(self.me), now()

    def _lease_until(self) -> float:
        """Until when the round of this node is confirmed."""
        if self._leader is not None:
            return self._leader.members.lease_until(now())
        return self._contact.confirmed + LEASE_S

    def _extend_lease(self) -> None:
        with self._lock:
            view = self._view
            if self._lease is None or view is None or view.number != self.me.round:
                return
            # A leader that took over from that of this round does not let the round continue.
            if self._leader is not None or view.broken is None or view.joining:
                self._lease.extend(self._lease_until())

    def _tell_leader(self) -> None:
        contact, began = self._contact, now()
        where = contact.where
        message = contact.beat(self.me, self.least, self.quorum, self._view)
        try:
            answer = ask(*where, message, self._key)
        except Refused as error:
            if contact.refused is None:
                say(f"the launcher at {where[0]}:{where[1]}: {error}")
            contact.refused = str(error)
            return
        except Gone:
            contact.refusals += 1
            return
        except OSError:
            return
        with self._lock:
            if self._leader is None and contact.where == where:
                self._view = contact.take(answer, began, self.me, self._view) or self._view

    # After a leader was lost

    def _should_lead(self) -> bool:
        """Whether to ask the others for their votes now."""
        view, ballot = self._view, self._ballot
        if self._closing or view is None or not self.me.round:
            return False
        if view.finished or view.ended is not None or len(view.roster) < view.size:
            return False
        if self._leader is not None:
            lost = now() - self._lease_until() > LOST_S - LEASE_S
        else:
            refused = self._contact.refusals >= _REFUSALS and ballot.free_for(self.me.name)
            left = view.leader.name in ballot.left and ballot.kept in (view.leader.name, "")
            lost = left or refused or now() - self._contact.heard > LOST_S
        if not lost:
            ballot.ask_at = None
            return False
        names = [n.name for n in view.roster if n.name != view.leader.name]
        return ballot.due(names.index(self.me.name) if self.me.name in names else 0)

    def _ask_for_votes(self) -> None:
        with self._lock:
            ballot, view = self._ballot, self.round
            if not ballot.free_for(self.me.name):
                return  # it has voted meanwhile
            ballot.term += 1
            term = ballot.term
            number = max(view.number, self.me.round)
            request = VoteRequest(self.me, term, number, sorted(ballot.left))
        asked = voters(view, self.me, ballot.left, self._master)
        outcome = collect_votes(request, asked, self._key)
        left = [node for node in view.roster if node.name in ballot.left]
        elsewhere = outcome.leader({(node.address, node.port) for node in (*left, self.me)})
        if elsewhere is not None:
            with self._lock:
                if ballot.term == term and not self._leads and elsewhere != self._contact.where:
                    self._follow(elsewhere)
                ballot.again()
            return
        began, held = now(), False
        if self._witness is not None and self._leader is None:
            with suppress(OSError):
                held = self._witness.hold(self.me.name, False)
        with self._lock:
            here = {self.me.node_rank, *outcome.granted}
            won = self.quorum.enough(here, {node.node_rank for node in left}, held)
            if ballot.term == term and won:
                self._lead(view, term, left, began if held else None)
                return
            self._release_witness |= held
            ballot.term = max(ballot.term, outcome.term)
            ballot.again()

    def _lead(self, view: View, term: int, left: list[Node], witness_at: float | None) -> None:
        """This node has won: continue the run of `view`."""
        self._ballot.again()
        if self._leader is not None:  # it led before, and those that were away are back
            self._leader.term = term
            return
        self._leader = Leader.in_place_of(
            view, self.least, self.quorum, self.me, self.timeout_s, self._key, term, left
        )
        self._leader.members.witness_at = witness_at
        self._contact.follow((self.me.address, self.me.port))
        self._release_witness = False
        self._look()
        how = "has left" if view.leader.name in self._ballot.left else "is gone"
        say(f"{view.leader.title} {how}; {self.me.title} leads the run from now on")

    # States

    def _cut_off(self) -> str | None:
        """Why this node is cut off from the run: the leader is silent."""
        if self._leader is not None or now() - self._contact.heard <= LOST_S:
            return None
        return f"{self._contact.title} was silent for {LOST_S:g} s"

    def _joined(self, before: int) -> tuple[int, int] | None:
        view = self._view
        if view is None or view.number <= before or self._cut_off() is not None:
            return None
        if self.me.name not in {n.name for n in view.roster} or view.broken is not None:
            return None
        self.me = replace(self.me, phase="training", round=view.number)
        if view.size == self.most:
            self._ballot.all_met()
        self._look()
        return view.place, view.size

    def _raise_if_ended(self) -> None:
        if self._contact.problem is not None:
            raise ConfigError(self._contact.problem)
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
            if len(waiting) < self.least:
                return f"{len(waiting)} of at least {self.least} nodes came"
            return self.quorum.words(len(waiting))
        if self._contact.refused is not None:
            return self._contact.refused
        silent = self._cut_off()
        if self.me.round and (silent is not None or self._contact.refusals):
            silent = silent or f"{self._contact.title} refuses connections"
            return f"{silent}; {self.quorum.words(1)}"
        if silent is not None or self._view is None:
            return "the leader did not answer"
        titles = ", ".join(node.title for node in self._view.roster) or "nobody yet"
        return f"the run of at most {self.most} nodes has {titles}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
