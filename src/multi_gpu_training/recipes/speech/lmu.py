"""The Legendre Memory Unit: a memory of the last `theta` steps as Legendre coefficients.

After Voelker, Kajic and Eliasmith 2019, in the form of Chilkuri and Eliasmith 2021: nothing
nonlinear feeds back into the memory, so that a whole sequence is one convolution

    forward(x)      all steps at once, by FFT: how it is trained
    final(x)        the last step alone, as one matrix product
    step(x, state)  one step at a time: how it listens to a stream
    recurrent(x)    all steps by `step`: slow, and what the others are checked against
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn


@lru_cache(maxsize=64)
def discrete_system(order: int, theta: float) -> tuple[Tensor, Tensor]:
    """A (order, order) and B (order) of m' = A m + B u, held constant between steps; float64."""
    i = torch.arange(order, dtype=torch.float64)
    row, column = i[:, None], i[None, :]
    sign = torch.where(row < column, -1.0, (-1.0) ** (row - column + 1))
    a = (2 * row + 1) * sign
    b = (2 * i + 1) * (-1.0) ** i
    # The exponential of [[A, B], [0, 0]] holds both, without the inverse of A.
    both = torch.zeros(order + 1, order + 1, dtype=torch.float64)
    both[:order, :order] = a
    both[:order, order] = b
    both = torch.linalg.matrix_exp(both / theta)
    return both[:order, :order].contiguous(), both[:order, order].contiguous()


@lru_cache(maxsize=64)
def impulse_response(order: int, theta: float, length: int) -> Tensor:
    """(length, order): the memory 0, 1, 2, ... steps after a single 1; float64."""
    power, b = discrete_system(order, theta)
    response = b[None]
    # Each round doubles what is known: the next steps are the known ones, so many steps later.
    while len(response) < length:
        response = torch.cat([response, response @ power.T])
        power = power @ power
    return response[:length].contiguous()


class DelayMemory(nn.Module):
    """Remembers each channel of (batch, time, channels) as `order` numbers at every time.

    It has nothing to learn and nothing to save. What it convolves with is computed in float64,
    once for every length, and kept in the precision and on the device of the input.
    """

    def __init__(self, order: int, theta: float) -> None:
        super().__init__()
        if order < 1 or theta <= 0:
            raise ValueError(f"order={order}, theta={theta}: use order >= 1 and theta > 0")
        self.order = order
        self.theta = float(theta)
        self._kept: dict[tuple[str, int, torch.device, torch.dtype], Tensor] = {}

    def extra_repr(self) -> str:
        return f"order={self.order}, theta={self.theta:g}"

    def forward(self, inputs: Tensor, ahead: int = 0) -> Tensor:
        """(batch, time, channels) -> (batch, time, channels, order).

        The last `ahead` channels run backwards: at every time they hold what is to come.
        """
        length = inputs.shape[1]
        points = fft_points(length)
        u = at_least_float32(inputs).transpose(1, 2)
        response = self._spectrum(length, u)
        if ahead:
            # Backwards in time is the conjugate in frequency.
            past = response.expand(u.shape[1] - ahead, -1, -1)
            response = torch.cat([past, response.conj().expand(ahead, -1, -1)])
        spectrum = torch.fft.rfft(u, n=points).unsqueeze(2) * response
        memory = torch.fft.irfft(spectrum, n=points)[..., :length]
        by_time: Tensor = memory.permute(0, 3, 1, 2).to(inputs.dtype)
        return by_time

    def final(self, inputs: Tensor) -> Tensor:
        """(batch, time, channels) -> (batch, channels, order) after the last step."""
        u = at_least_float32(inputs).transpose(1, 2)
        with torch.autocast(u.device.type, enabled=False):
            return (u @ self._reversed(inputs.shape[1], u)).to(inputs.dtype)

    def step(self, inputs: Tensor, memory: Tensor | None = None) -> Tensor:
        """(batch, channels) and the memory before -> (batch, channels, order)."""
        u = at_least_float32(inputs)
        a, b = self._system("a", u), self._system("b", u)
        if memory is None:
            return u.unsqueeze(-1) * b
        with torch.autocast(u.device.type, enabled=False):
            return memory @ a.T + u.unsqueeze(-1) * b

    def recurrent(self, inputs: Tensor) -> Tensor:
        """What `forward` gives, one step after the other."""
        memory: Tensor | None = None
        steps = []
        for u in inputs.unbind(1):
            memory = self.step(u, memory)
            steps.append(memory)
        return torch.stack(steps, 1)

    def _spectrum(self, length: int, like: Tensor) -> Tensor:
        key = ("spectrum", length, like.device, like.dtype)
        if key not in self._kept:
            response = sent(impulse_response(self.order, self.theta, length), like)
            self._kept[key] = torch.fft.rfft(response.T, n=fft_points(length))
        return self._kept[key]

    def _reversed(self, length: int, like: Tensor) -> Tensor:
        key = ("reversed", length, like.device, like.dtype)
        if key not in self._kept:
            response = impulse_response(self.order, self.theta, length)
            self._kept[key] = sent(response.flip(0), like)
        return self._kept[key]

    def _system(self, name: str, like: Tensor) -> Tensor:
        key = (name, 0, like.device, like.dtype)
        if key not in self._kept:
            a, b = discrete_system(self.order, self.theta)
            self._kept[key] = sent(a if name == "a" else b, like)
        return self._kept[key]


class LMU(nn.Module):
    """A recurrent layer: what the input writes into the memory, and what is read from it.

    u_t = W_u x_t                      `channels` signals to remember
    m_t = A m_t-1 + B u_t              for each of them
    h_t = f(W_m m_t + W_x x_t)         (batch, time, units)

    With `ahead`, so many of the channels remember what is to come instead of what was: for whole
    sequences only. `mask` (batch, time) then says what is sequence and what is padding.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        order: int,
        theta: float,
        channels: int = 1,
        activation: nn.Module | None = None,
        ahead: int = 0,
    ) -> None:
        super().__init__()
        self.ahead = ahead
        self.write = nn.Linear(inputs, channels)
        self.memory = DelayMemory(order, theta)
        self.read = nn.Linear(channels * order, units)
        self.skip = nn.Linear(inputs, units, bias=False)
        self.activation = activation or nn.ReLU()

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        written = self.write(inputs)
        if mask is not None:
            written = written * mask.unsqueeze(2)
        memory = self.memory(written, self.ahead)
        return self._read(memory.flatten(2), inputs)

    def final(self, inputs: Tensor) -> Tensor:
        """(batch, time, inputs) -> (batch, units) after the last step."""
        self._only_past()
        memory = self.memory.final(self.write(inputs))
        return self._read(memory.flatten(1), inputs[:, -1])

    def step(self, inputs: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, inputs) and the memory before -> (batch, units) and the memory after."""
        self._only_past()
        after = self.memory.step(self.write(inputs), memory)
        return self._read(after.to(inputs.dtype).flatten(1), inputs), after

    def recurrent(self, inputs: Tensor) -> Tensor:
        """What `forward` gives, one step after the other."""
        memory: Tensor | None = None
        steps = []
        for x in inputs.unbind(1):
            output, memory = self.step(x, memory)
            steps.append(output)
        return torch.stack(steps, 1)

    def _only_past(self) -> None:
        if self.ahead:
            raise ValueError(f"{self.ahead} channels look ahead; build it with ahead=0 for steps")

    def _read(self, memory: Tensor, inputs: Tensor) -> Tensor:
        out: Tensor = self.activation(self.read(memory) + self.skip(inputs))
        return out


def sent(values: Tensor, like: Tensor) -> Tensor:
    """Values in the precision and on the device of `like`, without waiting for the device."""
    return values.to(like.dtype).to(like.device, non_blocking=True)


def fft_points(length: int) -> int:
    """A power of two that holds the convolution of two sequences without wrapping around."""
    return 1 << (2 * length - 1).bit_length()


def at_least_float32(values: Tensor) -> Tensor:
    """FFTs and long sums need more than 16 bits."""
    return values if values.dtype == torch.float64 else values.float()
