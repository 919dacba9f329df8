"""One process that drives several GPUs with `nn.DataParallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement, gpu_ids
from multi_gpu_training.training.step import MicroResult, StepModule
from multi_gpu_training.training.strategy import Forward, Strategy

_ONE_PROCESS = "DataParallel runs its GPUs from one process"


class DataParallelStrategy(Strategy):
    """`nn.DataParallel` scatters every micro-batch over the GPUs and gathers the losses."""

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        cuda = placement.device.type == "cuda"
        self.gpus = gpu_ids(config, torch.cuda.device_count()) if cuda else []

    @property
    def copies_here(self) -> int:
        return max(1, len(self.gpus))

    def make_wrapper(self, step_module: StepModule) -> nn.Module:
        return DataParallel(_Replica(step_module), device_ids=self.gpus or None)

    def train_beside(self, beside: nn.Module) -> None:
        if self.copies_here == 1:
            super().train_beside(beside)
        else:  # all copies of the model would share one loss object
            self.refuse_beside(beside, "data_parallel")

    @property
    def forward(self) -> Forward:
        return self._scatter

    def _scatter(self, batch: Any, count: int, window_count: int, ranks: int) -> MicroResult:
        # DataParallel splits only tensors: the length of `members` tells a copy its sample count.
        members = torch.empty(count, device=self.placement.device)
        scaled, tally, mean, weight, metrics = self.wrapped(batch, members, window_count)
        mean = (mean * weight).sum() / weight.sum()
        pairs = {name: (total.sum(), part.sum()) for name, (total, part) in metrics.items()}
        return MicroResult(scaled.sum(), tally.sum(), mean, weight.sum(), pairs)

    def recording_obstacle(self) -> str | None:
        return _ONE_PROCESS

    def compile_obstacle(self) -> str | None:
        return _ONE_PROCESS


class _Replica(nn.Module):
    """One GPU's part of a micro-batch, as tensors that DataParallel can gather."""

    def __init__(self, step: StepModule) -> None:
        super().__init__()
        self.step = step

    def forward(self, batch: Any, members: Tensor, window_count: int) -> tuple[Any, ...]:
        count = len(members)
        result: MicroResult = self.step(batch, count, window_count, 1)
        weight = result.weight
        tally = result.tally
        if weight is None or tally is None:
            weight = result.mean.new_full((), count, dtype=torch.float64)
            tally = self.step.tally * float(count)
        metrics = {
            name: tuple(torch.as_tensor(v, device=weight.device).double().view(1) for v in pair)
            for name, pair in result.metrics.items()
        }
        parts = (result.scaled, tally, result.mean, weight)
        return (*(part.view(1) for part in parts), metrics)
