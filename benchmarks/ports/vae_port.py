"""pytorch/examples vae: a loss summed over the batch, noise drawn in the model, and the test loss
of each epoch. Here the noise comes with the pictures, so that both trainings draw alike."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EPOCHS, PIXELS, LATENT = 6, 2, 20, 3


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc3 = nn.Linear(PIXELS, 10), nn.Linear(LATENT, 10)
        self.fc21, self.fc22, self.fc4 = (nn.Linear(10, n) for n in (LATENT, LATENT, PIXELS))

    def forward(self, x, noise):
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + noise * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def build():
    torch.manual_seed(1)
    return VAE()


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, LATENT, generator=generator)
    return TensorDataset(torch.rand(count, PIXELS, generator=generator), noise)


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def original(model, device="cpu"):
    train_loader = DataLoader(pictures(20, 0), batch_size=BATCH)
    test_loader = DataLoader(pictures(15, 1), batch_size=BATCH)
    model = model.to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        model.train()
        train_loss = 0.0
        for number, (data, noise) in enumerate(train_loader):
            data, noise = data.to(device), noise.to(device)
            optimizer.zero_grad()
            recon, mu, logvar = model(data, noise)
            loss = loss_function(recon, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            if number % 10 == 0:
                print(f"epoch {epoch} batch {number}: {loss.item() / len(data):.6f}")
        print(f"epoch {epoch}: average loss {train_loss / len(train_loader.dataset):.4f}")
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for data, noise in test_loader:
                data, noise = data.to(device), noise.to(device)
                recon, mu, logvar = model(data, noise)
                test_loss += loss_function(recon, data, mu, logvar).item()
        test_loss /= len(test_loader.dataset)
        print(f"test loss {test_loss:.4f}")
    return {"loss": test_loss}


def ported(model, config):
    config.global_batch_size = BATCH
    manager = MultiGPUTrainingManager(config)

    def loss_of(model, batch):
        data, noise = batch
        recon, mu, logvar = model(data, noise)
        return loss_function(recon, data, mu, logvar)

    def eval_fn(model, batch, metrics):
        metrics.add("loss", loss_of(model, batch), len(batch[0]))

    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    trainer = manager.prepare(model, optimizer, dataset=pictures(20, 0), eval_fn=eval_fn)
    for _ in range(trainer.epoch, EPOCHS):
        for batch in manager.train_loader:
            with trainer.step(batch) as batch:
                trainer.backward(loss_of(model, batch), reduction="sum")
        metrics = manager.evaluate(pictures(15, 1))
        manager.log(test_loss=metrics["loss"])
    manager.finish()
    return {"loss": metrics["loss"]}
