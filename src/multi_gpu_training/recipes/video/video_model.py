"""Two 3D convolutional nets for clips: the guide's, and a faster one of the same reach.

Both take clips as uint8 of (batch, frames, height, width), as they come over the bus, and convert
them on the device. Both use BatchNorm: train them with sync_bn, so that ranks agree.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from multi_gpu_training.errors import ConfigError

Architecture = Literal["fast", "guide"]
Stride = int | tuple[int, int, int]
WIDTH = 32
PATCH = 4


def build_model(
    architecture: Architecture,
    frames: int,
    size: int,
    classes: int,
    dropout: float,
    width: int = WIDTH,
) -> nn.Module:
    """The net for clips of `frames` frames of `size` x `size`; `width` channels in its first layer.

    The guide's has a width of 32.
    """
    problems = []
    if frames < 16:
        problems.append(f"frames={frames}: time is halved four times; use 16 or more")
    if size < 16 or size % PATCH:
        problems.append(f"frame_size={size}: use a multiple of {PATCH}, 16 or more")
    if problems:
        raise ConfigError(problems)
    net = GuideNet if architecture == "guide" else FastNet
    return net(classes, dropout, width)


def channels(width: int) -> tuple[int, ...]:
    """Channels of the five layers: 32, 64, 128, 256, 256 for the guide's width."""
    return width, 2 * width, 4 * width, 8 * width, 8 * width


class GuideNet(nn.Module):
    """Five 3x3x3 convolutions at 1-32-64-128-256-256 channels, halved in between: 2.9M parameters.

    Nearly all time goes into the first layers: 1.1 million places a clip, with one channel in.
    """

    def __init__(self, classes: int, dropout: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        sizes = channels(width)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((1, *sizes)):
            layers += [*convolution(inputs, outputs), nn.MaxPool3d(2)]
        self.features = nn.Sequential(*layers[:-1])  # the last is pooled by the head
        self.head = head(sizes[-1], classes, dropout)

    def forward(self, clips: Tensor) -> Tensor:
        pixels = to_pixels(clips, self.head)
        scores: Tensor = self.head(self.features(pixels.unsqueeze(1)))
        return scores


class FastNet(nn.Module):
    """The same five layers behind a stem that turns each 4x4 patch of a frame into 16 channels.

    No pixel is lost, the first layer sees 16 times fewer places, and its 16 channels feed the
    tensor cores; convolutions with a stride, in time first, take the place of pooling. What moves
    (a clip less its mean frame) and what stands still (the mean frame) have filters of their own:
    together they can do what one filter can, and motion is not buried under the background.
    """

    def __init__(self, classes: int, dropout: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        sizes = channels(width)
        self.moving = nn.Conv3d(PATCH**2, width, 3, stride=(2, 1, 1), padding=1, bias=False)
        self.still = nn.Conv3d(PATCH**2, width, (1, 3, 3), padding=(0, 1, 1), bias=False)
        layers: list[nn.Module] = [nn.BatchNorm3d(width), nn.ReLU(inplace=True)]
        strides: list[Stride] = [(1, 2, 2), 2, 2, 1]
        for (inputs, outputs), stride in zip(pairwise(sizes), strides, strict=True):
            layers += convolution(inputs, outputs, stride)
        self.features = nn.Sequential(*layers)
        self.head = head(sizes[-1], classes, dropout)

    def forward(self, clips: Tensor) -> Tensor:
        pixels = to_pixels(clips, self.head)
        mean = pixels.mean(1, keepdim=True)
        seen = self.moving(patches(pixels - mean)) + self.still(patches(mean))
        scores: Tensor = self.head(self.features(seen))
        return scores


def convolution(inputs: int, outputs: int, stride: Stride = 1) -> list[nn.Module]:
    """A 3x3x3 convolution with BatchNorm, whose bias serves for both, and ReLU."""
    return [
        nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm3d(outputs),
        nn.ReLU(inplace=True),
    ]


def head(channels: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)
    )


def to_pixels(clips: Tensor, head: nn.Module) -> Tensor:
    """Bytes as numbers from -1 to 1, in the precision of the weights."""
    return clips.to(next(head.parameters()).dtype).div(127.5).sub(1)


def patches(pixels: Tensor) -> Tensor:
    """(batch, frames, height, width) as (batch, 16, frames, height/4, width/4).

    Laid out with the channels last in memory, as fast convolutions read them.
    """
    batch, frames, height, width = pixels.shape
    rows, columns = height // PATCH, width // PATCH
    cut = pixels.reshape(batch, frames, rows, PATCH, columns, PATCH).permute(0, 1, 2, 4, 3, 5)
    return cut.reshape(batch, frames, rows, columns, PATCH**2).permute(0, 4, 1, 2, 3)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def operations(model: nn.Module, frames: int, size: int) -> int:
    """Multiplications of a forward pass of one clip, counted in its convolutions."""
    was_training = model.training
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, frames, size, size, dtype=torch.uint8))
    model.train(was_training)
    # It counts a multiplication and its addition as two.
    return int(counter.get_flop_counts()["Global"][torch.ops.aten.convolution]) // 2
