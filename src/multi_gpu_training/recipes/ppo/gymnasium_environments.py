"""Any environment of Gymnasium, by its id, as one of its vector environments.

Episodes are begun here, not by the vector environment, whose automatic resets know no seeds: the
step that ends an episode gives the next one's first observation, and the last observation of the
old one is kept apart. Each episode has its own seed, from (seed, environment, episode): a
checkpoint needs the number of the episode and the actions taken in it, and goes on by taking them
again, whatever the environment keeps inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.ppo.environment import ByEnvironment, Step
from multi_gpu_training.recipes.ppo.policy import Actions
from multi_gpu_training.recipes.user_data import library


class GymnasiumEnvironments:
    """Environments `numbers`, stepped one after the other or, with `processes`, each in its own."""

    def __init__(
        self,
        name: str,
        numbers: range,
        seed: int,
        hide: Sequence[int] = (),
        device: torch.device | str = "cpu",
        processes: bool = False,
        render: bool = False,
    ) -> None:
        self.name = name
        self.numbers = numbers
        self.seed = seed
        self.device = torch.device(device)
        probe = make(name)
        size = _observation_size(name, probe.observation_space)
        self.seen = _seen(name, size, hide)
        self.observation_size = len(self.seen)
        self._size = size
        self._observed = probe.observation_space
        self._space = probe.action_space
        self.actions = _actions(name, probe.action_space)
        probe.close()
        self.vector = _vector(name, len(numbers), processes, render) if numbers else None
        self.episode = [0] * len(numbers)
        self.taken: list[list[Any]] = [[] for _ in numbers]

    def reset(self) -> Tensor:
        return self.load({"episode": [0] * len(self.numbers), "taken": [[] for _ in self.numbers]})

    def step(self, actions: Tensor) -> Step:
        assert self.vector is not None
        native = self._native(actions)
        observed, rewards, over, cut, _ = self.vector.step(native)
        for taken, action in zip(self.taken, native.tolist(), strict=True):
            taken.append(action)
        rows = self._rows(observed)
        # An episode that reached its end is not worth more for a limit hit as well.
        cut = cut & ~over
        done = over | cut
        final: np.ndarray[Any, Any] | None = None
        ended = bool(done.any())
        if ended:
            if cut.any():
                final = np.where(cut[:, None], rows, np.float32(0))
            for i in np.flatnonzero(done):
                self.episode[i] += 1
                self.taken[i] = []
            begun, _ = self.vector.reset(seed=self._seeds(done), options={"reset_mask": done})
            rows = np.where(done[:, None], self._rows(begun), rows)
        return Step(
            self._tensor(rows),
            torch.from_numpy(rewards.astype(np.float32)).to(self.device),
            torch.from_numpy(over.copy()).to(self.device),
            torch.from_numpy(cut).to(self.device),
            None if final is None else self._tensor(final),
            ended,
        )

    def mark(self) -> Callable[[], ByEnvironment]:
        # Actions are added to these lists, and an episode that begins has a list of its own.
        episode, taken = list(self.episode), [(actions, len(actions)) for actions in self.taken]

        def state() -> ByEnvironment:
            return {"episode": episode, "taken": [actions[:n] for actions, n in taken]}

        return state

    def load(self, state: ByEnvironment) -> Tensor:
        self.episode = [int(episode) for episode in state["episode"]]
        self.taken = [list(actions) for actions in state["taken"]]
        if self.vector is None:
            return self._tensor(np.zeros((0, self._size), np.float32))
        observed, _ = self.vector.reset(seed=self._seeds(), options={"replay": self.taken})
        return self._tensor(self._rows(observed))

    def picture(self) -> Any:
        """The first environment as an array of (height, width, 3); None where it shows nothing."""
        found = self.vector.render() if self.vector is not None else None
        return None if not found else found[0]

    def close(self) -> None:
        if self.vector is not None:
            self.vector.close()

    def _seeds(self, wanted: np.ndarray[Any, Any] | None = None) -> list[int | None]:
        """Of the current episodes, by environment; None for those that are not wanted."""
        # 31 bits: some environments hand their seed to libraries that take no more.
        return [
            derive_seed(self.seed, number, self.episode[i]) % 2**31
            if wanted is None or wanted[i]
            else None
            for i, number in enumerate(self.numbers)
        ]

    def _rows(self, observed: Any) -> np.ndarray[Any, Any]:
        """One row of numbers per environment; a copy."""
        categories = getattr(self._observed, "n", None)
        rows: np.ndarray[Any, Any]
        if categories is None:
            rows = observed.reshape(len(observed), -1).astype(np.float32)
        else:
            rows = np.eye(int(categories), dtype=np.float32)[observed - int(self._observed.start)]
        return rows

    @property
    def _is_box(self) -> bool:
        return self.actions.kind == "continuous"

    def _native(self, actions: Tensor) -> np.ndarray[Any, Any]:
        """Actions as the environments take them: inside the bounds, of their type and shape."""
        rows: np.ndarray[Any, Any] = actions.detach().cpu().numpy()
        space = self._space
        if self._is_box:
            rows = np.clip(rows.reshape(-1, *space.shape), space.low, space.high)
            rows = rows.astype(space.dtype)
        else:
            rows = rows + int(space.start)
        return rows

    def _tensor(self, rows: np.ndarray[Any, Any]) -> Tensor:
        kept = rows[:, self.seen] if len(self.seen) < self._size else rows
        return torch.from_numpy(kept).to(self.device)


def _vector(name: str, count: int, processes: bool, render: bool = False) -> Any:
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    makers = [partial(_member, name, index, render) for index in range(count)]
    kind = AsyncVectorEnv if processes else SyncVectorEnv
    return kind(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)


def _member(name: str, index: int, render: bool = False) -> Any:
    from multi_gpu_training.recipes.ppo.episode_replay import EpisodeReplay

    return EpisodeReplay(make(name, render), index)


def make(name: str, render: bool = False) -> Any:
    """The environment of that id, or an error that says what is there."""
    gymnasium = library("gymnasium", f"env={name} needs Gymnasium", "ppo", ", or use env=trading")
    try:
        how = {"render_mode": "rgb_array"} if render else {}
        return gymnasium.make(name, disable_env_checker=True, **how)  # it would check every step
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"env={name} cannot be made: {error}") from None
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(
            f"env={name} is not registered with Gymnasium {gymnasium.__version__}: {error} "
            "Use an id of gymnasium.envs.registry (module:Name-v0 imports the module that "
            "registers it), or env=trading"
        ) from None


def _observation_size(name: str, space: Any) -> int:
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Box) and space.shape:
        return math.prod(space.shape)
    if isinstance(space, Discrete):
        return int(space.n)
    raise ConfigError(
        f"env={name} observes {space}; this recipe takes Box and Discrete observations: wrap the "
        "environment in gymnasium.wrappers.FlattenObservation and register it under an id"
    )


def _seen(name: str, size: int, hide: Sequence[int]) -> list[int]:
    wrong = [i for i in hide if not 0 <= i < size]
    seen = [i for i in range(size) if i not in set(hide)]
    if wrong or not seen:
        raise ConfigError(
            f"hide={','.join(map(str, hide))}: {name} has {size} observations, numbered 0 to "
            f"{size - 1}; name some of them, not all"
        )
    return seen


def _actions(name: str, space: Any) -> Actions:
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete):
        return Actions("discrete", int(space.n))
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating) and space.shape:
        return Actions("continuous", math.prod(space.shape))
    raise ConfigError(
        f"env={name} takes actions of {space}; this recipe gives Discrete ones and Box ones of "
        "real numbers: wrap the environment and register it under an id"
    )
