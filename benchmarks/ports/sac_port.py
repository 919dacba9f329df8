"""CleanRL sac_continuous_action.py: replay buffer, twin critics, targets that follow, an actor that
learns every second step as many times, a temperature with its own optimizer."""

import copy

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

from multi_gpu_training import MultiGPUTrainingManager

TOTAL, START, BATCH, TAU, GAMMA, FREQ = 26, 8, 7, 0.05, 0.99, 2


def net(i, o):
    return nn.Sequential(nn.Linear(i, 8), nn.ReLU(), nn.Linear(8, o))


def build():
    torch.manual_seed(1)
    return nn.ModuleDict({"actor": net(3, 2), "qf1": net(4, 1), "qf2": net(4, 1)})


def act(actor, obs, noise):
    mean, log_std = actor(obs).chunk(2, -1)
    log_std = torch.tanh(log_std)
    x = mean + log_std.exp() * noise
    y = torch.tanh(x)
    normal = torch.distributions.Normal(mean, log_std.exp())
    logp = normal.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)
    return y * 2, logp.sum(1, keepdim=True)


def drawn(buffer, rng):
    rows = [buffer[i] for i in rng.integers(0, len(buffer), BATCH)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def original(model, device="cpu"):
    torch.manual_seed(2)
    rng = np.random.default_rng(0)
    actor, qf1, qf2 = model["actor"], model["qf1"], model["qf2"]
    t1, t2 = copy.deepcopy(qf1), copy.deepcopy(qf2)
    qopt = optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2)
    aopt = optim.Adam(actor.parameters(), lr=3e-3)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = log_alpha.exp().item()
    lopt = optim.Adam([log_alpha], lr=1e-2)
    env = gymnasium.make("Pendulum-v1")
    obs, _ = env.reset(seed=1)
    buffer = []
    for step in range(TOTAL):
        o = torch.as_tensor(obs, dtype=torch.float64)[None]
        with torch.no_grad():
            action = act(actor, o, torch.randn(1, 1))[0][0]
        nxt, reward, *_ = env.step(action.numpy())
        buffer.append(
            (o[0], action, torch.tensor([reward]).double(), torch.as_tensor(nxt).double())
        )
        obs = nxt
        if step > START:
            s, a, r, n = drawn(buffer, rng)
            with torch.no_grad():
                na, nlogp = act(actor, n, torch.randn(BATCH, 1))
                v = torch.min(t1(torch.cat([n, na], 1)), t2(torch.cat([n, na], 1))) - alpha * nlogp
                target = r + GAMMA * v
            qloss = F.mse_loss(qf1(torch.cat([s, a], 1)), target) + F.mse_loss(
                qf2(torch.cat([s, a], 1)), target
            )
            qopt.zero_grad()
            qloss.backward()
            qopt.step()
            if step % FREQ == 0:
                for _ in range(FREQ):
                    pi, logp = act(actor, s, torch.randn(BATCH, 1))
                    q = torch.min(qf1(torch.cat([s, pi], 1)), qf2(torch.cat([s, pi], 1)))
                    aloss = (alpha * logp - q).mean()
                    aopt.zero_grad()
                    aloss.backward()
                    aopt.step()
                    with torch.no_grad():
                        _, logp = act(actor, s, torch.randn(BATCH, 1))
                    lloss = (-log_alpha.exp() * (logp - 1)).mean()
                    lopt.zero_grad()
                    lloss.backward()
                    lopt.step()
                    alpha = log_alpha.exp().item()
            for q, t in ((qf1, t1), (qf2, t2)):
                for p, tp in zip(q.parameters(), t.parameters(), strict=True):
                    tp.data.copy_(TAU * p.data + (1 - TAU) * tp.data)
    return {
        "alpha": alpha,
        "qloss": qloss.item(),
        "t1": sum(p.detach().sum() for p in t1.parameters()).item(),
    }


def ported(model, config):
    torch.manual_seed(2)
    manager = MultiGPUTrainingManager(config)
    rng = np.random.default_rng(0)
    actor, qf1, qf2 = model["actor"], model["qf1"], model["qf2"]
    t1, t2 = copy.deepcopy(qf1).requires_grad_(False), copy.deepcopy(qf2).requires_grad_(False)
    qopt = optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2)
    aopt = optim.Adam(actor.parameters(), lr=3e-3)
    log_alpha = nn.Parameter(torch.zeros(1))
    lopt = optim.Adam([log_alpha], lr=1e-2)

    class Play:  # what the loop keeps: the environment, the buffer, the step
        def __init__(self):
            self.env = gymnasium.make("Pendulum-v1")
            self.obs, _ = self.env.reset(seed=1)
            self.buffer, self.step = [], 0

        def state_dict(self):
            return {
                "obs": torch.as_tensor(self.obs),
                "buffer": self.buffer,
                "step": self.step,
                "env": torch.as_tensor(self.env.unwrapped.state),
            }

        def load_state_dict(self, state):
            self.obs, self.step = state["obs"].numpy(), state["step"]
            self.buffer = [tuple(x) for x in state["buffer"]]
            self.env.unwrapped.state = state["env"].numpy()

    play = Play()
    trainer = manager.prepare(
        actor, qf1, qf2, t1, t2, qopt, aopt, lopt, states={"play": play, "rng": rng}
    )
    qloss = torch.zeros(())
    while play.step < TOTAL:
        step = play.step
        o = torch.as_tensor(play.obs, dtype=torch.float64)[None]
        with torch.no_grad():
            action = act(actor, o, torch.randn(1, 1))[0][0]
        nxt, reward, *_ = play.env.step(action.numpy())
        play.buffer.append(
            (o[0], action, torch.tensor([reward]).double(), torch.as_tensor(nxt).double())
        )
        play.obs, play.step = nxt, step + 1
        if step > START:
            batch = drawn(play.buffer, rng)
            noise = [
                torch.randn(BATCH, 1) for _ in range(1 + (2 * FREQ if step % FREQ == 0 else 0))
            ]
            with trainer.step(manager.shard((*batch, *noise))) as (s, a, r, n, *noise):
                alpha = log_alpha.exp().item()
                with torch.no_grad():
                    na, nlogp = act(actor, n, noise.pop(0))
                    v = (
                        torch.min(t1(torch.cat([n, na], 1)), t2(torch.cat([n, na], 1)))
                        - alpha * nlogp
                    )
                    target = r + GAMMA * v
                qloss = trainer.backward(
                    F.mse_loss(qf1(torch.cat([s, a], 1)), target)
                    + F.mse_loss(qf2(torch.cat([s, a], 1)), target),
                    optimizer=qopt,
                )
                qopt.step()
                if step % FREQ == 0:
                    for _ in range(FREQ):
                        pi, logp = act(actor, s, noise.pop(0))
                        q = torch.min(qf1(torch.cat([s, pi], 1)), qf2(torch.cat([s, pi], 1)))
                        trainer.backward((alpha * logp - q).mean(), optimizer=aopt)
                        aopt.step()
                        with torch.no_grad():
                            _, logp = act(actor, s, noise.pop(0))
                        trainer.backward((-log_alpha.exp() * (logp - 1)).mean(), optimizer=lopt)
                        lopt.step()
                        alpha = log_alpha.exp().item()
                for q, t in ((qf1, t1), (qf2, t2)):
                    for p, tp in zip(q.parameters(), t.parameters(), strict=True):
                        tp.data.copy_(TAU * p.data + (1 - TAU) * tp.data)
    manager.finish()
    return {
        "alpha": log_alpha.exp().item(),
        "qloss": qloss.item(),
        "t1": sum(p.detach().sum() for p in t1.parameters()).item(),
    }
