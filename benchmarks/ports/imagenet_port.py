"""pytorch/examples imagenet: a ResNet with BatchNorm, SGD with momentum, StepLR by epoch, top-1 and
top-5 in training and validation, the best checkpoint by top-1."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EPOCHS, CLASSES = 6, 3, 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(self.norms[1](self.convs[1](y)) + x)


def build():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        Block(6),
        Block(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 3, 10, 10, generator=generator)
    return TensorDataset(noise + labels[:, None, None, None] / CLASSES, labels)


def hits(output, target, k):
    return (output.topk(k, 1).indices == target[:, None]).any(1).sum()


def original(model, device="cpu"):
    train_loader = DataLoader(pictures(26, 0), batch_size=BATCH)
    val_loader = DataLoader(pictures(17, 1), batch_size=BATCH)
    model = model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    best = 0.0
    for epoch in range(EPOCHS):
        model.train()
        losses = top1 = top5 = count = 0
        for number, (images, target) in enumerate(train_loader):
            images, target = images.to(device), target.to(device)
            output = model(images)
            loss = criterion(output, target)
            losses, count = losses + loss.item() * len(images), count + len(images)
            top1, top5 = top1 + hits(output, target, 1), top5 + hits(output, target, 5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                print(f"{epoch} {number}: {losses / count:.4f} {top1 / count} {top5 / count}")
        model.eval()
        losses = top1 = top5 = count = 0
        with torch.no_grad():
            for images, target in val_loader:
                images, target = images.to(device), target.to(device)
                output = model(images)
                losses += criterion(output, target).item() * len(images)
                top1, top5 = top1 + hits(output, target, 1), top5 + hits(output, target, 5)
                count += len(images)
        result = {"loss": losses / count, "acc1": top1.item() / count, "acc5": top5.item() / count}
        print(f"epoch {epoch}: {result}")
        scheduler.step()
        state = {"epoch": epoch + 1, "model": model.state_dict(), "best": best}
        state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state, "/dev/null")
        if result["acc1"] > best:
            best = result["acc1"]
            torch.save(state, "/dev/null")
    return result


def ported(model, config):
    config.epochs, config.global_batch_size, config.scheduler_unit = EPOCHS, BATCH, "epoch"
    config.sync_bn, config.best_metric = True, "acc1"

    def loss_fn(model, batch):
        images, target = batch
        output = model(images)
        top = {f"acc{k}": (hits(output, target, k), len(target)) for k in (1, 5)}
        return F.cross_entropy(output, target), None, top

    result = MultiGPUTrainingManager(config).fit(
        model,
        DataLoader(pictures(26, 0), batch_size=BATCH),
        DataLoader(pictures(17, 1), batch_size=BATCH),
        loss_fn=loss_fn,
        optimizer=optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.1),
    )
    return {name: result.metrics[name] for name in ("loss", "acc1", "acc5")}
