"""pytorch/examples actor_critic: episodes of CartPole, an actor and a critic in one model, losses
summed over the episode. All ranks play the same episode, and each learns from its part."""

import gymnasium
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

from multi_gpu_training import MultiGPUTrainingManager

EPISODES, GAMMA, SEED = 6, 0.99, 543


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.action_head, self.value_head = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), -1), self.value_head(x)


def build():
    torch.manual_seed(SEED)
    return Policy()


def discounted(rewards):
    total, returns = 0.0, []
    for reward in rewards[::-1]:
        total = reward + GAMMA * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    return (returns - returns.mean()) / (returns.std() + 1e-8)


def original(model, device="cpu"):
    torch.manual_seed(SEED)
    env = gymnasium.make("CartPole-v1")
    model = model.to(device)
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    running = 10.0
    for episode in range(EPISODES):
        state, _ = env.reset(seed=SEED + episode)
        saved, rewards, ended = [], [], False
        while not ended:
            probs, value = model(torch.as_tensor(state).double().to(device))
            chosen = Categorical(probs)
            action = chosen.sample()
            saved.append((chosen.log_prob(action), value))
            state, reward, done, cut, _ = env.step(action.item())
            rewards.append(reward)
            ended = done or cut
        running = 0.05 * sum(rewards) + 0.95 * running
        policy_losses, value_losses = [], []
        for (log_prob, value), wanted in zip(saved, discounted(rewards), strict=True):
            wanted = wanted.to(device)
            policy_losses.append(-log_prob * (wanted - value.item()))
            value_losses.append(F.smooth_l1_loss(value, wanted[None]))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        print(f"episode {episode}: {sum(rewards)}, on average {running:.2f}")
    return {"running": running}


def ported(model, config):
    torch.manual_seed(SEED)
    manager = MultiGPUTrainingManager(config)
    env = gymnasium.make("CartPole-v1")
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    trainer = manager.prepare(model, optimizer)
    running = 10.0
    for episode in range(manager.step, EPISODES):
        state, _ = env.reset(seed=SEED + episode)
        states, actions, rewards, ended = [], [], [], False
        while not ended:
            states.append(torch.as_tensor(state).double())
            probs, _ = model(states[-1].to(manager.placement.device))
            actions.append(Categorical(probs).sample())
            state, reward, done, cut, _ = env.step(actions[-1].item())
            rewards.append(reward)
            ended = done or cut
        running = 0.05 * sum(rewards) + 0.95 * running
        batch = torch.stack(states), torch.stack(actions), discounted(rewards)
        with trainer.step(manager.shard(batch)) as (seen, taken, wanted):
            probs, values = model(seen)
            advantage = wanted - values.detach()[:, 0]
            policy_loss = -(Categorical(probs).log_prob(taken) * advantage).sum()
            value_loss = F.smooth_l1_loss(values[:, 0], wanted, reduction="sum")
            trainer.backward(policy_loss + value_loss, reduction="sum")
        manager.log(reward=sum(rewards), running_reward=running)
    manager.finish()
    return {"running": running}
