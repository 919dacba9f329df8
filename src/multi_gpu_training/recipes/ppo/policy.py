"""The CLSTM policy: a feature LSTM over a window of observations, then LSTM actor and critic.

    observations of the last `window` steps -> feature LSTM -> features
    features, step after step               -> actor LSTM   -> action head
                                            -> critic LSTM  -> value head

Actor and critic remember a whole episode; the feature LSTM starts anew in every window. What lies
before the beginning of an episode is zero in a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Output(NamedTuple):
    """head: what the action distribution is made of. One row for each step of each sequence."""

    head: Tensor
    values: Tensor


class CLSTMPolicy(nn.Module):
    observation_mean: Tensor
    observation_scale: Tensor

    def __init__(
        self,
        observation_size: int,
        actions: Actions,
        window: int = 30,
        features: int = 128,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        self.observation_size = observation_size
        self.actions = actions
        self.window = window
        self.hidden = hidden
        self.feature = nn.LSTM(observation_size, features, batch_first=True)
        if window == 1:
            self.feature.weight_hh_l0.requires_grad_(False)  # from a zero state it does nothing
        self.actor = nn.LSTM(features, hidden, batch_first=True)
        self.critic = nn.LSTM(features, hidden, batch_first=True)
        self.action_head = nn.Linear(hidden, actions.size)
        self.value_head = nn.Linear(hidden, 1)
        self.log_std: nn.Parameter | None = None
        if actions.kind == "continuous":
            self.log_std = nn.Parameter(torch.full((actions.size,), -0.5))
        self.register_buffer("observation_mean", torch.zeros(observation_size))
        self.register_buffer("observation_scale", torch.ones(observation_size))
        self._initialise()

    def normalise(self, observations: Tensor) -> Tensor:
        """Observations as the policy takes them, measured by those of the rollouts so far."""
        scaled = (observations - self.observation_mean) * self.observation_scale
        return scaled.clamp(-10, 10)

    def _initialise(self) -> None:
        for lstm in (self.feature, self.actor, self.critic):
            for name, parameter in lstm.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(parameter)
                else:
                    nn.init.zeros_(parameter)
        # A small head makes the first policy nearly uniform.
        nn.init.orthogonal_(self.action_head.weight, 0.01)
        nn.init.orthogonal_(self.value_head.weight, 1.0)
        nn.init.zeros_(self.action_head.bias)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, observations: Tensor, recent: Tensor, state: Tensor, starts: Tensor, whole: bool
    ) -> Output:
        """Heads and values of sequences, as the steps of a rollout gave them.

        observations (B, T, O); recent (B, window - 1, O) came before them; state (B, 4, H) is the
        actor's and the critic's at the first step; starts (B, T) says where an episode begins.
        `recent` and `state` are zero where one begins at the first step. `whole`: none begins
        later, which spares cutting the sequences up.
        """
        features = self.feature_sequence(observations, recent, starts, whole)
        if whole:
            actor = self.actor(features, _start(state, 0))[0]
            critic = self.critic(features, _start(state, 2))[0]
        else:
            cut = Segments(starts)
            parts, state = cut.split(features), cut.first_states(state)
            actor = cut.join(self.actor(parts, _start(state, 0))[0])
            critic = cut.join(self.critic(parts, _start(state, 2))[0])
        values = self.value_head(critic).squeeze(-1)
        return Output(_wide(self.action_head(actor)), _wide(values))

    def feature_sequence(
        self, observations: Tensor, recent: Tensor, starts: Tensor, whole: bool
    ) -> Tensor:
        """Features (B, T, F) of the window that ends at each step."""
        batch, steps, size = observations.shape
        if self.window == 1:
            inputs, _, bias = _weights(self.feature)
            return _first_step(observations @ inputs.t() + bias)
        padded = torch.cat([recent, observations], 1)
        # (B, T, window, O): the steps t - window + 1 ... t
        windows = padded.unfold(1, self.window, 1).transpose(2, 3)
        if not whole:
            windows = windows * self._inside(starts).unsqueeze(-1).to(windows.dtype)
        windows = windows.reshape(batch * steps, self.window, size)
        last: Tensor = self.feature(windows)[0][:, -1]
        return last.view(batch, steps, -1)

    def _inside(self, starts: Tensor) -> Tensor:
        """(B, T, window): whether that step of the window belongs to the episode of step t."""
        steps = starts.shape[1]
        at = torch.arange(steps, device=starts.device)
        begun = torch.where(starts, at, -self.window).cummax(1).values
        place = at.unsqueeze(1) - torch.arange(self.window - 1, -1, -1, device=starts.device)
        return place >= begun.unsqueeze(-1)


def _wide(values: Tensor) -> Tensor:
    """Ratios of probabilities need more than the 16 bits of mixed precision."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _start(state: Tensor, which: int) -> tuple[Tensor, Tensor]:
    """Hidden and cell state as torch's LSTM takes them."""
    hidden, cell = state[:, which], state[:, which + 1]
    return hidden.unsqueeze(0).contiguous(), cell.unsqueeze(0).contiguous()


class Segments:
    """Sequences cut where an episode begins, so that each part runs through an LSTM at once.

    An LSTM of torch cannot forget in the middle of a sequence; a loop over single steps is many
    times slower. Parts are padded to the longest; what the padding gives is dropped.
    """

    def __init__(self, starts: Tensor) -> None:
        self.batch, self.steps = starts.shape
        begins = starts.clone()
        begins[:, 0] = True
        flat = begins.flatten()
        at = torch.arange(flat.numel(), device=starts.device)
        first = at[flat]
        self.part = flat.cumsum(0) - 1
        self.offset = at - first[self.part]
        self.longest = int(self.offset.max()) + 1
        self.first = first
        self.is_first = first % self.steps == 0

    def split(self, values: Tensor) -> Tensor:
        """(B, T, F) as (parts, longest, F)."""
        flat = values.reshape(self.batch * self.steps, -1)
        out = flat.new_zeros(len(self.first), self.longest, flat.shape[1])
        return out.index_put((self.part, self.offset), flat)

    def first_states(self, state: Tensor) -> Tensor:
        """The state of a part: a sequence's own for its first one, zero for the others."""
        out = state.new_zeros(len(self.first), *state.shape[1:])
        out[self.is_first] = state
        return out

    def join(self, values: Tensor) -> Tensor:
        """(parts, longest, H) as (B, T, H)."""
        return values[self.part, self.offset].view(self.batch, self.steps, -1)


class Stepper:
    """The policy one step at a time, for rollouts: the same numbers with few operations.

    Actor and critic have the same input and size, so that both are computed at once. It holds
    copies of the weights: make a new one when they have moved.
    """

    def __init__(self, policy: CLSTMPolicy) -> None:
        self.policy = policy
        with torch.no_grad():
            actor, critic = _weights(policy.actor), _weights(policy.critic)
            self.inputs = torch.cat([actor[0], critic[0]]).t().contiguous()
            self.recurrent = torch.stack([actor[1].t(), critic[1].t()]).contiguous()
            self.bias = torch.cat([actor[2], critic[2]])
            inputs, _, self.feature_bias = _weights(policy.feature)
            self.feature_inputs = inputs.t().contiguous()

    def __call__(self, windows: Tensor, state: Tensor) -> tuple[Output, Tensor]:
        """Output and new state (2, 2, N, H): hidden | cell, actor | critic."""
        features = self._features(windows)
        count = len(features)
        gates = torch.addmm(self.bias, features, self.inputs).view(count, 2, -1).transpose(0, 1)
        gates = torch.baddbmm(gates, state[0], self.recurrent)
        take, keep, new, give = gates.chunk(4, -1)
        cell = keep.sigmoid() * state[1] + take.sigmoid() * new.tanh()
        hidden = give.sigmoid() * cell.tanh()
        policy = self.policy
        values = policy.value_head(hidden[1]).squeeze(-1)
        return Output(policy.action_head(hidden[0]), values), torch.stack([hidden, cell])

    def _features(self, windows: Tensor) -> Tensor:
        if self.policy.window > 1:
            last: Tensor = self.policy.feature(windows)[0][:, -1]
            return last
        return _first_step(torch.addmm(self.feature_bias, windows[:, 0], self.feature_inputs))


def _first_step(gates: Tensor) -> Tensor:
    """What an LSTM gives after one step from a zero state: there is nothing to keep."""
    take, _, new, give = gates.chunk(4, -1)
    return give.sigmoid() * (take.sigmoid() * new.tanh()).tanh()


def _weights(lstm: nn.LSTM) -> tuple[Tensor, Tensor, Tensor]:
    """Input weights, recurrent weights, and the sum of the two biases."""
    inputs, recurrent, first, second = lstm.parameters()
    return inputs, recurrent, first + second
