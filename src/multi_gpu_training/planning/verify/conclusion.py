"""What a diagnosis says, and the words that its causes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from multi_gpu_training.measure.tensor_sketch import Sketches, difference

Evidence = TypeVar("Evidence")


@dataclass
class Diagnosis:
    """causes: what makes the difference. not_comparable: why that is no fault of the script."""

    causes: list[str] = field(default_factory=list)
    not_comparable: str | None = None


def first_cause(
    causes: Sequence[Callable[[Evidence], str | None]], evidence: Evidence
) -> str | None:
    """What the first of these causes says that is one; they are asked in this order."""
    for cause in causes:
        said = cause(evidence)
        if said is not None:
            return said
    return None


def differing(one: Sketches, other: Sketches, tolerance: float) -> list[str]:
    """The names of the tensors that are further apart than `tolerance` of their length."""
    return [
        name
        for name in one
        if name in other
        and not difference(one[name], other[name]) <= tolerance * max(one[name][0], 1e-12)
    ]


def batchnorm_cause(names: Sequence[str]) -> str:
    return f"BatchNorm ({', '.join(names[:3])}) normalises each rank's part alone; set sync_bn=true"


def name_ranks(numbers: Sequence[int]) -> str:
    several = ", ".join(str(number) for number in numbers)
    return f"rank {several}" if len(numbers) == 1 else f"ranks {several}"
