"""From how many GPUs on a sample costs more GPU time than on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

DEARER = 1.1
MOST_SPANS = 4


@dataclass(frozen=True)
class Rising:
    """`counts` are the numbers of GPUs that were looked at, ascending; `dearer` those of them
    where a sample costs 10 % more GPU time than on one GPU."""

    counts: tuple[int, ...]
    dearer: frozenset[int]

    @staticmethod
    def of(counts: Sequence[int], cost: Callable[[int], float | None]) -> Rising:
        """`cost` is GPU time against that of one GPU; None where it is not known."""
        costs = {count: cost(count) for count in sorted(set(counts))}
        known = {count: value for count, value in costs.items() if value is not None}
        return Rising(tuple(known), frozenset(n for n, value in known.items() if value >= DEARER))

    @property
    def lastingly_from(self) -> int | None:
        """The smallest number from which all that follow are dearer."""
        found = None
        for count in reversed(self.counts):
            if count not in self.dearer:
                break
            found = count
        return found

    def sentence(self) -> str:
        """What is true of all the numbers; nothing where there are none."""
        if not self.counts:
            return ""
        most, lasting = self.counts[-1], self.lastingly_from
        spans = self._spans(before=lasting)
        if lasting is None and not spans:
            return f"up to {most} GPUs a sample never costs 10 % more GPU time than on one"
        if lasting is None:
            return f"on {spans} GPUs a sample costs 10 % more GPU time than on one, on {most} not"
        also = f", and so it does on {spans} GPUs" if spans else ""
        return f"from {lasting} GPUs on a sample costs 10 % more GPU time than on one{also}"

    def _spans(self, before: int | None) -> str:
        """`2-4, 7`: the dearer numbers, neighbours together."""
        spans: list[list[int]] = []
        near = False
        for count in self.counts:
            if count == before:
                break
            if count in self.dearer:
                if near:
                    spans[-1].append(count)
                else:
                    spans.append([count])
            near = count in self.dearer
        words = [f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans]
        more = ["other"] if len(words) > MOST_SPANS else []
        return " and ".join([", ".join(words[:MOST_SPANS]), *more])
