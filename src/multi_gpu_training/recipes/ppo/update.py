"""The update of the policy on a rollout: passes of minibatches over the environments.

A pass shows every environment once. Each rank takes, of every minibatch, those that it holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multi_gpu_training.data.batch import attach
from multi_gpu_training.data.order import Share, cut, derive_seed
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.recipes.ppo.options import PPOOptions
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.ppo_progress import PPOProgress, mean_and_spread
from multi_gpu_training.recipes.ppo.rollout import Rollout, advantages
from multi_gpu_training.training.metrics import MetricsCollector


@dataclass(frozen=True)
class PPOLoss:
    """`loss_fn(policy, batch)`: the mean over all steps of clipped policy loss, value loss and
    entropy. `value_clip` also keeps the value near what the rollout's critic said."""

    value_coef: float
    entropy_coef: float
    value_clip: float | None

    def __call__(self, policy: Any, batch: dict[str, Any]) -> tuple[Tensor, None, dict[str, Any]]:
        assert isinstance(policy, CLSTMPolicy)
        output = policy(
            batch["observations"], batch["recent"], batch["state"], batch["starts"], batch["whole"]
        )
        log_probs = policy.actions.log_prob(output.head, policy.log_std, batch["actions"])
        entropy = policy.actions.entropy(output.head, policy.log_std)
        change = log_probs - batch["log_probs"]
        ratio = change.exp()
        clip = batch["clip_range"]
        advantage = batch["advantages"]
        kept = torch.maximum(torch.minimum(ratio, 1 + clip), 1 - clip)
        policy_loss = -torch.minimum(ratio * advantage, kept * advantage)
        value_loss = self._value_loss(output.values, batch)
        each = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        with torch.no_grad():
            metrics = {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": entropy,
                "approx_kl": ratio - 1 - change,
                "clip_fraction": ((ratio - 1).abs() > clip).to(ratio.dtype),
            }
            sums = torch.stack([values.detach() for values in metrics.values()]).sum((1, 2))
        count = float(each.numel())
        pairs = {name: (sums[i], count) for i, name in enumerate(metrics)}
        return each.mean(), None, pairs

    def _value_loss(self, values: Tensor, batch: dict[str, Any]) -> Tensor:
        apart: Tensor = (values - batch["returns"]).square()
        if self.value_clip is not None:
            before = batch["values"]
            near = before + (values - before).clamp(-self.value_clip, self.value_clip)
            apart = torch.maximum(apart, (near - batch["returns"]).square())
        return 0.5 * apart


def moments(values: Tensor, placement: Placement) -> tuple[Tensor, Tensor]:
    """Mean and spread over all ranks, also where one has no values. Collective."""
    return mean_and_spread(placement.sum(_sums(values)))


def _sums(values: Tensor) -> Tensor:
    """Count, sum and sum of squares: what ranks can add up."""
    wide = values.double()
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()])


def normalise(advantages: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    return ((advantages.double() - mean) / (spread + 1e-8)).to(advantages.dtype)


def explained_variance(values: Tensor, returns: Tensor, placement: Placement) -> float:
    """How much of the spread of the returns the critic foresaw, over all ranks: 1 is all of it,
    0 what a constant would. Collective."""
    sums = placement.sum(torch.stack([_sums(returns), _sums(returns - values)], 1))
    spread, unexplained = mean_and_spread(sums)[1].square().tolist()
    return 1 - unexplained / spread if spread > 0 else 0.0


def minibatches(
    environments: int, count: int, seed: int, number: int, shuffle: bool = True
) -> list[list[int]]:
    """The environments of each of `count` minibatches in pass `number`, sorted.

    Environments are cut into runs of neighbours as long as there are minibatches, and each run
    sends one member, at random, to each minibatch: whoever holds a stretch of environments has
    nearly the same number in every minibatch. They are the same on any number of ranks.
    """
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


@dataclass(frozen=True)
class Update:
    """Every rank takes, of each minibatch, the environments that it holds; gradients, advantage
    statistics and the KL that ends an update early are those of all ranks."""

    manager: MultiGPUTrainingManager
    options: PPOOptions
    progress: PPOProgress
    held: range
    seed: int
    endless: bool  # verification ends the process when it has seen enough steps

    @property
    def placement(self) -> Placement:
        return self.manager.placement

    @property
    def minibatches(self) -> int:
        """Environments over all ranks / those of a step, rounded up."""
        return -(-self.options.num_envs // self.manager.sizes.global_batch)

    def __call__(self, rollout: Rollout, clip_range: float) -> dict[str, float]:
        """Move the weights; metrics over all ranks and steps."""
        options, placement = self.options, self.placement
        advantage = advantages(rollout, options.gamma, options.gae_lambda)
        returns = advantage + rollout.values
        if options.advantages == "rollout":
            advantage = normalise(advantage, *moments(advantage, placement))
        clip = torch.tensor(clip_range, device=placement.device)
        self.manager.model.train()
        whole = MetricsCollector()
        passes = itertools.count() if self.endless else range(self.manager.config.epochs)
        for _ in passes:
            self._pass(rollout, advantage, returns, clip)
            self.progress.passes += 1
            steps = self.manager.trainer.collect_metrics()
            # Over all ranks: they must agree, or one would wait for steps that never come.
            too_far = options.target_kl is not None and (
                steps.compute(placement)["approx_kl"] > 1.5 * options.target_kl
            )
            whole.merge(steps)
            steps.reset()
            if too_far:
                break
        metrics = whole.compute(placement)
        metrics["explained_variance"] = explained_variance(rollout.values, returns, placement)
        return metrics

    def _pass(self, rollout: Rollout, advantage: Tensor, returns: Tensor, clip: Tensor) -> None:
        number, total = self.progress.passes, self.options.num_envs
        shuffle = self.manager.config.shuffle
        batches = minibatches(total, self.minibatches, self.seed, number, shuffle)
        for position, batch in enumerate(batches):
            scaled = advantage
            if self.options.advantages == "minibatch":
                mine = self._index([i for i in batch if i in self.held])
                scaled = normalise(advantage, *moments(advantage[mine], self.placement))
            accumulation = self.manager.sizes.accumulation
            for share in shares(batch, self.held, number, position, accumulation):
                values = self._batch(rollout, scaled, returns, share)
                values["clip_range"] = clip
                self.manager.trainer.train_step(attach(values, share))

    def _batch(
        self, rollout: Rollout, advantage: Tensor, returns: Tensor, share: Share
    ) -> dict[str, Any]:
        """The sequences of the environments in `share`."""
        tensors = {
            "observations": rollout.observations,
            "actions": rollout.actions,
            "log_probs": rollout.log_probs,
            "values": rollout.values,
            "advantages": advantage,
            "returns": returns,
            "starts": rollout.starts,
            "recent": rollout.recent,
            "state": rollout.state,
        }
        if share.count < len(self.held):
            index = self._index(share.indices)
            tensors = {name: tensor[index] for name, tensor in tensors.items()}
        return {**tensors, "whole": rollout.whole}

    def _index(self, environments: Sequence[int]) -> Tensor:
        local = [i - self.held.start for i in environments]
        return torch.tensor(local, dtype=torch.int64, device=self.placement.device)
