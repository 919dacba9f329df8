"""Where a user's code may step into a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager


class Hook:
    """Where your code may step in. Override only what you need.

    on_run_start
    for each epoch:
        for each step:
            train_step
            on_step_end        every rank, after the weights moved
        on_epoch_end           every rank, with the metrics of the epoch
        on_checkpoint          rank 0, after the files are safe on disk
    on_run_end                 always, also after a failure

    Checkpoints are written beside training: on_checkpoint comes between the steps that follow,
    at the next checkpoint or at the end of the run, in the main thread.
    """

    def on_run_start(self, manager: MultiGPUTrainingManager) -> None:
        pass

    def on_step_end(self, manager: MultiGPUTrainingManager, step: int) -> None:
        pass

    def on_epoch_end(
        self, manager: MultiGPUTrainingManager, epoch: int, metrics: dict[str, float]
    ) -> None:
        pass

    def on_checkpoint(self, manager: MultiGPUTrainingManager, path: Path) -> None:
        pass

    def on_run_end(self, manager: MultiGPUTrainingManager) -> None:
        pass
