"""The part of `mgt bench` that runs inside a rank: train some steps, note what they cost, end.

`mgt bench` starts the user's own script or a recipe once a case, and says what to do through the
file that MGT_BENCH names: there is no other way into a script.
"""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multi_gpu_training.config import MultiGPUConfig, TrainingMode
from multi_gpu_training.data.batch import batch_count, share_of
from multi_gpu_training.data.feeding import batch_sizes
from multi_gpu_training.data.order import ShuffledBatches
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.footprint import note_asked, note_footprint

if TYPE_CHECKING:
    from multi_gpu_training.manager import MultiGPUTrainingManager

VARIABLE = "MGT_BENCH"
# A graph is captured after a dozen steps; the cuDNN autotuner and the allocator settle before.
WARM_UP = {"cuda": 40, "cpu": 5}
LOGGED_BY_DDP = (
    "avg_forward_compute_time",
    "avg_backward_compute_time",
    "avg_backward_comm_time",
    "avg_backward_compute_comm_overlap_time",
)


@dataclass(frozen=True)
class Request:
    """What one measured training shall be like.

    settings: fields of MultiGPUConfig that this case changes.
    silent: gradients stay on their rank, which shows what exchanging them costs.
    every: steps between two readings of the clock, for steps so short that reading it counts.
    footprint: count what the first step keeps in memory.
    profile: afterwards take one step apart, for `mgt estimate`.
    """

    out: str
    mode: str
    ranks: int
    steps: int
    warmup: int | None = None
    device: str = "auto"
    device_ids: list[int] | None = None
    share_gpu: bool = False
    silent: bool = False
    every: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    footprint: bool = False
    profile: bool = False

    def save(self) -> str:
        path = Path(self.out) / "request.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return str(path)


def requested() -> Request | None:
    path = os.environ.get(VARIABLE)
    return Request(**json.loads(Path(path).read_text())) if path else None


# Another spelling of the same setting, which must not contradict what a case sets.
SYNONYMS = {
    "batch_size": ("global_batch_size",),
    "global_batch_size": ("batch_size", "gradient_accumulation_steps"),
    "bucket_cap_mb": ("reduce_bucket_size",),
    "fp16_compression": ("use_fp16_allreduce",),
    "use_mixed_precision": ("mixed_precision_dtype",),
}


def adapt(config: MultiGPUConfig, request: Request) -> MultiGPUConfig:
    """The user's config, placed as the case asks; nothing is saved or resumed."""
    mode = TrainingMode(request.mode)
    if request.footprint:
        note_asked(config, request.out)
    given = {name: getattr(config, name) for name in config.model_fields_set}
    given |= {
        "training_mode": mode,
        "world_size": request.ranks if mode is TrainingMode.DISTRIBUTED_DATA_PARALLEL else None,
        "rank": None,
        "local_rank": None,
        "device_ids": request.device_ids,
        "device": request.device,
        "share_gpu": request.share_gpu,
        "backend": None,
        "epochs": 1_000_000,
        "max_steps": None,
        "lr_scaling": "none",
        "resume": None,
        "forecast": None,
        "run_name": None,
        "early_stopping_patience": None,
        "enable_fault_tolerance": False,
        "tensorboard": False,
        "monitor": False,
        "on_out_of_memory": "stop",  # what does not fit is to be seen
        "progress": "off",
        "save_dir": str(Path(request.out) / "runs"),
        "max_restarts": 0,
    }
    if mode is not TrainingMode.DISTRIBUTED_DATA_PARALLEL:
        given["balance"] = "auto"
    if len(given.get("share_weights") or ()) != given["world_size"]:
        given.pop("share_weights", None)  # of another number of ranks
    if mode is TrainingMode.DATA_PARALLEL:
        given["sync_bn"] = False  # which DataParallel cannot do
    if request.silent:
        given["consistency_check_every"] = 0  # replicas go apart, as they must
    if request.profile:
        given |= _plain_exchange(config, request)
    for name in request.settings:
        for other in SYNONYMS.get(name, ()):
            given.pop(other, None)
    return MultiGPUConfig(**{**given, **request.settings})


def _plain_exchange(config: MultiGPUConfig, request: Request) -> dict[str, Any]:
    """Settings with which DDP's buckets can be watched; what the user asked for is noted."""
    named = config.model_fields_set
    asked = {
        "epochs": config.epochs if "epochs" in named else None,
        "per_rank_batch": batch_sizes(config, 1).per_rank,
        "max_steps": config.max_steps,
        "keeps_global_batch": config.global_batch_size is not None,
        "compressed": config.compress_gradients,
        "sync_bn": config.sync_bn,
    }
    (Path(request.out) / "asked.json").write_text(json.dumps(asked))
    return {"use_fp16_allreduce": False, "fp16_compression": False}


class Repeated(ShuffledBatches):
    """The samples of a source again and again, in whole batches: an epoch of `steps` equal steps,
    so that neither a short batch nor the end of an epoch is in what is measured."""

    def __init__(self, inner: ShuffledBatches, steps: int) -> None:
        super().__init__(steps * inner.batch_size, inner.batch_size, inner.shuffle)
        self.inner = inner
        self.read = False

    def _order(self, seed: int, epoch: int) -> Tensor:
        self.read = True
        parts: list[Tensor] = []
        for number in count(epoch):
            parts.append(self.inner._order(seed, number))
            if sum(map(len, parts)) >= self.samples:
                break
        return torch.cat(parts)[: self.samples]


class Meter(Callback):
    """Stands around `train_step`, notes when each step ended, and ends the process."""

    def __init__(self, manager: MultiGPUTrainingManager, request: Request) -> None:
        self.manager = manager
        self.request = request
        self.device = manager.placement.device
        warm_up = WARM_UP[self.device.type if self.device.type in WARM_UP else "cpu"]
        self.warmup = max(1, warm_up if request.warmup is None else request.warmup)
        self.steps = request.steps
        self.taken = 0
        self.samples = 0
        self.marks: list[Any] = []
        self.walls: list[float] = []
        self.epochs: list[int] = []
        self.before: dict[str, Any] = {}
        self._step = manager.trainer.train_step
        self._micro = 0
        self._done = False

    def train_step(self, batch: Any) -> Any:
        result = self._step(batch)
        share = share_of(batch)
        if share is None:
            self._micro += batch_count(batch) * self.manager.placement.dp_size
        if result.moved:
            step = self._micro or getattr(share, "window_count", 0)
            self._micro = 0
            if self._tick(step or self.manager.sizes.global_batch):
                self._conclude()
        return result

    def on_end(self, run: Run) -> None:
        """The script ended before the steps were done: what there is counts."""
        if not self._done and len(self.walls) > 1:
            self._write()

    def _tick(self, samples: int) -> bool:
        """A step is over; True if it was the last to measure."""
        self.taken += 1
        if self.taken < self.warmup:
            return False
        if self.taken == self.warmup:
            self._synchronize()
            self.manager.placement.barrier()
            self.before = self._execution()
        else:
            self.samples = samples
            if (self.taken - self.warmup) % self.request.every:
                return False
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        self.walls.append(time.perf_counter())
        self.epochs.append(self.manager.trainer.epoch)
        return self.taken >= self.warmup + self.steps

    def _conclude(self) -> None:
        """All steps are measured."""
        self._write()
        self.manager.placement.barrier()
        raise SystemExit(0)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _spacings(self) -> tuple[list[float], str]:
        """Seconds a step, between two readings in one epoch, and by which clock."""
        within = [a == b for a, b in pairwise(self.epochs)]
        walls = [b - a for a, b in pairwise(self.walls)]
        clock, found = "wall", walls
        if self.marks:
            device = [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.marks)]
            whole = self.walls[-1] - self.walls[0] + self.drain_s
            # Work on a stream that the marks do not wait for would look like no work at all.
            if sum(device) > 0.7 * whole:
                clock, found = "device", device
        kept = [value for value, same in zip(found, within, strict=True) if same] or found
        return [value / self.request.every for value in kept], clock

    def _write(self) -> None:
        self._save(self._record())

    def _save(self, record: dict[str, Any]) -> None:
        rank = self.manager.placement.identity.rank
        (Path(self.request.out) / f"rank-{rank}.json").write_text(json.dumps(record))

    def _record(self) -> dict[str, Any]:
        """What was measured."""
        self._done = True
        ended = time.perf_counter()
        self._synchronize()
        self.drain_s = time.perf_counter() - ended
        times, clock = self._spacings()
        if clock == "wall":
            late = self.drain_s / (len(times) * self.request.every)
            times = [value + late for value in times]
        manager, sizes = self.manager, self.manager.sizes
        return {
            "step_times_s": times,
            "clock": clock,
            "samples_per_step": self.samples,
            "per_rank_batch": sizes.per_rank,
            "accumulation": sizes.accumulation,
            "copies": sizes.ranks,
            "global_batch": sizes.global_batch,
            "device": str(self.device),
            "device_name": _device_name(self.device),
            "precision": manager.trainer.precision.describe(),
            "parameters": sum(p.numel() for p in manager.model.parameters()),
            "execution": self._share_replayed(),
            "ddp_logger": _logged_by_ddp(manager.trainer.wrapped),
            **_memory(self.device, self.request.device_ids),
        }

    def _execution(self) -> dict[str, Any]:
        found = self.manager.trainer.execution
        return {
            "mode": found.mode,
            "replayed": found.replayed,
            "steps": found.steps,
            "reason": found.reason,
        }

    def _share_replayed(self) -> dict[str, Any]:
        """How the measured steps were executed."""
        now = self._execution()
        steps = now["steps"] - self.before["steps"]
        replayed = now["replayed"] - self.before["replayed"]
        share = replayed / steps if steps else 0.0
        return {"mode": now["mode"], "reason": now["reason"], "share": share}


def measure(manager: MultiGPUTrainingManager, request: Request) -> None:
    """Measure this training; after the requested steps the process ends."""
    if request.footprint:
        note_footprint(manager, request.out)
    meter = _meter(manager, request)
    source = getattr(manager.train_loader, "source", None)
    if type(source) is ShuffledBatches:
        steps = meter.warmup + request.steps + 1
        manager.train_loader.source = Repeated(source, steps)  # type: ignore[union-attr]
    wrapped: Any = manager.trainer.wrapped
    if request.silent and hasattr(wrapped, "require_backward_grad_sync"):
        wrapped.require_backward_grad_sync = False  # `no_sync`, for good
    manager.trainer.train_step = meter.train_step  # type: ignore[method-assign]
    manager.callbacks.add(meter)


def _meter(manager: MultiGPUTrainingManager, request: Request) -> Meter:
    if not request.profile:
        return Meter(manager, request)
    from multi_gpu_training.planning.estimate.meter import ProfileMeter

    return ProfileMeter(manager, request)


def _memory(device: torch.device, device_ids: list[int] | None) -> dict[str, int]:
    """Peak of this rank, of the fullest GPU where it has several."""
    if device.type != "cuda":
        # Linux counts in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_bytes": peak, "reserved_bytes": peak, "total_bytes": 0}
    gpus = sorted(set(device_ids or [device.index or 0]))
    return {
        "peak_bytes": max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus),
        "reserved_bytes": max(torch.cuda.max_memory_reserved(gpu) for gpu in gpus),
        "total_bytes": torch.cuda.get_device_properties(gpus[0]).total_memory,
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _logged_by_ddp(wrapped: Any) -> dict[str, float]:
    """Seconds that DDP itself noted; empty where there is no DDP or it noted nothing."""
    ask = getattr(wrapped, "_get_ddp_logging_data", None)
    if ask is None:
        return {}
    try:
        found = ask()
        return {key: float(found[key]) / 1e9 for key in LOGGED_BY_DDP if found.get(key)}
    except (RuntimeError, TypeError, ValueError):
        return {}
