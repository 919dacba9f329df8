"""Which environments meet in which step of an update.

A pass shows every environment once. Environments are cut into runs of neighbours as long as
there are minibatches, and each run sends one member, at random, to each minibatch: whoever holds
a stretch of environments has nearly the same number in every minibatch. The minibatches are the
same on any number of ranks; each rank takes the environments that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from multi_gpu_training.data.order import Share, cut, derive_seed


def minibatches(
    environments: int, count: int, seed: int, number: int, shuffle: bool = True
) -> list[list[int]]:
    """The environments of each of `count` minibatches in pass `number`, sorted."""
    random = np.random.default_rng(derive_seed(seed, number))
    found: list[list[int]] = [[] for _ in range(count)]
    for first in range(0, environments, count):
        order = random.permutation(count) if shuffle else np.arange(count)
        for place, environment in enumerate(range(first, min(first + count, environments))):
            found[order[place]].append(environment)
    return found


def shares(
    batch: list[int], held: range, number: int, position: int, accumulation: int = 1
) -> Iterator[Share]:
    """What the rank that holds `held` does for one minibatch: micro-batch after micro-batch."""
    mine = [i for i in batch if i in held]
    for micro in range(accumulation):
        start, stop = cut(len(mine), accumulation, micro)
        yield Share(
            epoch=number,
            position=position,
            indices=tuple(mine[start:stop]),
            count=stop - start,
            window_count=len(batch),
            first=micro == 0,
            last=micro == accumulation - 1,
            key=position,
        )
