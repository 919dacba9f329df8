"""Record a short training for `mgt verify`: samples, rates, gradients, weights, metrics.

`mgt verify` trains the same global batches on one rank and on several. Each rank writes down what
it saw and what came out; planning/verify.py compares.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from multi_gpu_training.config import MultiGPUConfig, TrainingMode
from multi_gpu_training.data.batch import attach, head, map_tensors, share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.measure.request import MeasuredRun, Measurement, MeasureRequest
from multi_gpu_training.measure.trainer_access import BATCH_NORMS, DROPOUTS
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.loss import LossFn, read_loss
from multi_gpu_training.training.step import StepResult


class Recorder(Callback):
    """Follows one training. After the requested steps it writes `rank-R.json`, on rank 0
    `weights.safetensors`, and ends the process."""

    def __init__(self, run: MeasuredRun, request: MeasureRequest) -> None:
        self.run = run
        self.request = request
        self.alone = request.ranks == 1
        self.batches: list[Any] = []
        self.seen: list[dict[str, Any]] = []
        self.largest: dict[str, float] = {}  # of each gradient, as a share of all of them
        self.rates: list[float] = []
        self._share: Share | None = None  # of the micro-batch under way
        _switch_off_dropout(run.model)
        self.start = copy.deepcopy((run.model, run.optimizer)) if self.alone else None
        run.trainer.state.noise_stream = request.noise
        run.trainer.state.transform = self.transform

    def transform(self, batch: Any) -> Any:
        """Note a training batch as the loss gets it; any batch comes back in the precision that
        was asked for. The trainer calls this right before the loss."""
        if self.request.double:
            share = share_of(batch)
            batch = map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)
            batch = batch if share is None else attach(batch, share)
        if self._share is not None and self.alone:
            if self._share.window_count:
                batch = attach(batch, self._share)
            self.batches.append(batch)
        return batch

    def on_forward(self, run: Run, share: Share) -> None:
        self._share = share
        if share.window_count:  # else a batch that the user made, whose place nobody knows
            self.seen.append(
                {"epoch": share.epoch, "position": share.position, "indices": share.indices}
            )

    def on_micro_batch_end(self, run: Run) -> None:
        self._share = None

    def on_optimizer(self, run: Run) -> None:
        self.rates.append(float(run.optimizer.param_groups[0]["lr"]))
        named = run.model.named_parameters()
        norms = {n: float(p.grad.norm()) for n, p in named if p.grad is not None}
        total = sum(norm**2 for norm in norms.values()) ** 0.5 or 1.0
        for name, norm in norms.items():
            self.largest[name] = max(self.largest.get(name, 0.0), norm / total)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if result.step >= self.request.steps:
            self._conclude()

    def _conclude(self) -> None:
        run, model = self.run, self.run.model
        metrics = None if run.val_loader is None else run.evaluate(run.val_loader)
        record = {
            "seen": self.seen,
            "metrics": metrics,
            "largest": self.largest,
            "batchnorm": [name for name, m in model.named_modules() if isinstance(m, BATCH_NORMS)],
            "sync_bn": run.config.sync_bn,
            "samples": getattr(getattr(run.train_loader, "source", None), "samples", None),
            "steps_per_epoch": run.train_loader.steps,
            "loss_depends_on_batch": False,
        }
        out, rank = Path(self.request.out), run.placement.identity.rank
        if rank == 0:
            save_file(_plain(model), out / "weights.safetensors")
        if self.start is not None and all(share_of(b) is not None for b in self.batches):
            loss_fn = run.loss_fn
            record["loss_depends_on_batch"] = loss_depends_on_the_batch(
                model, loss_fn, self.batches[0]
            )
            model, optimizer = self.start
            limit = run.config.max_grad_norm
            replay_by_hand(model, optimizer, self.batches, loss_fn, self.rates, limit)
            save_file(_plain(model), out / "by_hand.safetensors")
        (out / f"rank-{rank}.json").write_text(json.dumps(record))
        run.placement.barrier()
        raise SystemExit(0)


class Recording(Measurement):
    """The user's training made comparable: same global batch, full precision, a short epoch."""

    reproducible = True
    drops = ("batch_size",)  # the global batch is what stays the same on any number of ranks

    def changes(self, config: MultiGPUConfig) -> dict[str, Any]:
        batch = config.batch_size * config.gradient_accumulation_steps
        weights = config.share_weights
        kept = weights is not None and len(weights) == self.request.ranks
        return {
            "training_mode": TrainingMode.DISTRIBUTED_DATA_PARALLEL,
            "world_size": self.request.ranks,
            "global_batch_size": config.global_batch_size or batch,
            "balance": "auto" if kept else "equal",
            "use_mixed_precision": False,
            "mixed_precision_dtype": "auto",
            "use_fp16_allreduce": False,
            "fp16_compression": False,
            "allow_tf32": False,
            "fast_defaults": False,
            "step_execution": "eager",
            "channels_last": False,
            "fused_optimizer": False,
            "data_on_gpu": False,
            "num_workers": 0,
            "prefetch_factor": None,
            "persistent_workers": False,
        }

    def shorten(self, dataset: Any, global_batch: int) -> Any:
        return shorten(dataset, self.request.steps, global_batch)

    def prepare(self, model: nn.Module) -> None:
        if self.request.double:
            model.double()

    def callbacks(self, run: MeasuredRun) -> list[Callback]:
        return [*super().callbacks(run), Recorder(run, self.request)]


MEASUREMENT = Recording


def _switch_off_dropout(model: nn.Module) -> None:
    """Its noise depends on the rank, so that results would differ."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def shorten(dataset: Any, steps: int, global_batch: int) -> Any:
    """The part of a dataset whose epoch ends, with a short batch, within `steps`."""
    if (
        isinstance(dataset, DataLoader)
        and dataset.batch_size is not None  # else it has its own batches, or items for batches
        and type(dataset.sampler) in (RandomSampler, SequentialSampler)
    ):
        return DataLoader(
            shorten(dataset.dataset, steps, global_batch),
            batch_size=dataset.batch_size,
            shuffle=type(dataset.sampler) is RandomSampler,
            collate_fn=dataset.collate_fn,
        )
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset):
        return dataset
    wanted = (steps - 2) * global_batch + max(1, global_batch // 3)
    samples = len(dataset)  # type: ignore[arg-type]
    if samples <= wanted:
        return dataset
    # A dataset that forms its own batches must still do so.
    subset = getattr(dataset, "subset", None)
    return subset(range(wanted)) if callable(subset) else Subset(dataset, range(wanted))


def replay_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    loss_fn: LossFn,
    rates: list[float],
    max_grad_norm: float | None,
) -> None:
    """Repeat the recorded training in plain PyTorch: no trainer, no wrapper, no shares."""
    model.train()
    window: list[Any] = []
    step = 0
    device = next(model.parameters()).device
    for batch in batches:
        window.append(batch)
        share = share_of(batch)
        assert share is not None
        if not share.last:
            continue
        total = torch.zeros((), dtype=torch.float64, device=device)
        weight = torch.zeros((), dtype=torch.float64, device=device)
        for part in window:
            loss = read_loss(loss_fn(model, part), device)
            share = share_of(part)
            assert share is not None
            counted = torch.tensor(float(share.count)) if loss.weight is None else loss.weight
            total = total + loss.mean * counted.to(device)
            weight = weight + counted.to(device)
        optimizer.zero_grad()
        (total / weight).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        first = optimizer.param_groups[0]["lr"]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (rates[step] / first) if first else rates[step]
        optimizer.step()
        step += 1
        window = []


def loss_depends_on_the_batch(model: nn.Module, loss_fn: LossFn, batch: Any) -> bool:
    """Whether the loss of a batch is not the weighted mean of the losses of its two parts.

    True for means over tokens or class weights that return no weight, and for losses over
    pairs of samples.
    """
    share = share_of(batch)
    count = 0 if share is None else share.count
    if count < 2:
        return False
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            half = count // 2
            device = next(model.parameters()).device
            parts = [(head(batch, half, count), half), (_tail(batch, half, count), count - half)]
            whole = read_loss(loss_fn(model, batch), device)
            total, weight = 0.0, 0.0
            for part, size in parts:
                loss = read_loss(loss_fn(model, part), device)
                counted = float(size if loss.weight is None else loss.weight)
                total += float(loss.mean) * counted if counted else 0.0
                weight += counted
            expected = total / weight if weight else 0.0
            return abs(float(whole.mean) - expected) > 1e-4 * max(1e-6, abs(float(whole.mean)))
    finally:
        model.train(was_training)


def _tail(batch: Any, start: int, count: int) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:] if tensor.ndim and tensor.shape[0] == count else tensor

    return map_tensors(batch, cut)


def _plain(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: t.detach().cpu().contiguous().clone() for name, t in named}
