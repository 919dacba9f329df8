"""The words a run begins and ends with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multi_gpu_training.data.loader import ShareLoader
from multi_gpu_training.gpus import get_gpu_info

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager


def announce(manager: MultiGPUTrainingManager) -> None:
    """What is about to run: hardware, mode, model, batch arithmetic, rate, schedule."""
    config, placement, sizes = manager.config, manager.placement, manager.sizes
    say = manager.console.line
    for gpu in get_gpu_info() if placement.device.type == "cuda" else []:
        say(f"GPU {gpu['index']}: {gpu['name']} ({gpu['uuid']})")
    if config.device_ids is not None and config.device != "cpu" and placement.device.type == "cpu":
        say(f"device_ids={config.device_ids}: torch sees no GPU, so this trains on the CPU")
    ranks = placement.dp_size
    say(
        f"mode: {config.training_mode.value}, {ranks} rank{'s' if ranks > 1 else ''} "
        f"({placement.backend}), device {placement.device}, {manager.trainer.precision.describe()}"
    )
    count = sum(p.numel() for p in manager.model.parameters())
    size = sum(p.numel() * p.element_size() for p in manager.model.parameters())
    say(f"model: {type(manager.model).__name__}, {count:,} parameters, {size / 2**20:.1f} MB")
    exact = sizes.per_rank * sizes.accumulation * sizes.ranks == sizes.global_batch
    one = "GPU" if placement.device.type == "cuda" else "rank"
    copies = f"{sizes.ranks} {one}{'s' if sizes.ranks > 1 else ''}"
    say(
        f"batch: {sizes.per_rank} per {one} x {sizes.accumulation} accumulation x {copies} "
        f"{'=' if exact else '>='} {sizes.global_batch} samples a step"
    )
    loader = manager.train_loader
    if loader.steps is not None:
        batches = (
            len(loader) if isinstance(loader, ShareLoader) else loader.steps * sizes.accumulation
        )
        say(f"data: {loader.steps} steps an epoch, {batches * ranks} batches, {batches} per rank")
    say(manager.scaling.describe())
    say(manager.trainer.schedule.describe())
    say(f"run: {manager.run.path}")


def epoch_line(
    epoch: int, epochs: int, train: dict[str, float], val: dict[str, float] | None
) -> str:
    """Epoch 3/10 - train loss 0.4521, acc 78.23% | val loss 0.5234, acc 74.56%, F1 0.6821"""
    text = f"Epoch {epoch + 1}/{epochs} - train {_metrics(train)}"
    return text + (f" | val {_metrics(val)}" if val else "")


def _metrics(values: dict[str, float]) -> str:
    shown = []
    for name, value in values.items():
        if name == "accuracy":
            shown.append(f"acc {value:.2%}")
        else:
            shown.append(f"{'F1' if name == 'f1' else name} {value:.4f}")
    return ", ".join(shown)


def summary(manager: MultiGPUTrainingManager) -> None:
    """What came out, where it lies, and how to look at it."""
    progress = manager.progress
    last = progress.last
    if not last["train"]:
        return
    elapsed = time.perf_counter() - manager._started
    rows = [
        ["epochs", f"{progress.epochs_done}"],
        ["steps", f"{manager.trainer.step}"],
        ["time", f"{elapsed:.1f} s"],
        *([f"train {name}", _value(name, value)] for name, value in last["train"].items()),
        *([f"val {name}", _value(name, value)] for name, value in last["val"].items()),
    ]
    if progress.best is not None and progress.best_epoch is not None:
        best = f"{_value(progress.metric, progress.best)} (epoch {progress.best_epoch + 1})"
        rows.append([f"best {progress.metric}", best])
    manager.console.table("Summary", ["", ""], rows)
    manager.console.line(f"run folder: {manager.run.path}")
    if manager.config.enable_fault_tolerance:
        manager.console.line(f"best model: {manager.run.checkpoints / 'best'}")
    if manager.config.tensorboard:
        manager.console.line(f"curves: tensorboard --logdir {manager.run.tensorboard}")


def _value(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"
