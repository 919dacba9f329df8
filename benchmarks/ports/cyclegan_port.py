"""PyTorch-GAN cyclegan.py: two generators in one optimizer, two critics, adversarial and cycle
losses, LambdaLR per epoch for three optimizers. Without its pool of earlier fakes."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EPOCHS = 4, 2


def gen():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 5))


def crit():
    return nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def build():
    torch.manual_seed(1)
    return nn.ModuleDict({"gab": gen(), "gba": gen(), "da": crit(), "db": crit()})


def data():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(18, 5, generator=g), torch.randn(18, 5, generator=g) + 1)


def mse(x, v):
    return F.mse_loss(x, torch.full_like(x, v))


def optimizers(m):
    og = optim.Adam(itertools.chain(m["gab"].parameters(), m["gba"].parameters()), lr=2e-3)
    oa, ob = (optim.Adam(m[k].parameters(), lr=2e-3) for k in ("da", "db"))
    return og, oa, ob, [optim.lr_scheduler.LambdaLR(o, lambda e: 1 - e / 4) for o in (og, oa, ob)]


def original(m, device="cpu"):
    og, oa, ob, schedulers = optimizers(m)
    for _ in range(EPOCHS):
        for a, b in DataLoader(data(), batch_size=BATCH):
            og.zero_grad()
            fb, fa = m["gab"](a), m["gba"](b)
            loss = (mse(m["db"](fb), 1.0) + mse(m["da"](fa), 1.0)) / 2
            loss = loss + 10 * (F.l1_loss(m["gba"](fb), a) + F.l1_loss(m["gab"](fa), b)) / 2
            loss.backward()
            og.step()
            for d, o, real, fake in (("da", oa, a, fa), ("db", ob, b, fb)):
                o.zero_grad()
                dloss = (mse(m[d](real), 1.0) + mse(m[d](fake.detach()), 0.0)) / 2
                dloss.backward()
                o.step()
        for s in schedulers:
            s.step()
    return {"g": loss.item(), "d": dloss.item()}


def ported(m, config):
    config.global_batch_size, config.epochs = BATCH, EPOCHS
    manager = MultiGPUTrainingManager(config)
    og, oa, ob, schedulers = optimizers(m)
    trainer = manager.prepare(*m.values(), og, oa, ob, *schedulers, dataset=data())
    loss = dloss = 0.0
    for _ in range(trainer.epoch, EPOCHS):
        for batch in manager.train_loader:
            with trainer.step(batch) as (a, b):
                fb, fa = m["gab"](a), m["gba"](b)
                loss = (mse(m["db"](fb), 1.0) + mse(m["da"](fa), 1.0)) / 2
                loss = loss + 10 * (F.l1_loss(m["gba"](fb), a) + F.l1_loss(m["gab"](fa), b)) / 2
                loss = trainer.backward(loss, optimizer=og)
                og.step()
                for d, o, real, fake in (("da", oa, a, fa), ("db", ob, b, fb)):
                    dloss = trainer.backward(
                        (mse(m[d](real), 1.0) + mse(m[d](fake.detach()), 0.0)) / 2, optimizer=o
                    )
                    o.step()
        for s in schedulers:
            s.step()
    manager.finish()
    return {"g": float(loss), "d": float(dloss)}
