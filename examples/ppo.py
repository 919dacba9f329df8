"""PPO on CartPole with your own loop: every rank plays its own environments, all learn together.

    pip install gymnasium
    python examples/ppo.py                                     # all GPUs, or the CPU
    mgt run --num-gpus 2 examples/ppo.py --iterations 30

Each environment has its own seed and noise, and minibatches hold the same time steps of every
environment. So the number of ranks changes who plays what, not what is learned. For recurrent
policies, other environments and checkpoints of the environments, use `mgt train ppo`.
"""

import argparse
from itertools import pairwise

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from multi_gpu_training import MetricsCollector, MultiGPUConfig, MultiGPUTrainingManager

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class ActorCritic(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


class Player:
    """One environment with its own random numbers, on whichever rank it is played."""

    def __init__(self, number: int) -> None:
        self.env, self.random = gymnasium.make("CartPole-v1"), np.random.default_rng(number)
        self.state, _ = self.env.reset(seed=number)
        self.score, self.scores = 0.0, []

    def play(self, logits: np.ndarray) -> tuple[int, float, bool]:
        action = int((logits + self.random.gumbel(size=2)).argmax())  # drawn with softmax(logits)
        self.state, reward, fallen, timeout, _ = self.env.step(action)
        self.score += float(reward)
        if fallen or timeout:
            self.scores.append(self.score)
            self.score = 0.0
            self.state, _ = self.env.reset()
        return action, float(reward), fallen or timeout


@torch.no_grad()
def collect(
    model: nn.Module, players: list[Player], steps: int, device: torch.device
) -> list[Tensor]:
    """States, actions, their log-probabilities, advantages and returns, each (steps, players)."""
    kept = []
    for _ in range(steps):
        states = torch.tensor(np.stack([player.state for player in players]), device=device)
        logits, values = model(states)
        played = [p.play(row) for p, row in zip(players, logits.cpu().numpy(), strict=True)]
        actions, rewards, ends = (torch.tensor(x, device=device) for x in zip(*played, strict=True))
        logprobs = Categorical(logits=logits).log_prob(actions)
        kept.append((states, actions, logprobs, values, rewards, ends.float()))
    states, actions, logprobs, values, rewards, ends = map(torch.stack, zip(*kept, strict=True))
    last = model(torch.tensor(np.stack([p.state for p in players]), device=device))[1]
    following, carried, advantages = last, torch.zeros_like(last), torch.zeros_like(values)
    for step in reversed(range(steps)):  # generalised advantage estimation
        alive = 1 - ends[step]
        surprise = rewards[step] + GAMMA * alive * following - values[step]
        carried = advantages[step] = surprise + GAMMA * LAMBDA * alive * carried
        following = values[step]
    return [states, actions, logprobs, advantages, advantages + values]


def over_ranks(manager: MultiGPUTrainingManager, **values: Tensor) -> dict[str, float]:
    """Means over all ranks."""
    metrics = MetricsCollector()
    for name, value in values.items():
        metrics.add(name, value.sum(), value.numel())
    return metrics.compute(manager.placement)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on CartPole.")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--envs", type=int, default=8, help="over all ranks")
    parser.add_argument("--steps", type=int, default=128, help="steps per environment")
    parser.add_argument("--passes", type=int, default=8, help="passes over each rollout")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    manager = MultiGPUTrainingManager(MultiGPUConfig(max_grad_norm=0.5))
    place = manager.placement
    if args.envs < place.dp_size:
        parser.error(f"{place.dp_size} ranks need at least as many --envs, not {args.envs}")
    players = [Player(number) for number in range(place.dp_rank, args.envs, place.dp_size)]
    torch.manual_seed(0)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    trainer = manager.prepare(model, optimizer)
    shared = torch.Generator().manual_seed(0)  # the same order of time steps on every rank

    for iteration in range(args.iterations):
        rollout = collect(model, players, args.steps, place.device)
        found = over_ranks(manager, mean=rollout[3], square=rollout[3] ** 2)
        spread = (found["square"] - found["mean"] ** 2) ** 0.5
        rollout[3] = (rollout[3] - found["mean"]) / (spread + 1e-8)
        for _ in range(args.passes):
            order = torch.randperm(args.steps, generator=shared)
            for begin, end in pairwise(range(0, args.steps + 1, args.steps // 4)):
                chosen = order[begin:end].to(place.device)
                # A batch that this rank made weighs as many samples as it has.
                batch = [part[chosen].flatten(0, 1) for part in rollout]
                with trainer.step(batch) as (states, actions, before, advantages, returns):
                    logits, values = model(states)
                    now = Categorical(logits=logits)
                    ratio = (now.log_prob(actions) - before).exp()
                    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                    policy = -torch.minimum(ratio * advantages, clipped * advantages).mean()
                    value = (values - returns).square().mean()
                    trainer.backward(policy + 0.5 * value - 0.01 * now.entropy().mean())
        recent = torch.tensor([score for player in players for score in player.scores[-5:]])
        score = over_ranks(manager, score=recent)["score"]
        manager.log(score=score)
        if iteration % 10 == 9 or iteration == args.iterations - 1:
            manager.say(f"iteration {iteration + 1}: mean score {score:.1f} of 500")
    manager.save_checkpoint()
    manager.finish()


if __name__ == "__main__":
    main()
