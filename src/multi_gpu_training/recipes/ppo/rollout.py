"""Rollouts: some steps of every environment, with all that an update needs to know of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.recipes.ppo.environment import ByEnvironment, Environments
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy, Stepper


@dataclass(frozen=True)
class Rollout:
    """(N environments, T steps, ...). `recent` and `state` are what the policy remembered at the
    first step, after the reset where an episode began there; `after` is the value of what came
    after each step, 0 where the episode was over."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    after: Tensor
    done: Tensor
    starts: Tensor
    recent: Tensor
    state: Tensor
    whole: bool

    def take(self, index: slice) -> Rollout:
        """Of some of the environments."""
        parts = {name: part[index] for name, part in vars(self).items() if name != "whole"}
        return replace(self, **parts)


@dataclass
class Finished:
    """Episodes that ended in a rollout: masks and values as tensors, read when it is done."""

    numbers: range
    steps: list[int] = field(default_factory=list)
    ended: list[Tensor] = field(default_factory=list)
    returns: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)

    def episodes(self) -> list[tuple[int, int, float, int]]:
        """(step, environment, return, length) of each; sorted, they are in one order whoever
        held the environments."""
        if not self.ended:
            return []
        ended, returns, lengths = (
            torch.stack(part).tolist() for part in (self.ended, self.returns, self.lengths)
        )
        return [
            (step, number, returns[t][i], lengths[t][i])
            for t, step in enumerate(self.steps)
            for i, number in enumerate(self.numbers)
            if ended[t][i]
        ]


class Collector:
    """Steps environments with a policy, and remembers where they stand between rollouts."""

    def __init__(
        self,
        environments: Environments,
        policy: CLSTMPolicy,
        normalise: bool = False,
        gamma: float = 0.0,
    ) -> None:
        self.environments = environments
        self.normalise = normalise
        self.gamma = gamma
        self.reward_scale = 1.0
        self.policy = policy
        weight = policy.value_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.measured: dict[str, Tensor] = {}
        count = len(environments.numbers)
        shape = (count, policy.window - 1, policy.observation_size)
        self.raw = environments.reset().to(self.dtype)
        self.recent = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self.state = torch.zeros(2, 2, count, policy.hidden, device=self.device, dtype=self.dtype)
        self.starts = torch.ones(count, dtype=torch.bool, device=self.device)
        self.returns = torch.zeros(count, dtype=torch.float64, device=self.device)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.discounted = torch.zeros(count, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def collect(
        self, steps: int, noise: Tensor | None, before_step: Callable[[], None] = lambda: None
    ) -> tuple[Rollout, Finished]:
        """`steps` of every environment. `noise` (steps, N, ...) makes the choices; without it
        the likeliest action is taken."""
        policy, actions = self.policy, self.policy.actions
        stepper = Stepper(policy)  # made anew: the weights have moved since the last rollout
        if noise is not None:
            noise = noise.to(self.device, self.dtype)
        rows: defaultdict[str, list[Tensor]] = defaultdict(list)
        finished = Finished(self.environments.numbers)
        recent = state = None
        whole, ended = True, False
        for t in range(steps):
            before_step()
            whole = whole and not ended
            if t == 0 or ended:  # `ended` is known on the host: most steps launch nothing here
                self._forget()
            observations = self._scaled(self.raw)
            windows = torch.cat([self.recent, observations.unsqueeze(1)], 1)
            if t == 0:
                recent, state = windows[:, :-1], self.state
            output, self.state = stepper(windows, self.state)
            action = actions.sample(
                output.head, policy.log_std, None if noise is None else noise[t]
            )
            step = self.environments.step(action)
            rewards = step.rewards.to(self.dtype)
            done = step.terminated | step.truncated
            self.recent = windows[:, 1:]
            rows["observations"].append(observations)
            rows["raw"].append(self.raw)
            rows["actions"].append(action)
            rows["log_probs"].append(actions.log_prob(output.head, policy.log_std, action))
            rows["values"].append(output.values)
            rows["rewards"].append(rewards * self.reward_scale if self.normalise else rewards)
            self.discounted = rewards + self.gamma * self.discounted
            rows["discounted"].append(self.discounted)
            rows["done"].append(done)
            rows["starts"].append(self.starts)
            if step.final is not None:
                final = self._value(stepper, step.final.to(self.dtype))
                rows["final"].append(torch.where(step.truncated, final, torch.zeros_like(final)))
            else:
                rows["final"].append(_nothing(rows["final"], output.values))
            self.raw, self.starts = step.observations.to(self.dtype), done
            self._count(t, rewards, done, step.ended, finished)
            ended = step.ended
        stacked = {name: torch.stack(values, 1) for name, values in rows.items()}
        self._forget()
        last = self._value(stepper, self.raw)
        self._measure(stacked.pop("raw"), stacked.pop("discounted"))
        after = torch.cat([stacked["values"][:, 1:], last.unsqueeze(1)], 1)
        after = torch.where(stacked["done"], stacked.pop("final"), after)
        assert recent is not None and state is not None
        # (2, 2, N, H) -> (N, 4, H): hidden and cell of the actor, then of the critic.
        state = state.permute(2, 1, 0, 3).reshape(len(recent), 4, -1)
        return Rollout(**stacked, after=after, recent=recent, state=state, whole=whole), finished

    def _forget(self) -> None:
        """Where an episode begins, nothing of the one before is remembered."""
        keep = (~self.starts).to(self.dtype)
        self.state = self.state * keep.view(1, 1, -1, 1)
        self.recent = self.recent * keep.view(-1, 1, 1)

    def _value(self, stepper: Stepper, observations: Tensor) -> Tensor:
        """The value of observations that come next; nothing is remembered of them."""
        windows = torch.cat([self.recent, self._scaled(observations).unsqueeze(1)], 1)
        return stepper(windows, self.state)[0].values

    def _scaled(self, raw: Tensor) -> Tensor:
        return self.policy.normalise(raw) if self.normalise else raw

    def _measure(self, raw: Tensor, discounted: Tensor) -> None:
        """Count, sum and sum of squares of what was observed and earned in this rollout."""
        if self.normalise:
            rows = {"observed": raw.flatten(0, 1), "earned": discounted.flatten().unsqueeze(1)}
            for name, values in rows.items():
                wide = values.double()
                count = torch.full_like(wide[0], len(wide))
                self.measured[name] = torch.stack([count, wide.sum(0), wide.square().sum(0)])

    def _count(
        self, step: int, rewards: Tensor, done: Tensor, ended: bool, finished: Finished
    ) -> None:
        self.returns = self.returns + rewards
        self.lengths = self.lengths + 1
        if ended:
            finished.steps.append(step)
            finished.ended.append(done)
            finished.returns.append(self.returns)
            finished.lengths.append(self.lengths)
            self.returns = torch.where(done, 0.0, self.returns)
            self.lengths = torch.where(done, 0, self.lengths)
            self.discounted = torch.where(done, 0.0, self.discounted)

    def mark(self) -> Callable[[], ByEnvironment]:
        """Note where environments and policy stand, to be told later."""
        environments = self.environments.mark()
        own: ByEnvironment = {
            "recent": self.recent,
            "hidden": self.state.permute(2, 0, 1, 3).contiguous(),
            "starts": self.starts,
            "returns": self.returns,
            "lengths": self.lengths,
            "discounted": self.discounted,
        }
        return lambda: {**{f"environment.{n}": v for n, v in environments().items()}, **own}

    def load(self, saved: ByEnvironment) -> None:
        prefix = "environment."
        inner = {n.removeprefix(prefix): v for n, v in saved.items() if n.startswith(prefix)}
        self.raw = self.environments.load(inner).to(self.dtype)
        tensors: dict[str, Any] = {
            n: torch.as_tensor(v).to(self.device)
            for n, v in saved.items()
            if not n.startswith(prefix)
        }
        self.recent, self.starts = tensors["recent"], tensors["starts"]
        self.state = tensors["hidden"].permute(1, 2, 0, 3).contiguous()
        self.returns, self.lengths = tensors["returns"], tensors["lengths"]
        self.discounted = tensors["discounted"]


def _nothing(before: list[Tensor], like: Tensor) -> Tensor:
    """Zeros, made once and used again."""
    return before[0] if before and before[0] is before[-1] else torch.zeros_like(like)


def advantages(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates (N, T). An episode that was over is worth nothing more; one
    that was cut off is worth what the critic says of its last observation."""
    surprise = rollout.rewards + gamma * rollout.after - rollout.values
    carry = gamma * gae_lambda * (~rollout.done).to(surprise.dtype)
    surprises, carries = surprise.unbind(1), carry.unbind(1)
    running = torch.zeros_like(surprises[0])
    out = []
    for t in range(len(surprises) - 1, -1, -1):
        running = torch.addcmul(surprises[t], carries[t], running)
        out.append(running)
    return torch.stack(out[::-1], 1)
