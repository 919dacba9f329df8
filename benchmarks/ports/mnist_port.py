"""pytorch/examples mnist: a CNN, Adadelta, StepLR by epoch, test loss and accuracy."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager

BATCH, TEST_BATCH, EPOCHS = 6, 10, 2


def build():
    """Smaller than the original, and without dropout, which draws anew on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
        nn.LogSoftmax(1),
    )


def digits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(count, 1, 12, 12, generator=generator)
    return TensorDataset(pictures, torch.randint(10, (count,), generator=generator))


def original(model, device="cpu"):
    train_loader = DataLoader(digits(20, 0), batch_size=BATCH)
    test_loader = DataLoader(digits(15, 1), batch_size=TEST_BATCH)
    model = model.to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(EPOCHS):
        model.train()
        for number, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                print(f"epoch {epoch} batch {number}/{len(train_loader)}: {loss.item():.6f}")
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for data, target in test_loader:
                data, target = data.to(device), target.to(device)
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += (output.argmax(1) == target).sum().item()
        test_loss /= len(test_loader.dataset)
        print(f"test loss {test_loss:.4f}, accuracy {correct / len(test_loader.dataset):.2%}")
        scheduler.step()
    return {"loss": test_loss, "accuracy": correct / len(test_loader.dataset)}


def ported(model, config):
    config.epochs, config.scheduler_unit, config.global_batch_size = EPOCHS, "epoch", BATCH
    result = MultiGPUTrainingManager(config).fit(
        model,
        DataLoader(digits(20, 0), batch_size=BATCH),
        DataLoader(digits(15, 1), batch_size=TEST_BATCH),
        loss_fn=nn.NLLLoss(),
        optimizer=lambda parameters: optim.Adadelta(parameters, lr=1.0),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
    )
    return {name: result.metrics[name] for name in ("loss", "accuracy")}
