"""accelerate's cv_example: a frozen ResNet with a new head, pictures and labels by name, inputs
normalised on the device, OneCycleLR by step, accuracy over all validation pictures."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EPOCHS, RATE, CLASSES = 8, 3, 3e-2, 5
MEAN, STD = (torch.tensor(v)[None, :, None, None] for v in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.2)))


def build():
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    return model


def pets(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator).tolist()
    images = torch.rand(count, 3, 9, 9, generator=generator)
    return [
        {"image": image + label / 9, "label": label}
        for image, label in zip(images, labels, strict=True)
    ]


def original(model, device="cpu"):
    train_loader = DataLoader(pets(29, 0), batch_size=BATCH)
    eval_loader = DataLoader(pets(19, 1), batch_size=BATCH)
    model = model.to(device)
    mean, std = MEAN.to(device), STD.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE / 25)
    scheduler = OneCycleLR(optimizer, RATE, epochs=EPOCHS, steps_per_epoch=len(train_loader))
    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            batch = {name: part.to(device) for name, part in batch.items()}
            loss = F.cross_entropy(model((batch["image"] - mean) / std), batch["label"])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate = count = 0
        for batch in eval_loader:
            batch = {name: part.to(device) for name, part in batch.items()}
            with torch.no_grad():
                outputs = model((batch["image"] - mean) / std)
            right = outputs.argmax(-1) == batch["label"]
            accurate, count = accurate + right.sum().item(), count + len(right)
        print(f"epoch {epoch}: {100 * accurate / count:.2f}")
    return {"accuracy": accurate / count}


def ported(model, config):
    config.epochs, config.global_batch_size, config.sync_bn = EPOCHS, BATCH, True
    config.best_metric = "accuracy"
    manager = MultiGPUTrainingManager(config)
    train_loader = DataLoader(pets(29, 0), batch_size=BATCH)
    mean, std = MEAN.to(manager.placement.device), STD.to(manager.placement.device)
    steps = manager.steps_per_epoch(train_loader)

    def loss_fn(model, batch):
        outputs = model((batch["image"] - mean) / std)
        right = (outputs.argmax(-1) == batch["label"]).sum()
        loss = F.cross_entropy(outputs, batch["label"])
        return loss, None, {"accuracy": (right, len(outputs))}

    result = manager.fit(
        model,
        train_loader,
        DataLoader(pets(19, 1), batch_size=BATCH),
        loss_fn=loss_fn,
        optimizer=torch.optim.Adam(model.parameters(), lr=RATE / 25),
        scheduler=lambda opt: OneCycleLR(opt, RATE, epochs=EPOCHS, steps_per_epoch=steps),
    )
    return {"accuracy": result.metrics["accuracy"]}
