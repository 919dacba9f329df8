"""Any environment of Gymnasium, by its id.

Episodes are begun here and not by Gymnasium's vector environments, whose automatic resets differ
by version and mode: the step that ends an episode gives the next one's first observation, and the
last observation of the old one is kept apart. Each episode has a seed of its own, from (seed,
environment, episode): a checkpoint needs the number of the episode and the actions taken in it,
and goes on by taking them again, whatever the environment keeps inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    def __init__(
        self,
        name: str,
        numbers: range,
        seed: int,
        hide: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.numbers = numbers
        self.seed = seed
        self.device = torch.device(device)
        self.environments = [make(name) for _ in numbers]
        first = self.environments[0] if self.environments else make(name)
        size = _observation_size(name, first.observation_space)
        self.seen = _seen(name, size, hide)
        self.observation_size = len(self.seen)
        self._hides = len(self.seen) < size
        self._size = size
        self._categories = getattr(first.observation_space, "n", None)
        self.actions = _actions(name, first.action_space)
        self._space = first.action_space
        self.episode = [0] * len(numbers)
        self.taken: list[list[Any]] = [[] for _ in numbers]

    def reset(self) -> Tensor:
        rows = np.zeros((len(self.numbers), self._size), np.float32)
        for i in range(len(self.numbers)):
            self.episode[i] = 0
            self._begin(i, rows)
        return self._tensor(rows)

    def step(self, actions: Tensor) -> Step:
        count = len(self.numbers)
        rows = np.zeros((count, self._size), np.float32)
        rewards = np.zeros(count, np.float32)
        terminated = np.zeros(count, np.bool_)
        truncated = np.zeros(count, np.bool_)
        final: np.ndarray[Any, Any] | None = None
        ended = False
        for i, action in enumerate(self._native(actions)):
            row, reward, over, cut, _ = self.environments[i].step(action)
            self.taken[i].append(action)
            self._write(row, rows[i])
            rewards[i] = reward
            if over or cut:
                ended = True
                # An episode that reached its end is not worth more for a limit hit as well.
                terminated[i], truncated[i] = over, cut and not over
                if truncated[i]:
                    final = np.zeros_like(rows) if final is None else final
                    final[i] = rows[i]
                self.episode[i] += 1
                self._begin(i, rows)
        return Step(
            self._tensor(rows),
            torch.from_numpy(rewards).to(self.device),
            torch.from_numpy(terminated).to(self.device),
            torch.from_numpy(truncated).to(self.device),
            None if final is None else self._tensor(final),
            ended,
        )

    def mark(self) -> Callable[[], ByEnvironment]:
        # Actions are added to these lists, and an episode that begins has a list of its own.
        episode, taken = list(self.episode), [(actions, len(actions)) for actions in self.taken]

        def state() -> ByEnvironment:
            plain = [[np.asarray(a).tolist() for a in actions[:n]] for actions, n in taken]
            return {"episode": episode, "taken": plain}

        return state

    def load(self, state: ByEnvironment) -> Tensor:
        rows = np.zeros((len(self.numbers), self._size), np.float32)
        for i, (episode, taken) in enumerate(zip(state["episode"], state["taken"], strict=True)):
            self.episode[i] = int(episode)
            self._begin(i, rows)
            for plain in taken:
                action = np.asarray(plain, self._space.dtype) if self._is_box else int(plain)
                row, *_ = self.environments[i].step(action)
                self.taken[i].append(action)
                self._write(row, rows[i])
        return self._tensor(rows)

    def close(self) -> None:
        for environment in self.environments:
            environment.close()

    def _begin(self, i: int, rows: np.ndarray[Any, Any]) -> None:
        # 31 bits: some environments hand their seed to libraries that take no more.
        seed = derive_seed(self.seed, self.numbers[i], self.episode[i]) % 2**31
        row, _ = self.environments[i].reset(seed=seed)
        self.taken[i] = []
        self._write(row, rows[i])

    def _write(self, row: Any, into: np.ndarray[Any, Any]) -> None:
        if self._categories is not None:
            into[:] = 0
            start = getattr(self.environments[0].observation_space, "start", 0)
            into[int(row) - int(start)] = 1
        else:
            into[:] = row if self._size == np.size(row) == len(row) else np.ravel(row)

    @property
    def _is_box(self) -> bool:
        return self.actions.kind == "continuous"

    def _native(self, actions: Tensor) -> list[Any]:
        """Actions as the environments take them: inside the bounds, of their type and shape."""
        if not self._is_box:
            start = int(self._space.start)
            return [start + action for action in actions.tolist()]
        space = self._space
        rows = actions.detach().cpu().numpy().reshape(-1, *space.shape)
        return list(np.clip(rows, space.low, space.high).astype(space.dtype))

    def _tensor(self, rows: np.ndarray[Any, Any]) -> Tensor:
        kept = rows[:, self.seen] if self._hides else rows
        return torch.from_numpy(kept).to(self.device)


def make(name: str) -> Any:
    """The environment of that id, or an error that says what is there."""
    gymnasium = library("gymnasium", f"env={name} needs Gymnasium", "ppo", ", or use env=trading")
    try:
        return gymnasium.make(name, disable_env_checker=True)  # it would check every step
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
