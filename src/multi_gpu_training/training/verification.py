"""The part of `mgt verify` that runs inside a rank: a short training, fully recorded.

`mgt verify` starts the user's own script or a recipe once on one rank and once on several, and
says what to do through the file that MGT_VERIFY names: there is no other way into a script. The
manager then trains a few steps on the same global batches, writes down what it saw and got, and
ends the process.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from multi_gpu_training.data.batch import attach, batch_count, head, map_tensors, share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.loss import LossFn, read_loss
from multi_gpu_training.training.step import StepResult

if TYPE_CHECKING:
    from multi_gpu_training.manager import MultiGPUTrainingManager

VARIABLE = "MGT_VERIFY"


@dataclass(frozen=True)
class Request:
    """What one recorded training shall be like."""

    out: str
    ranks: int
    steps: int
    device: str = "auto"
    share_gpu: bool = False
    sync_bn: bool | None = None
    noise: int = 0
    double: bool = False

    def save(self) -> str:
        path = Path(self.out) / "request.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return str(path)


def requested() -> Request | None:
    path = os.environ.get(VARIABLE)
    return Request(**json.loads(Path(path).read_text())) if path else None


def adapt(config: MultiGPUConfig, request: Request) -> MultiGPUConfig:
    """The user's config, made comparable: same global batch, full precision, nothing saved."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    batch = config.batch_size * config.gradient_accumulation_steps
    given |= {
        "training_mode": TrainingMode.DISTRIBUTED_DATA_PARALLEL,
        "world_size": request.ranks,
        "rank": None,
        "local_rank": None,
        "device_ids": None,
        "device": request.device,
        "share_gpu": request.share_gpu,
        "backend": None,
        "global_batch_size": config.global_batch_size or batch,
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
        "max_steps": None,
        "resume": None,
        "forecast": None,
        "enable_fault_tolerance": False,
        "tensorboard": False,
        "monitor": False,
        "progress": "off",
        "save_dir": str(Path(request.out) / "runs"),
        "num_workers": 0,
        "prefetch_factor": None,
        "persistent_workers": False,
        "max_restarts": 0,
    }
    given.pop("batch_size", None)
    weights = given.pop("share_weights", None)
    given["balance"] = "equal"
    if weights and len(weights) == request.ranks:
        given |= {"share_weights": weights, "balance": "auto"}
    if request.sync_bn is not None:
        given["sync_bn"] = request.sync_bn
    return MultiGPUConfig(**given)


def shorten(dataset: Any, steps: int, global_batch: int) -> Any:
    """A part of the dataset whose epoch ends, with a short batch, within the steps to come."""
    if isinstance(dataset, DataLoader) and type(dataset.sampler) in (
        RandomSampler,
        SequentialSampler,
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


@dataclass
class Recorder(Callback):
    """Follows one training and writes `rank-R.json` and rank 0's `weights.safetensors`.

    `transform` must be the trainer's: it sees what the loss function gets.
    """

    request: Request
    rank: int
    batches: list[Any] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    start: Any = None
    on_done: Callable[[], None] = lambda: None
    _share: Share | None = None  # of the micro-batch that is being computed

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remember where training starts; dropout off, as its noise depends on the rank."""
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        if self.request.ranks == 1:
            self.start = copy.deepcopy((model, optimizer))

    def cast(self, batch: Any) -> Any:
        """The batch in the precision that was asked for."""
        if not self.request.double:
            return batch
        share = share_of(batch)
        batch = map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)
        return batch if share is None else attach(batch, share)

    def on_forward(self, run: Run, share: Share) -> None:
        self._share = share
        if share.window_count:  # else a batch of the user's own, whose place nobody knows
            self.seen.append(
                {"epoch": share.epoch, "position": share.position, "indices": share.indices}
            )

    def on_micro_batch_end(self, run: Run) -> None:
        self._share = None

    def transform(self, batch: Any) -> Any:
        """Note a training batch; any batch comes back in the precision that was asked for."""
        batch = self.cast(batch)
        if self._share is not None and self.request.ranks == 1:
            if self._share.window_count:
                batch = attach(batch, self._share)
            self.batches.append(batch)
        return batch

    def on_optimizer(self, run: Run) -> None:
        """Remember the rate, and how large each gradient ever was, as a share of all of them."""
        self.rates.append(float(run.optimizer.param_groups[0]["lr"]))
        named = run.model.named_parameters()
        norms = {n: float(p.grad.norm()) for n, p in named if p.grad is not None}
        total = sum(norm**2 for norm in norms.values()) ** 0.5 or 1.0
        for name, norm in norms.items():
            self.largest[name] = max(self.largest.get(name, 0.0), norm / total)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if result.step >= self.request.steps:
            self.on_done()

    def finish(
        self,
        model: nn.Module,
        metrics: dict[str, float] | None,
        facts: dict[str, Any],
        loss_fn: LossFn,
        max_grad_norm: float | None,
    ) -> None:
        """Write down what came out, and train once more by hand where that is possible."""
        out = Path(self.request.out)
        weights = dict(model.named_parameters())
        if self.rank == 0:
            save_file(_plain(weights), out / "weights.safetensors")
        if self.request.ranks == 1 and all(share_of(b) is not None for b in self.batches):
            facts["loss_depends_on_batch"] = loss_depends_on_the_batch(
                model, loss_fn, self.batches[0]
            )
            model, optimizer = self.start
            replay_by_hand(model, optimizer, self.batches, loss_fn, self.rates, max_grad_norm)
            save_file(_plain(dict(model.named_parameters())), out / "by_hand.safetensors")
        record = {"seen": self.seen, "metrics": metrics, "largest": self.largest, **facts}
        record.setdefault("loss_depends_on_batch", False)
        (out / f"rank-{self.rank}.json").write_text(json.dumps(record))


def begin(manager: MultiGPUTrainingManager, request: Request) -> None:
    """Record this training; after the requested steps the process ends."""
    recorder = Recorder(request, manager.placement.identity.rank)
    recorder.begin(manager.model, manager.trainer.optimizer)
    recorder.on_done = lambda: _end(manager, recorder)
    manager.trainer.noise_stream = request.noise
    manager.trainer.transform = recorder.transform
    manager.callbacks.add(recorder)


def _end(manager: MultiGPUTrainingManager, recorder: Recorder) -> None:
    loader, model = manager.train_loader, manager.model
    metrics = None
    if manager.val_loader is not None:
        metrics = manager.evaluate(manager.val_loader)
    norms = (nn.modules.batchnorm._BatchNorm,)
    facts = {
        "batchnorm": [name for name, m in model.named_modules() if isinstance(m, norms)],
        "sync_bn": manager.config.sync_bn,
        "samples": getattr(getattr(loader, "source", None), "samples", None),
        "steps_per_epoch": loader.steps,
    }
    recorder.finish(model, metrics, facts, manager.loss_fn, manager.config.max_grad_norm)
    manager.placement.barrier()
    raise SystemExit(0)


def replay_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    loss_fn: LossFn,
    rates: list[float],
    max_grad_norm: float | None,
) -> None:
    """The recorded training once more, in plain PyTorch: no trainer, no wrapper, no shares."""
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
    """Whether the loss of a batch is not the weighed mean of the losses of its two parts.

    True for means over tokens or class weights that return no weight, and for losses over
    pairs of samples.
    """
    count = batch_count(batch)
    if count < 2:
        return False
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            half = count // 2
            device = next(model.parameters()).device
            parts = [(head(batch, half), half), (_tail(batch, half, count), count - half)]
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


def _plain(tensors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
