"""The recipe's own models: a multilayer perceptron on flattened images, and a small CNN.

Both are free of dropout and BatchNorm, so that any number of ranks learns exactly what one learns:
dropout draws other noise on another number of ranks, and BatchNorm must be synchronised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Mode = Literal["flatten", "cnn"]
WIDTHS: dict[Mode, int] = {"flatten": 512, "cnn": 32}


def build_model(
    mode: Mode,
    size: tuple[int, int],
    classes: int,
    normalise: nn.Module,
    channels: int = 1,
    width: int | None = None,
) -> nn.Module:
    """The model for images of `size` (height, width), with one output per class; `width` outputs
    in its first layer, or as many as WIDTHS says."""
    width = width or WIDTHS[mode]
    if mode == "flatten":
        body = mlp(channels * size[0] * size[1], classes, width)
    else:
        body = cnn(size, classes, channels, width)
    return nn.Sequential(normalise, *body)


class Normalise(nn.Module):
    """Bytes of (batch, height, width) to numbers of (batch, 1, height, width) around 0.

    Part of the model, so that a byte a pixel is all that goes to the GPU, and so that whoever
    loads the weights later need not know how the data were scaled.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: float, spread: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("spread", torch.tensor(spread))

    def forward(self, images: Tensor) -> Tensor:
        return ((images.to(self.mean.dtype) - self.mean) / self.spread).unsqueeze(1)


class NormaliseChannels(nn.Module):
    """The same for bytes of (batch, channels, height, width): `mean` and `std` per channel, of
    pixels between 0 and 1."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.dtype) - self.mean) / self.std


def mlp(pixels: int, classes: int, width: int = 512) -> nn.Sequential:
    """Three linear layers on the flattened image."""
    half = max(1, width // 2)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Linear(width, half),
        nn.LayerNorm(half),
        nn.ReLU(),
        nn.Linear(half, classes),
    )


def cnn(size: tuple[int, int], classes: int, channels: int = 1, width: int = 32) -> nn.Sequential:
    """Three convolutions, each pair of pixels merged twice, and a head of two linear layers.

    One normalisation before the head is enough for so few layers, and keeps the step short: on
    small images a norm after every convolution takes longer than the convolutions.
    """
    pixels = (size[0] // 4) * (size[1] // 4)
    return nn.Sequential(
        *convolution(channels, width),
        nn.MaxPool2d(2),
        *convolution(width, 2 * width),
        *convolution(2 * width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(2 * width * pixels),
        nn.Linear(2 * width * pixels, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, classes),
    )


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """A 3x3 convolution whose outputs are as spread as its inputs, so that none is normalised."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return [layer, nn.ReLU()]
