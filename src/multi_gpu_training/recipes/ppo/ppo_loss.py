"""The loss of PPO on sequences, and what the advantages are measured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy


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


def moments(advantages: Tensor, placement: Placement) -> tuple[Tensor, Tensor]:
    """Mean and spread of the advantages of all ranks, also where one has none. Collective."""
    wide = advantages.double()
    sums = torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()])
    count, total, squares = placement.sum(sums).unbind()
    mean = total / count
    return mean, (squares / count - mean.square()).clamp_min(0).sqrt()


def normalise(advantages: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    return ((advantages.double() - mean) / (spread + 1e-8)).to(advantages.dtype)


def explained_variance(values: Tensor, returns: Tensor, placement: Placement) -> float:
    """How much of the spread of the returns the critic foresaw, over all ranks: 1 is all of it,
    0 what a constant would. Collective."""
    wide, left = returns.double(), (returns - values).double()
    sums = torch.stack(
        [
            wide.new_tensor(wide.numel()),
            wide.sum(),
            wide.square().sum(),
            left.sum(),
            left.square().sum(),
        ]
    )
    count, total, squares, left_total, left_squares = placement.sum(sums).tolist()
    spread = squares / count - (total / count) ** 2
    unexplained = left_squares / count - (left_total / count) ** 2
    return 1 - unexplained / spread if spread > 0 else 0.0
