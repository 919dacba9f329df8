"""The smallest real trainings: a line through sixteen points, in milliseconds, on any rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

FEATURES = 4


def quiet(folder: Path, **settings: Any) -> MultiGPUConfig:
    """On the CPU, silent, writing as little as possible, unless `settings` say otherwise."""
    defaults = {
        "device": "cpu",
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "epochs": 1,
        "enable_fault_tolerance": False,
    }
    return MultiGPUConfig(**{**defaults, **settings})


def manager_for(folder: Path, **settings: Any) -> MultiGPUTrainingManager:
    return MultiGPUTrainingManager(quiet(folder, **settings))


def points(samples: int = 16, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), inputs.sum(1, keepdim=True).to(dtype))


def line() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, 1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def squares(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def watching(look: Callable[[nn.Module, list[Tensor]], Any], into: list[Any]) -> Any:
    """The loss `squares` that first notes down what `look(model, batch)` sees."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        into.append(look(model, batch))
        return squares(model, batch)

    return loss_fn


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fork_workers() -> None:
    """Fork loader workers, as a user's process does. A rank of a test pool comes from a fork
    server, and would start another one, which takes seconds."""
    multiprocessing.set_start_method("fork", force=True)
