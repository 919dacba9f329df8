"""Which part of a run's nodes may train while the others are away. Pure decisions.

Two parts must never train at once, so any two sets of nodes that suffice have one in common:

    no witness      more than half of the nodes the run was started with; exactly half where all
                    the others said that they leave (they ended their ranks first)
    a witness       all nodes, or the witness, which keeps to one leader at a time

What two such sets have in common keeps its word to one leader. A node has ranks in one round at a
time, and a step needs the ranks of every node in its round. The witness has no ranks, so its word
is bounded in time, like that of nodes about what may be published: whoever confirms a leader keeps
to it for PROMISE_S, and the leader's ranks stop LEASE_S after they were last confirmed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

LEASE_S = 5.0
# Longer than a lease, counted from later: clocks may run differently by a sixth.
PROMISE_S = 6.0


@dataclass(frozen=True)
class Quorum:
    """What a run on at most `most` nodes was told about its parts; the same on every node."""

    most: int
    witness: str | None = None
    allow_minority: bool = False

    def enough(self, here: Collection[int], left: Collection[int] = (), held: bool = False) -> bool:
        """Whether the nodes with these numbers may train without the others.

        `left`: those that left in an orderly way. `held`: the witness keeps to their leader.
        """
        if self.allow_minority or len(here) >= self.most:
            return True
        if self.witness is not None:
            return held
        half = 2 * len(here) == self.most and len({*here, *left}) == self.most
        return half or 2 * len(here) > self.most

    def confirmed_at(
        self,
        heard: Mapping[int, float],
        left: Collection[int] = (),
        witness_at: float | None = None,
        fresh: Collection[int] = (),
    ) -> float | None:
        """The newest time at which enough nodes, or the witness, had confirmed a leader.

        `fresh` nodes were started so recently that an earlier start of them may have confirmed
        another leader. They count only where every node is there: then nobody else can lead.
        """
        if len(heard) >= self.most:
            everybody = min(heard.values())
        else:
            everybody = None
        times = sorted((at for rank, at in heard.items() if rank not in fresh), reverse=True)
        found = [everybody] if everybody is not None else []
        if self.allow_minority and times:
            found.append(times[0])
        elif self.witness is not None:
            found += [witness_at] if witness_at is not None else []
        else:
            old = [rank for rank in heard if rank not in fresh]
            needed = self.most // 2 + 1
            if len(times) >= needed:
                found.append(times[needed - 1])
            elif self.enough(old, left) and times:
                found.append(times[-1])
        return max(found, default=None)

    def words(self, here: int) -> str:
        """Why so many nodes are too few."""
        if self.witness is not None:
            return (
                f"{here} of {self.most} nodes are here, and the witness {self.witness} does not "
                "confirm this side"
            )
        return (
            f"{here} of {self.most} nodes are here, and a part of a run continues only with more "
            "than half of them, or with --witness"
        )
