"""An environment that does what its script says, so that every number can be foretold."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

NAME = "Scripted-v0"


class Scripted(gymnasium.Env[Any, Any]):
    """Observes (episodes begun before, step of the episode, seed of the episode / 2^31); the reward
    of a step is its number. Episodes last 3, 5, 3, 5 ... steps: those of 3 terminate, those of 5
    are truncated. `endless`: none ends where the action is 1 throughout."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, limits: tuple[int, int] = (3, 5)) -> None:
        self.limits = limits
        self.begun = -1
        self.step_number = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.begun += 1
        self.step_number = 0
        self.seed_share = float(seed or 0) / 2**31
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        which = self.begun % 2
        over = self.step_number >= self.limits[which]
        return (
            self._observation(),
            float(self.step_number),
            over and which == 0,
            over and which == 1,
            {},
        )

    def _observation(self) -> Any:
        return np.array([self.begun, self.step_number, self.seed_share], np.float32)


class Patient(Scripted):
    """Like Scripted, but an episode whose seed is even never ends."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row, reward, over, cut, info = super().step(action)
        endless = round(self.seed_share * 2**31) % 2 == 0
        return row, reward, over and not endless, cut and not endless, info


class Odd(Scripted):
    """With spaces that no policy of ours fits."""

    observation_space = gymnasium.spaces.Dict({"a": Discrete(2)})  # type: ignore[assignment]


class OddActions(Scripted):
    action_space = gymnasium.spaces.MultiBinary(3)  # type: ignore[assignment]


def register() -> None:
    for name, kind in (
        (NAME, Scripted),
        ("Patient-v0", Patient),
        ("Odd-v0", Odd),
        ("OddActions-v0", OddActions),
    ):
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=kind)


register()
