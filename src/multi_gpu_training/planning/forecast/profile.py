"""What was measured of one training step on one device: all that a forecast starts from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.measure.memory_model import MemoryPoint
from multi_gpu_training.safe_files import read_text

from .result import Scaling


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that DDP sends together. `ready_s` counts from the start of the backward that
    exchanges them."""

    size_bytes: int
    ready_s: float


@dataclass(frozen=True)
class StepProfile:
    """One optimizer step of one rank. Times are of one micro-batch, the optimizer's of the step;
    `step_times_s` are whole steps, one after the other, from which stragglers are drawn."""

    name: str
    device: str
    per_rank_batch: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[GradientBucket, ...]
    step_times_s: tuple[float, ...]
    accumulation: int = 1
    dataset_samples: int | None = None
    # How long the training is, where its config says so.
    epochs: float | None = None
    max_steps: int | None = None
    # How its config wants more GPUs to be used; profiles from before this was kept do not say.
    scaling: Scaling = "weak"
    # Samples per second that this machine loads with so many workers for one rank.
    loader_rates: dict[int, float] = field(default_factory=dict)
    loader_workers: int = 0
    # Data on the GPU is never waited for.
    data_on_device: bool = False
    memory: tuple[MemoryPoint, ...] = ()
    memory_total_bytes: int | None = None
    # Taken from the device by others than torch's allocator: CUDA itself, NCCL, other programs.
    memory_outside_bytes: int = 0
    parameter_bytes: int = 0
    # For sharded ranks: the optimizer's state, and the parts of the model gathered as one.
    optimizer_bytes: int = 0
    block_bytes: int = 0
    blocks: int = 1
    # Whether the data are images or videos.
    images: bool | None = None
    power_w: float | None = None
    precision: str = "fp32"
    execution: str = "eager"

    @property
    def gradient_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    def sharded_away_bytes(self, ranks: int) -> float:
        """What each of so many sharded ranks does not hold: its part of weights, gradients and
        optimizer state stays, and three blocks are whole at a time."""
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return max(0.0, state * (1 - 1 / ranks) - 3 * self.block_bytes)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> StepProfile:
        raw: dict[str, Any] = json.loads(read_text(path.resolve()))
        raw["buckets"] = tuple(GradientBucket(**item) for item in raw["buckets"])
        raw["memory"] = tuple(MemoryPoint(**item) for item in raw["memory"])
        raw["step_times_s"] = tuple(raw["step_times_s"])
        raw["loader_rates"] = {int(k): float(v) for k, v in raw["loader_rates"].items()}
        return StepProfile(**raw)
