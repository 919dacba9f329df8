"""The words a run begins and ends with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import BatchSizes, Loader, ValLoaders
from multi_gpu_training.data.loader import ShareLoader
from multi_gpu_training.data.own_batches import OwnBatches
from multi_gpu_training.distributed.batchnorm import uses_batch_statistics
from multi_gpu_training.gpus import get_gpu_info
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.run_record import RunRecord
from multi_gpu_training.monitoring.report.wording import metric, metric_rows, size, speed_rows
from multi_gpu_training.monitoring.run_folder import RunFolder
from multi_gpu_training.training.callbacks import Callback, CallbackList, Run
from multi_gpu_training.training.learning_rate import BroughtScheduler, Scaling
from multi_gpu_training.training.loss import SupervisedLoss
from multi_gpu_training.training.progress import Progress
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState


def announce(
    say: Callable[[str], None],
    config: MultiGPUConfig,
    state: StepState,
    sizes: BatchSizes,
    loader: Loader,
    val_loader: ValLoaders | None,
    scaling: Scaling,
    folder: Path,
) -> None:
    """What is about to run: hardware, mode, model, batch arithmetic, rate, schedule."""
    placement = state.placement
    for gpu in get_gpu_info() if placement.device.type == "cuda" else []:
        say(f"GPU {gpu['index']}: {gpu['name']} ({gpu['uuid']})")
    if config.device_ids is not None and config.device != "cpu" and placement.device.type == "cpu":
        say(f"device_ids={config.device_ids}: torch sees no GPU, so this trains on the CPU")
    ranks = placement.dp_size
    backend = f" ({placement.backend})" if placement.backend != "none" else ""
    say(
        f"mode: {config.training_mode.value}, {ranks} rank{'s' if ranks > 1 else ''}{backend}, "
        f"device {placement.device}, {state.precision.describe()}"
    )
    parameters = list(state.model.parameters())
    count = sum(p.numel() for p in parameters)
    held = size(sum(p.numel() * p.element_size() for p in parameters))
    say(f"model: {type(state.model).__name__}, {count:,} parameters, {held}")
    one = "GPU" if placement.device.type == "cuda" else "rank"
    if sizes.global_batch:
        exact = sizes.per_rank * sizes.accumulation * sizes.ranks == sizes.global_batch
        copies = f"{sizes.ranks} {one}{'s' if sizes.ranks > 1 else ''}"
        say(
            f"batch: {sizes.per_rank} per {one} x {sizes.accumulation} accumulation x {copies} "
            f"{'=' if exact else '>='} {sizes.global_batch} samples per step"
        )
    if isinstance(loader, OwnBatches):
        say("data: your own batches")
    elif loader.steps is not None:
        batches = (
            len(loader) if isinstance(loader, ShareLoader) else loader.steps * sizes.accumulation
        )
        say(f"data: {loader.steps} step{'s' if loader.steps > 1 else ''} per epoch")
        say(f"Train batches: {batches * ranks} (per {one}: {batches})")
    sets = val_loader if isinstance(val_loader, dict) else {"": val_loader}
    for name, val in sets.items():
        if isinstance(val, ShareLoader):
            title = f"Val batches of {name}" if name else "Val batches"
            say(f"{title}: {len(val) * ranks} (per {one}: {len(val)})")
    if (
        ranks > 1
        and not config.sync_bn
        and uses_batch_statistics(state.model, state.modes.names_in_eval())
    ):
        say(
            "BatchNorm normalises each rank's part of a batch, so the result depends on the number "
            "of ranks; sync_bn=true normalises the whole batch, as one rank does"
        )
    brought = isinstance(state.schedule, BroughtScheduler)
    say(scaling.describe(float(state.optimizer.param_groups[0]["lr"]) if brought else None))
    say(state.schedule.describe())
    say(f"run: {folder}")


def summary(
    console: Console,
    progress: Progress,
    config: MultiGPUConfig,
    step: int,
    run: RunFolder,
    told: RunRecord | None,
) -> None:
    """What came out, where it lies, and how to look at it. `told`: the run by its events."""
    last = progress.last
    if not last["train"]:
        return
    rows = [
        ["epochs", f"{progress.epochs_done}"],
        ["steps", f"{step}"],
        *(speed_rows(figures(told)) if told is not None else []),
        *metric_rows("train", last["train"]),
        *metric_rows("val", last["val"]),
    ]
    if progress.best is not None and progress.best_epoch is not None:
        best = f"{metric(progress.metric, progress.best)} (epoch {progress.best_epoch + 1})"
        kind = "" if last["val"] else "train "  # without a validation, training decides
        rows.append([f"best {kind}{progress.metric}", best])
    console.table("Summary", ["", ""], rows)
    console.line(f"run folder: {run.path}")
    if (run.checkpoints / "best").is_dir():
        console.line(f"best model: {run.checkpoints / 'best'}")
    curves = config.tensorboard or "tensorboard" in config.loggers
    if curves and run.tensorboard.is_dir():
        console.line(f"curves: tensorboard --logdir {run.tensorboard}")


class LossAnnouncement(Callback):
    """Says, after the first step, which loss was chosen where the user gave none."""

    watches_only = True

    def __init__(self, loss_fn: SupervisedLoss, callbacks: CallbackList) -> None:
        self._loss_fn = loss_fn
        self._callbacks = callbacks

    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.say(self._loss_fn.description)
        self._callbacks.remove(self)
