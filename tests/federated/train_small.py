"""A small training in float64, as a user's script would have it."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

SAMPLES, RATE = 47, 0.1


def data(part: int = 0, parts: int = 1) -> TensorDataset:
    random = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 4, generator=random, dtype=torch.float64)
    labels = torch.randint(0, 3, (SAMPLES,), generator=random)
    return TensorDataset(inputs[part::parts], labels[part::parts])


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normed_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def frozen_model() -> nn.Module:
    net = model()
    net.get_submodule("0").requires_grad_(False)
    return net


def fixed_model() -> nn.Module:
    """Its gradients are zero."""
    net = model()
    for parameter in net.parameters():
        parameter.register_hook(torch.zeros_like)
    return net


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.head = nn.Linear(4, 3).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head((inputs * self.phase).abs())


MODELS = (model, normed_model, frozen_model, Complex, fixed_model)


def main(
    momentum: float,
    batch_size: int,
    part: int = 0,
    parts: int = 1,
    kind: int = 0,
    first: int = 0,
    last: int = SAMPLES,
) -> None:
    shown = {"tensorboard": False, "monitor": False, "report": False}
    config = MultiGPUConfig(global_batch_size=batch_size, **shown)
    manager = MultiGPUTrainingManager(config)
    manager.fit(
        MODELS[kind](),
        TensorDataset(*data(part, parts)[first:last]),
        data(part, parts),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=RATE, momentum=momentum),
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
