"""Runners: what executes one micro-batch.

eager       operation by operation: the plain step, and the one that all others must equal
graph       the same step replayed as a CUDA graph
compiled    the plain step around a loss function that torch.compile has compiled
selection   chooses among them, compares them with the eager step, and takes steps back
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.training.step import StepResult


class Runner(Protocol):
    """Executes one micro-batch; the last one of a step moves the weights."""

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult: ...
