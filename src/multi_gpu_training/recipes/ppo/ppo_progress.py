"""How far a PPO run has come, and the rates that fall with it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy

RECENT = 100  # episodes in the mean return, as usual in the field
SAVED = (
    *("num_envs", "iteration", "passes", "env_steps", "episodes"),
    *("recent", "marks", "environments", "measured", "shares"),
)


class PPOProgress:
    """Counts over all ranks, alike on each; saved with the run. `environments` is what they
    stood at when the last checkpoint was made, by environment."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.iteration = 0
        self.passes = 0
        self.env_steps = 0
        self.episodes = 0
        self.recent: list[tuple[float, int]] = []
        self.environments: dict[str, Any] | None = None
        self.measured: dict[str, Tensor] = {}
        self.shares: dict[str, Any] | None = None  # of EnvironmentShares; 0.1 saved none
        self.marks: dict[str, int] = {}
        self._began = time.monotonic()
        self._spoke = -math.inf

    def add(self, steps: int, episodes: list[tuple[float, int]]) -> None:
        """An iteration is done; `episodes` are (return, length) of those that ended in it."""
        self.iteration += 1
        self.env_steps += steps
        self.episodes += len(episodes)
        self.recent = self.recent + [(float(r), int(n)) for r, n in episodes]
        self.recent = self.recent[-max(RECENT, len(episodes)) :]

    def measure(self, sums: dict[str, Tensor]) -> None:
        """Take over count, sum and sum of squares of what all ranks observed and earned."""
        for name, values in sums.items():
            before = self.measured.get(name)
            self.measured[name] = values if before is None else before.to(values.device) + values

    def apply_measures(self, policy: CLSTMPolicy) -> float:
        """Observations get mean 0 and spread 1; gives what rewards are to be multiplied by, so
        that discounted returns have spread 1."""
        if not self.measured:
            return 1.0
        mean, spread = mean_and_spread(self.measured["observed"])
        policy.observation_mean.copy_(mean)
        policy.observation_scale.copy_(1 / spread.clamp_min(1e-4))
        return 1 / max(1e-4, float(mean_and_spread(self.measured["earned"])[1]))

    @property
    def mean_return(self) -> float:
        """Of the last episodes; minus infinity before the first has ended."""
        return fmean(value for value, _ in self.recent) if self.recent else -math.inf

    @property
    def mean_length(self) -> float:
        return fmean(length for _, length in self.recent) if self.recent else math.nan

    def passed(self, step: int, every: int, what: str) -> bool:
        """Whether a multiple of `every` was reached since this was last true."""
        if step // every == self.marks.get(what, 0):
            return False
        self.marks[what] = step // every
        return True

    def say(self, console: Console, metrics: dict[str, float], last: bool) -> None:
        """One line, at most every two seconds."""
        now = time.monotonic()
        if now - self._spoke < 2 and not last:
            return
        self._spoke = now
        console.line(
            f"iteration {self.iteration}  steps {self.env_steps:,}  episodes {self.episodes:,}  "
            f"return {metrics['return']:.2f}  entropy {metrics['entropy']:.3f}  "
            f"kl {metrics['approx_kl']:.4f}  clipped {metrics['clip_fraction']:.1%}  "
            f"{metrics['steps_per_s']:,.0f} steps/s"
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_envs"] != self.num_envs:
            raise CheckpointError(
                f"the run has {state['num_envs']} environments, num_envs={self.num_envs} was asked "
                f"for; go on with num_envs={state['num_envs']}"
            )
        for name, value in state.items():
            setattr(self, name, value)
        self.recent = [(value, length) for value, length in state["recent"]]


def mean_and_spread(sums: Tensor) -> tuple[Tensor, Tensor]:
    """From counts, sums and sums of squares, stacked in this order."""
    count, total, squares = sums
    mean = total / count
    return mean, (squares / count - mean.square()).clamp_min(0).sqrt()


class Decay(LRScheduler):
    """The learning rate times `rest()`, the part of the run that is to come."""

    def __init__(self, optimizer: Optimizer, rest: Callable[[], float]) -> None:
        self.rest = rest
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * self.rest() for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"base_lrs": self.base_lrs, "last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base_lrs, self.last_epoch = list(state["base_lrs"]), state["last_epoch"]
