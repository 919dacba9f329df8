"""The recogniser without Fourier transforms, which exported programs do not have everywhere.

Both of its transforms become convolutions with fixed kernels: the same numbers but for rounding,
for sound of up to a length that is chosen when it is made.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from multi_gpu_training.recipes.speech.features import LogMel, inside
from multi_gpu_training.recipes.speech.lmu import DelayMemory, impulse_response
from multi_gpu_training.recipes.speech.speech_model import Block, Recogniser


def without_fourier(model: Recogniser, samples: int) -> Recogniser:
    """A copy of the model for up to so many samples."""
    made = copy.deepcopy(model)
    frames = int(made.lengths(torch.tensor(samples)))
    made.features = ConvolutionLogMel(model.features)
    for block in made.blocks:
        assert isinstance(block, Block)
        channels = block.lmu.write.out_features
        block.lmu.memory = ConvolutionMemory(block.lmu.memory, channels, block.lmu.ahead, frames)
    return made


class ConvolutionLogMel(LogMel):
    """Log-mel features: the window and the sines of each frequency are one kernel."""

    kernels: Tensor

    def __init__(self, features: LogMel) -> None:
        super().__init__(features.sample_rate, features.mels, features.normalise)
        at = torch.arange(self.width, dtype=torch.float64)
        wave = torch.arange(self.points // 2 + 1, dtype=torch.float64)[:, None]
        angle = 2 * math.pi / self.points * wave * at
        window = torch.hann_window(self.width, periodic=True, dtype=torch.float64)
        kernels = torch.cat([angle.cos(), -angle.sin()]) * window
        self.register_buffer("kernels", kernels.float().unsqueeze(1), persistent=False)

    def forward(
        self, sound: Tensor, samples: Tensor, warps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert warps is None  # they vary training utterances alone
        wave = sound.to(self.kernels.dtype) / 32768.0
        wave = wave * inside(samples, sound.shape[1])
        wave = F.pad(wave, (self.width // 2, self.width - self.width // 2))
        real, imaginary = F.conv1d(wave.unsqueeze(1), self.kernels, stride=self.hop).chunk(2, 1)
        power = (real.square() + imaginary.square()).transpose(1, 2)
        return self.normalised(power @ self.filters, samples)


class ConvolutionMemory(DelayMemory):
    """The memory of an LMU: each channel convolved with the impulse response."""

    past: Tensor
    future: Tensor

    def __init__(self, memory: DelayMemory, channels: int, ahead: int, frames: int) -> None:
        super().__init__(memory.order, memory.theta)
        self.frames, self.channels = frames, channels
        response = impulse_response(self.order, self.theta, frames).T.float()  # (order, frames)
        # conv1d slides its kernel forwards: the past is seen through a reversed one.
        self.register_buffer("past", response.flip(1).unsqueeze(1).contiguous(), persistent=False)
        self.register_buffer("future", response.unsqueeze(1).contiguous(), persistent=False)

    def forward(self, inputs: Tensor, ahead: int = 0) -> Tensor:
        u, reach = inputs.transpose(1, 2), self.frames - 1
        behind = self.channels - ahead
        parts = [self._convolved(F.pad(u[:, :behind], (reach, 0)), self.past, behind)]
        if ahead:
            parts.append(self._convolved(F.pad(u[:, behind:], (0, reach)), self.future, ahead))
        memory: Tensor = torch.cat(parts, 1).permute(0, 3, 1, 2)  # (batch, time, channels, order)
        return memory

    def _convolved(self, u: Tensor, kernel: Tensor, channels: int) -> Tensor:
        """(batch, channels, order, time). Channels stand beside the samples of the batch, because
        XNNPACK takes no grouped convolution with so long a kernel beside int8 layers."""
        found = F.conv1d(u.reshape(-1, 1, u.shape[2]), kernel)
        return found.view(-1, channels, self.order, found.shape[2])
