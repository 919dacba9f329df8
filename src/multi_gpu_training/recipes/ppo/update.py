"""The update of the policy on a rollout: passes of minibatches over the environments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.batch import attach
from multi_gpu_training.data.order import Share
from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.recipes.ppo.minibatches import minibatches, shares
from multi_gpu_training.recipes.ppo.options import PPOOptions
from multi_gpu_training.recipes.ppo.ppo_loss import explained_variance, moments, normalise
from multi_gpu_training.recipes.ppo.ppo_progress import PPOProgress
from multi_gpu_training.recipes.ppo.rollout import Rollout, advantages
from multi_gpu_training.training.metrics import MetricsCollector


class Update:
    """Every rank takes, of each minibatch, the environments that it holds; gradients, advantage
    statistics and the KL that ends an update early are those of all ranks."""

    def __init__(
        self,
        manager: MultiGPUTrainingManager,
        options: PPOOptions,
        progress: PPOProgress,
        held: range,
        seed: int,
        endless: bool,
    ) -> None:
        self.manager = manager
        self.options = options
        self.progress = progress
        self.placement = manager.placement
        self.held = held
        self.seed = seed
        # Environments over all ranks / those of a step, rounded up.
        self.minibatches = -(-options.num_envs // manager.sizes.global_batch)
        # Verification ends the process when it has seen enough steps.
        epochs = manager.config.epochs
        self.passes = itertools.count if endless else lambda: range(epochs)

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
        for _ in self.passes():
            self._pass(rollout, advantage, returns, clip)
            self.progress.passes += 1
            steps = self.manager.trainer.read_metrics()
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
