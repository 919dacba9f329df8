"""A Gymnasium environment that goes on in the midst of an episode, by taking its actions again."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class EpisodeReplay(gymnasium.Wrapper[Any, Any, Any, Any]):
    """`reset(options={"replay": actions of each environment})` also takes the actions of its own.

    A vector environment hands the same options to all of its members: `index` says which one this
    is.
    """

    def __init__(self, environment: gymnasium.Env[Any, Any], index: int) -> None:
        super().__init__(environment)
        self.index = index

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        given = dict(options or {})
        replay = given.pop("replay", None)
        row, facts = self.env.reset(seed=seed, options=given or None)
        for action in replay[self.index] if replay is not None else ():
            row, *_ = self.env.step(np.asarray(action, self.action_space.dtype)[()])
        return row, facts
