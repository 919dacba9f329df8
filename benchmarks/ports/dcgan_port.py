"""pytorch/examples dcgan: two networks with BatchNorm, two Adams, real and fake losses in turn,
noise drawn in the loop. Without the pictures of samples, which the original draws in train mode."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EPOCHS, NOISE, RATE = 6, 2, 5, 2e-3


def build():
    torch.manual_seed(3)
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 6, 4, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.LeakyReLU(0.2),
        nn.Conv2d(6, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def pictures():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(20, 1, 8, 8, generator=generator).tanh())


def original(model, device="cpu"):
    torch.manual_seed(999)
    loader = DataLoader(pictures(), batch_size=BATCH)
    netG, netD = model["generator"].to(device), model["discriminator"].to(device)
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=RATE, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=RATE, betas=(0.5, 0.999))
    for epoch in range(EPOCHS):
        for number, (real,) in enumerate(loader):
            netD.zero_grad()
            real = real.to(device)
            label = torch.full((len(real),), 1.0, dtype=real.dtype, device=device)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            fake = netG(torch.randn(len(real), NOISE, 1, 1, device=device))
            label.fill_(0.0)
            errD_fake = criterion(netD(fake.detach()), label)
            errD_fake.backward()
            errD = errD_real + errD_fake
            optimizerD.step()
            netG.zero_grad()
            label.fill_(1.0)
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
            print(f"{epoch}/{number}: loss_D {errD.item():.4f} loss_G {errG.item():.4f}")
        torch.save(netG.state_dict(), "/dev/null")
        torch.save(netD.state_dict(), "/dev/null")
    return {"errD": errD.item(), "errG": errG.item()}


def ported(model, config):
    config.sync_bn = True
    torch.manual_seed(999)
    manager = MultiGPUTrainingManager(config)
    loader = DataLoader(pictures(), batch_size=BATCH)
    netG, netD = model["generator"], model["discriminator"]
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=RATE, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=RATE, betas=(0.5, 0.999))
    trainer = manager.prepare(netG, netD, optimizerG, optimizerD)
    for _ in range(EPOCHS):
        for (real,) in loader:
            batch = manager.shard((real, torch.randn(len(real), NOISE, 1, 1)))
            with trainer.step(batch) as (real, noise):
                ones, zeros = real.new_ones(len(real)), real.new_zeros(len(real))
                errD = trainer.backward(criterion(netD(real), ones), optimizerD)
                fake = netG(noise)
                errD += trainer.backward(criterion(netD(fake.detach()), zeros), optimizerD)
                optimizerD.step()
                errG = trainer.backward(criterion(netD(fake), ones), optimizerG)
        manager.save_checkpoint()
    manager.finish()
    return {"errD": errD.item(), "errG": errG.item()}
