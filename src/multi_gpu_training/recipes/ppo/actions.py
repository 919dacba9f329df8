"""What an agent may do, and the distribution over it that a policy's head describes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Actions:
    """`discrete`: one of `size` choices. `continuous`: a vector of `size` real numbers."""

    kind: Literal["discrete", "continuous"]
    size: int

    def noise(self, steps: int, environments: int, seed: int) -> Tensor:
        """The randomness of a whole rollout of all environments, drawn on the host, so that it
        depends neither on the rank that holds an environment nor on the device."""
        generator = torch.Generator().manual_seed(seed)
        shape = (steps, environments, self.size)
        if self.kind == "continuous":
            return torch.randn(shape, generator=generator)
        # Gumbel noise: the largest of logits + noise is a sample of their softmax.
        exponential = torch.empty(shape).exponential_(generator=generator)
        return -exponential.clamp_min(1e-20).log()

    def sample(self, head: Tensor, log_std: Tensor | None, noise: Tensor | None) -> Tensor:
        """An action for each row of `head`; the likeliest one without noise."""
        if self.kind == "discrete":
            return (head if noise is None else head + noise).argmax(-1)
        if noise is None or log_std is None:
            return head
        return head + log_std.exp() * noise

    def log_prob(self, head: Tensor, log_std: Tensor | None, actions: Tensor) -> Tensor:
        if log_std is None:
            return F.log_softmax(head, -1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        apart = (actions - head) * (-log_std).exp()
        return (-0.5 * apart.square() - log_std - _LOG_ROOT_TWO_PI).sum(-1)

    def entropy(self, head: Tensor, log_std: Tensor | None) -> Tensor:
        """One number for each row of `head`."""
        if log_std is None:
            logs = F.log_softmax(head, -1)
            return -(logs.exp() * logs).sum(-1)
        return (log_std + 0.5 + _LOG_ROOT_TWO_PI).sum().expand(head.shape[:-1])
