"""Runners: what executes one micro-batch.

eager       operation by operation: the plain step, the reference for all others
graph       records the same step as a CUDA graph; graph_cache replays it, one graph per shape
verified_graph  compares replayed steps with eager ones and undoes them if they differ;
            uses step_comparison, rollback_window and graph_guards
compiled    tries the compiled loss; the eager runner then calls it in that form
selection   chooses among them by eligibility, comparison and time
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.training.step import StepResult


class Runner(Protocol):
    """Executes one micro-batch; the last one of a step moves the weights."""

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult: ...
