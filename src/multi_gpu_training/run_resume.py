"""Where a run continues: its newest intact checkpoint, and the place in the data it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.changed_settings import may_resume_anyway
from multi_gpu_training.checkpoint.integrity import read_manifest
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import Loader, place_after_resume
from multi_gpu_training.data.stream import StreamLoader
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.faults.fault_tolerance import FaultToleranceManager
from multi_gpu_training.run_records import Records
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.step_state import StepState


class Resumption:
    """`find` comes before the data are built, which depend on what it finds; `restore` after the
    model is."""

    def __init__(
        self,
        config: MultiGPUConfig,
        state: StepState,
        progress: Progress,
        fault_tolerance: FaultToleranceManager,
        records: Records,
        options: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.state = state
        self.progress = progress
        self.fault_tolerance = fault_tolerance
        self.records = records
        self.options = options  # of the recipe
        self.say = say

    def find(self) -> Path | None:
        """Where to continue from, if anywhere. Its global batch is kept: on another number of ranks
        a batch_size per rank would give another one, and another order of samples."""
        config = self.config
        path = self.fault_tolerance.find(self.records.folder.resume)
        if path is None:
            if config.resume is None:
                self.fault_tolerance.refuse_to_overwrite()
            return None
        saved = read_manifest(path).get("global_batch_size")
        if saved is not None and config.global_batch_size is None:
            config.global_batch_size = int(saved)
            self.say(f"continuing with the run's global batch of {saved} samples per step")
        return path

    def restore(self, checkpoint: Path, loader: Loader, size: int) -> None:
        """Restore the state of a checkpoint, and its place in the data."""
        state = self.state
        try:
            self.fault_tolerance.resume(checkpoint)
        except CheckpointError as error:
            changed = _changed_options(self.options, checkpoint)
            raise CheckpointError(f"{error}{changed}", code=error.code) from None
        self.records.checkpoints_changed()  # from which step on this attempt differs
        manifest = read_manifest(checkpoint)
        saved, steps = manifest.get("global_batch_size"), manifest.get("steps_per_epoch")
        differs = saved != size or (steps or loader.steps) != loader.steps
        if saved is not None and size and differs:
            epoch_is_over = self.progress.epochs_done > state.epoch
            if may_resume_anyway(self.config):  # samples may come twice, or not at all
                place = state.position * saved // size
                state.position = min(place, loader.steps or place)
            else:
                state.position = place_after_resume(
                    loader, state.position, saved, size, epoch_is_over, steps
                )
        if isinstance(loader, StreamLoader) and not may_resume_anyway(self.config):
            epoch_is_over = self.progress.epochs_done > state.epoch
            loader.check_resumed_order(epoch_is_over or state.position == 0)
        loader.seek(state.epoch, state.position)
        self.say(f"resumed {self._place()} ({checkpoint})")

    def _place(self) -> str:
        """Where the run stands after a resume, counted as people do: from 1."""
        state, done, epochs = self.state, self.progress.epochs_done, self.config.epochs
        rate = f"learning rate {state.optimizer.param_groups[0]['lr']:.3g}"
        if done > state.epoch or (done and state.position == 0):
            return f"after epoch {done} of {epochs}, step {state.step}, {rate}"
        return f"in epoch {state.epoch + 1} of {epochs} at step {state.step}, {rate}"


def _changed_options(have: Mapping[str, Any], checkpoint: Path) -> str:
    """Describe the recipe options that the checkpoint's run had and this one does not."""
    had = read_manifest(checkpoint).get("options") or {}
    changed = [name for name, value in had.items() if have.get(name) != value]
    if not changed:
        return ""
    then = ", ".join(f"{name}={had[name]}" for name in changed)
    now = ", ".join(f"{name}={have.get(name)}" for name in changed)
    return f"\nThat run had {then}; this one has {now}"
