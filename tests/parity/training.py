"""One training, run on any number of ranks, and how far apart two results are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

SAMPLES, FEATURES, CLASSES = 1001, 20, 5


def data(dtype: torch.dtype = torch.float32, samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), targets.argmax(1))


def mlp(batchnorm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(FEATURES, 32)]
    if batchnorm:
        layers.append(nn.BatchNorm1d(32))
    layers += [nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def quiet(folder: Path, **settings: Any) -> MultiGPUConfig:
    """A config without output; checkpoints only where a test asks for them."""
    defaults = {
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "epochs": 3,
        "enable_fault_tolerance": False,
    }
    return MultiGPUConfig(**{**defaults, **settings})


def difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """||a - b|| / ||b|| of each tensor."""
    assert ours.keys() == reference.keys()
    return {
        name: float((ours[name].double() - reference[name].double()).norm())
        / max(float(reference[name].double().norm()), 1e-30)
        for name in reference
    }


def manager_for(folder: Path, **settings: Any) -> MultiGPUTrainingManager:
    return MultiGPUTrainingManager(quiet(folder, **settings))
