"""How many environments each rank holds: equally many, as the user says, or by measured speed."""

from __future__ import annotations

from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.order import cut
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.measure.balance import UNEQUAL, Counts, allot, describe

ROUNDS = 3  # in which balance=measured looks for shares; balance=dynamic never ends
WHOLE = 1000  # what weights that a user gives are parts of


class EnvironmentShares:
    """`counts` of all ranks, who hold stretches of environments in the order of their numbers.

    What is computed does not depend on who holds which environment. So they may move between
    rollouts, and no rollout is spent on measuring: each tells how fast its rank is.
    """

    def __init__(self, total: int, placement: Placement, config: MultiGPUConfig) -> None:
        self.total, self._placement, self._config = total, placement, config
        ranks, weights = placement.dp_size, config.share_weights
        if total < ranks:
            raise ConfigError(
                f"num_envs={total} is smaller than world_size={ranks}; use at least {ranks} "
                "environments, or fewer ranks",
                code="MGT302",
            )
        if weights is not None and len(weights) != ranks:
            raise ConfigError(
                f"share_weights={weights} are for {len(weights)} ranks, but there are {ranks}; "
                "give one per rank, or drop them"
            )
        self.devices: list[str] = placement.gather_json(describe(placement.device))
        parts: Counts | None = None
        if weights is not None:
            parts = tuple(max(1, round(WHOLE * weight / sum(weights))) for weight in weights)
        bounds = [cut(total, ranks, rank, parts) for rank in range(ranks)]
        self.counts: Counts = tuple(stop - start for start, stop in bounds)
        if 0 in self.counts:
            raise ConfigError(
                f"share_weights={weights} leave rank {self.counts.index(0)} none of num_envs="
                f"{total} environments; use more environments, or weights that differ less"
            )
        self._rounds = 0

    @property
    def measures(self) -> bool:
        """Whether the next rollout may show that other shares are better."""
        config = self._config
        if len(self.counts) == 1 or config.share_weights is not None or config.balance == "equal":
            return False
        if config.balance == "auto" and (len(set(self.devices)) == 1 or config.deterministic):
            return False  # measured shares, and with them the last bits, vary from run to run
        return config.balance == "dynamic" or self._rounds <= ROUNDS

    @property
    def held(self) -> range:
        """The environments of this rank."""
        start = sum(self.counts[: self._placement.dp_rank])
        return range(start, start + self.counts[self._placement.dp_rank])

    def better(self, seconds: float) -> Counts | None:
        """Other counts, by the seconds that this rank took for its part of a rollout; None where
        those there are will do. Every rank must call it."""
        if not self.measures:
            return None
        self._rounds += 1
        if self._rounds == 1:
            return None  # a first rollout compiles, chooses algorithms and fills caches
        times: list[float] = self._placement.gather_json(seconds)
        if max(times) <= UNEQUAL * min(times):
            return None
        speeds = [count / time for count, time in zip(self.counts, times, strict=True)]
        found = allot(self.total, speeds, [None] * len(speeds))
        return found if found != self.counts else None

    def state(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "devices": self.devices, "rounds": self._rounds}

    def saved(self, state: dict[str, Any] | None) -> Counts | None:
        """The counts of a checkpoint, where the same devices go on that they were found for."""
        if not self.measures or state is None or state["devices"] != self.devices:
            return None
        self._rounds = state["rounds"]
        return tuple(state["counts"])
