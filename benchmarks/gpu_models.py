"""The models of gpu_steps.py, and data for them that lies on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(width: int = 128) -> nn.Module:
    """64-128-128-10."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class Recurrent(nn.Module):
    """An LSTM of two layers of 256 over a sequence, and a class for the whole."""

    def __init__(self, features: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


def cnn() -> nn.Module:
    """The image recipe's."""
    try:
        from multi_gpu_training.recipes.image.image_model import cnn as of_the_recipe
    except ModuleNotFoundError:  # version 0.1, in compare_versions.py
        from multi_gpu_training.recipes.image.model import cnn as of_the_recipe

    return of_the_recipe((28, 28), 10)


def normalised(convolutions: bool) -> nn.Module:
    """Small, with BatchNorm: what graph and eager steps are compared on.

    No bias stands before a norm: its gradient is zero but for rounding, and so is what it learns.
    """
    if not convolutions:
        return nn.Sequential(
            nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 49, 10),
    )


class Bottleneck(nn.Module):
    """A block of torchvision's ResNet-50: the stride is in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + shortcut)  # type: ignore[no-any-return]


class ResNet50(nn.Module):
    """torchvision.models.resnet50, written out: 25,557,032 parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inputs = 64
        for number, (width, blocks, stride) in enumerate(
            ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)), start=1
        ):
            parts = [Bottleneck(inputs, width, stride)]
            inputs = 4 * width
            parts += [Bottleneck(inputs, width, 1) for _ in range(blocks - 1)]
            setattr(self, f"layer{number}", nn.Sequential(*parts))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Model:
    """How a model is built, what a sample is, and how it is measured."""

    build: Any
    shape: tuple[int, ...]
    batch: int
    classes: int = 10
    samples: int = 4096
    bf16: bool = False
    title: str = ""


MODELS = {
    "mlp": Model(mlp, (64,), 32, samples=32 * 512, title="MLP 64-128-128-10, batch 32"),
    "lstm": Model(Recurrent, (30, 32), 64, bf16=True, title="LSTM 2x256, 64x30, bf16"),
    "cnn": Model(cnn, (1, 28, 28), 128, title="CNN, batch 128 of 28x28"),
    "resnet": Model(
        ResNet50, (3, 224, 224), 256, 1000, samples=2048, title="ResNet-50, 256 x 224x224"
    ),
}
QUICK = {
    "mlp": Model(mlp, (64,), 8, samples=64, title="MLP (quick)"),
    "lstm": Model(Recurrent, (5, 32), 4, samples=16, bf16=True, title="LSTM (quick)"),
    "cnn": Model(cnn, (1, 28, 28), 4, samples=16, title="CNN (quick)"),
    "resnet": Model(ResNet50, (3, 32, 32), 2, 1000, samples=4, title="ResNet-50 (quick)"),
}


def tensors(model: Model, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Inputs and labels, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(model.samples, *model.shape, generator=generator)
    y = torch.randint(0, model.classes, (model.samples,), generator=generator)
    return x.to(device), y.to(device)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
