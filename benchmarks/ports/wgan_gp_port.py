"""PyTorch-GAN wgan_gp.py: the critic learns from each batch, the generator from every third; a
gradient penalty with a number per sample."""

import torch
from torch import autograd, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EPOCHS, CRITIC, Z = 6, 3, 3, 4


def build():
    torch.manual_seed(1)
    return nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(Z, 8), nn.LeakyReLU(0.2), nn.Linear(8, 5), nn.Tanh()),
            "d": nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        }
    )


def data():
    return TensorDataset(torch.randn(26, 5, generator=torch.Generator().manual_seed(0)))


def penalty(D, real, fake, alpha):
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = D(mixed)
    (g,) = autograd.grad(
        out, mixed, torch.ones_like(out), create_graph=True, retain_graph=True, only_inputs=True
    )
    return ((g.norm(2, dim=1) - 1) ** 2).mean()


def original(model, device="cpu"):
    torch.manual_seed(5)
    G, D = model["g"], model["d"]
    og = optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    od = optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for _ in range(EPOCHS):
        for i, (real,) in enumerate(
            DataLoader(data(), batch_size=BATCH, generator=torch.Generator())
        ):
            od.zero_grad()
            z, alpha = torch.randn(len(real), Z), torch.rand(len(real), 1)
            fake = G(z)
            d_loss = -D(real).mean() + D(fake).mean() + 10 * penalty(D, real.data, fake.data, alpha)
            d_loss.backward()
            od.step()
            og.zero_grad()
            if i % CRITIC == 0:
                fake = G(z)
                g_loss = -D(fake).mean()
                g_loss.backward()
                og.step()
    return {"d": d_loss.item(), "g": g_loss.item()}


def ported(model, config):
    torch.manual_seed(5)
    config.global_batch_size, config.epochs = BATCH, EPOCHS
    manager = MultiGPUTrainingManager(config)
    G, D = model["g"], model["d"]
    og = optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    od = optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    trainer = manager.prepare(G, D, og, od, dataset=data())
    per_epoch = manager.steps_per_epoch(data())
    d = g = 0.0
    for _ in range(trainer.epoch, EPOCHS):
        for batch in manager.train_loader:
            i = manager.step % per_epoch
            size = min(BATCH, 26 - i * BATCH)
            z, alpha = torch.randn(size, Z), torch.rand(size, 1)
            z, alpha = manager.shard((z, alpha))
            with trainer.step(batch) as (real,):
                fake = G(z)
                d = trainer.backward(
                    -D(real).mean()
                    + D(fake.detach()).mean()
                    + 10 * penalty(D, real, fake.detach(), alpha),
                    optimizer=od,
                )
                od.step()
                if i % CRITIC == 0:
                    g = trainer.backward(-D(G(z)).mean(), optimizer=og)
                    og.step()
    manager.finish()
    return {"d": float(d), "g": float(g)}
