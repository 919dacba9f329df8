"""denoising-diffusion-pytorch: noise and a time per sample, accumulation of two, clipping, an EMA
that follows each step, a cosine schedule."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager

BATCH, STEPS, T, ACC, DECAY = 6, 8, 20, 2, 0.9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(T, 8)
        self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x, t):
        return self.two(F.silu(self.one(x) + self.emb(t)))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.ema = Net(), Net().requires_grad_(False)
        self.ema.load_state_dict(self.net.state_dict())


def build():
    torch.manual_seed(1)
    return Both()


def data():
    return TensorDataset(torch.randn(48, 5, generator=torch.Generator().manual_seed(0)))


def noisy(x, t, noise):
    a = torch.linspace(0.99, 0.1, T)[t][:, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


def original(model, device="cpu"):
    g = torch.Generator().manual_seed(3)
    optimizer = optim.Adam(model.net.parameters(), lr=5e-3)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(data(), batch_size=BATCH)
    it = iter(loader)
    for _ in range(STEPS):
        total = 0.0
        for _ in range(ACC):
            try:
                (x,) = next(it)
            except StopIteration:
                it = iter(loader)
                (x,) = next(it)
            t = torch.randint(T, (len(x),), generator=g)
            noise = torch.randn(x.shape, generator=g)
            loss = F.mse_loss(model.net(noisy(x, t, noise), t), noise) / ACC
            total += loss.item()
            loss.backward()
        nn.utils.clip_grad_norm_(model.net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for p, e in zip(model.net.parameters(), model.ema.parameters(), strict=True):
                e.lerp_(p, 1 - DECAY)
    return {"loss": total}


def ported(model, config):
    g = torch.Generator().manual_seed(3)
    config.max_grad_norm = 1.0
    manager = MultiGPUTrainingManager(config)
    optimizer = optim.Adam(model.net.parameters(), lr=5e-3)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    trainer = manager.prepare(model, optimizer, scheduler, states={"noise": g})
    rows = data().tensors[0]
    total = 0.0
    for step in range(manager.step, STEPS):
        with trainer.step():
            for micro in range(ACC):
                at = (step * ACC + micro) % 8 * BATCH
                x = rows[at : at + BATCH]
                t = torch.randint(T, (len(x),), generator=g)
                noise = torch.randn(x.shape, generator=g)
                x, t, noise = manager.shard((x, t, noise))
                total = trainer.backward(
                    F.mse_loss(model.net(noisy(x, t, noise), t), noise), last=micro == ACC - 1
                )
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for p, e in zip(model.net.parameters(), model.ema.parameters(), strict=True):
                    e.lerp_(p, 1 - DECAY)
    manager.finish()
    return {"loss": float(total)}
