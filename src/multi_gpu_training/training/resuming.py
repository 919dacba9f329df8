"""Going on with a run: from which checkpoint, with which batch, at which place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multi_gpu_training.checkpoint.integrity import read_manifest
from multi_gpu_training.data.order import FormsBatches
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.monitoring.metrics import MetricsCollector

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager


def find_checkpoint(manager: MultiGPUTrainingManager) -> Path | None:
    """Where to go on from, if anywhere. Its global batch is kept: on another number of ranks a
    batch_size per rank would give another one, and another order of samples."""
    config = manager.config
    path = manager.fault_tolerance.find(config.resume)
    if path is None:
        if config.resume is None:
            manager.fault_tolerance.refuse_to_overwrite()
        return None
    saved = read_manifest(path).get("global_batch_size")
    if saved is not None and config.global_batch_size is None:
        config.global_batch_size = int(saved)
        manager.console.line(f"going on with the run's global batch of {saved} samples a step")
    return path


def go_on_from(manager: MultiGPUTrainingManager, checkpoint: Path) -> None:
    """Bring back its state, and its place in the data. Collective."""
    try:
        manager.fault_tolerance.resume(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_other_options(manager, checkpoint)}") from None
    _keep_place(manager, checkpoint)
    manager.train_loader.seek(manager.trainer.epoch, manager.trainer.position)


def plain_options(manager: MultiGPUTrainingManager) -> dict[str, Any]:
    """The recipe's own options, as a checkpoint keeps them."""
    plain: dict[str, Any] = json.loads(json.dumps(manager.recipe_options, default=str))
    return plain


def _other_options(manager: MultiGPUTrainingManager, checkpoint: Path) -> str:
    """In words, the recipe's options that the checkpoint's run had and this one has not."""
    had, have = read_manifest(checkpoint).get("options") or {}, plain_options(manager)
    other = [f"{name}={value}" for name, value in had.items() if have.get(name) != value]
    mine = [f"{name}={have.get(name)}" for name, value in had.items() if have.get(name) != value]
    return f"\nThat run had {', '.join(other)}; this one has {', '.join(mine)}" if other else ""


def _keep_place(manager: MultiGPUTrainingManager, checkpoint: Path) -> None:
    """With another global batch than the checkpoint's, go on behind the samples it has seen."""
    saved = read_manifest(checkpoint).get("global_batch_size")
    size, loader = manager.sizes.global_batch, manager.train_loader
    if saved is None or saved == size:
        return
    if isinstance(getattr(loader, "dataset", None), FormsBatches):
        _begin_next_epoch(manager, saved, size)
        return
    seen = manager.trainer.position * saved
    samples = getattr(getattr(loader, "source", None), "samples", None)
    if samples is not None and loader.steps is not None and seen >= samples:
        seen = loader.steps * size  # the epoch was done
    if seen % size:
        raise ConfigError(
            f"the checkpoint stands {seen} samples into an epoch, which "
            f"global_batch_size={size} does not divide; go on with "
            f"global_batch_size={saved}, as it was, or from a checkpoint at the end of an epoch"
        )
    manager.trainer.position = seen // size


def _begin_next_epoch(manager: MultiGPUTrainingManager, saved: int, size: int) -> None:
    """Where batches of another size are other batches, only the end of an epoch is a place that
    both have."""
    if manager.progress.epochs_done <= manager.trainer.epoch:
        raise ConfigError(
            f"the checkpoint stands at step {manager.trainer.position} of an epoch of batches of "
            f"{saved}; with global_batch_size={size} this dataset forms other batches: go on with "
            f"global_batch_size={saved}, or from a checkpoint at the end of an epoch"
        )
    manager.trainer.position = manager.train_loader.steps or 0


class EpochSums:
    """The running sums of an unfinished epoch, so that its mean is right after a resume."""

    def __init__(self, epoch: MetricsCollector, interval: MetricsCollector) -> None:
        self.epoch = epoch
        self.interval = interval

    def state_dict(self) -> dict[str, Any]:
        whole = MetricsCollector()
        whole.merge(self.epoch)
        whole.merge(self.interval)
        return whole.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch.load_state_dict(state)

    def load_shares(self, states: list[dict[str, Any]]) -> None:
        """The sums are those of `states`, of ranks that are no longer there; what was collected
        before, also by going back to the same checkpoint, is dropped."""
        self.epoch.reset()
        for state in states:
            part = MetricsCollector()
            part.load_state_dict(state)
            self.epoch.merge(part)
