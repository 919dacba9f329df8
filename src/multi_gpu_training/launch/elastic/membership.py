"""Which nodes take part in a run, as seen by the node that leads it.

A *round* is one set of nodes that train together; when it changes or fails, a new one follows.
Pure decisions: `now` is any monotonic clock in seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from multi_gpu_training.config import name_problem

# A node is lost after so long a silence. Shorter absences are not a fault: the ranks' connections
# wait and then continue.
LOST_S = 10.0
# A run that may have more nodes than it needs waits this long for them before it begins.
LAST_CALL_S = 10.0

NodePhase = Literal["waiting", "training", "failed", "done"]


@dataclass(frozen=True)
class Node:
    """What a node says about itself. `name` is new each time the node is started."""

    name: str
    node_rank: int
    address: str
    port: int
    ranks: int
    phase: NodePhase = "waiting"
    round: int = 0  # the last that it took part in

    @property
    def title(self) -> str:
        return f"node {self.node_rank} ({self.address})"

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Node:
        """Check what another launcher, or a stranger, says about itself."""
        node = cls(**{key: values[key] for key in cls.__dataclass_fields__})
        kinds = {"name": str, "address": str, "phase": str}
        for key in cls.__dataclass_fields__:
            if not isinstance(getattr(node, key), kinds.get(key, int)):
                raise TypeError(f"{key}={getattr(node, key)!r}")
        problem = name_problem(node.name)
        if problem is not None:
            raise ValueError(f"name={node.name!r:.200}: {problem}")
        return node


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
