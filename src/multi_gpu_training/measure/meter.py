"""The time of each step: train some steps, write down what they cost, end the process."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import torch

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.order import Share, ShuffledBatches
from multi_gpu_training.measure.request import MeasuredRun, Measurement, MeasureRequest
from multi_gpu_training.measure.trainer_access import execution_facts
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step import StepResult

# A graph is captured after a dozen steps; the cuDNN autotuner and the allocator settle before.
WARM_UP = {"cuda": 40, "cpu": 5}
UNLIMITED = 1_000_000  # epochs: the meter ends the training, not the config


class Repeated(ShuffledBatches):
    """The samples of a source again and again, in whole batches: an epoch of `steps` equal steps,
    so that neither a short batch nor the end of an epoch is in what is measured."""

    def __init__(self, inner: ShuffledBatches, steps: int) -> None:
        super().__init__(steps * inner.batch_size, inner.batch_size, inner.shuffle)
        self.inner = inner
        self.read = False

    def batches(self, seed: int, epoch: int) -> Iterator[Sequence[int]]:
        self.read = True
        epochs = (self.inner.batches(seed, number) for number in count(epoch))
        samples = chain.from_iterable(chain.from_iterable(epochs))
        for _ in range(len(self)):
            yield [next(samples) for _ in range(self.batch_size)]


class Meter(Callback):
    """Notes when each step ended. Once enough are measured, it writes `rank-R.json` and ends the
    process: nothing that the script does afterwards is wanted."""

    watches_only = True  # steps that are taken back and repeated count once

    def __init__(self, run: MeasuredRun, request: MeasureRequest) -> None:
        self.run = run
        self.request = request
        self.device = run.placement.device
        warm_up = WARM_UP[self.device.type if self.device.type in WARM_UP else "cpu"]
        self.warmup = max(1, warm_up if request.warmup is None else request.warmup)
        self.steps = request.steps
        self.taken = 0
        self.samples = run.sizes.global_batch  # of the newest step, over all ranks
        self.marks: list[Any] = []
        self.walls: list[float] = []
        self.epochs: list[int] = []
        self.before: dict[str, Any] = {}
        self.drain_s = 0.0
        self._own = 0  # samples so far of a step with batches that the user made
        self._done = False

    def on_forward(self, run: Run, share: Share) -> None:
        # A replayed step has no such event. It is of the shape of an earlier one.
        if share.first:
            self._own = 0
        self._own += share.count * run.placement.dp_size
        self.samples = share.window_count or self._own

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._tick():
            self._conclude()

    def on_end(self, run: Run) -> None:
        """The script ended before the steps were done: what there is counts."""
        if not self._done and len(self.walls) > 1:
            self._save(self._record())

    def _tick(self) -> bool:
        """A step is over; True if it was the last to measure."""
        self.taken += 1
        if self.taken < self.warmup:
            return False
        if self.taken == self.warmup:
            self._synchronize()
            self.run.placement.barrier()
            self.before = execution_facts(self.run.trainer)
        elif (self.taken - self.warmup) % self.request.every:
            return False
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        self.walls.append(time.perf_counter())
        self.epochs.append(self.run.trainer.epoch)
        return self.taken >= self.warmup + self.steps

    def _conclude(self) -> None:
        """All steps are measured."""
        self._save(self._record())
        self.run.placement.barrier()
        raise SystemExit(0)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _spacings(self) -> tuple[list[float], str]:
        """Seconds per step, between two readings in one epoch, and by which clock."""
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

    def _save(self, record: dict[str, Any]) -> None:
        rank = self.run.placement.identity.rank
        (Path(self.request.out) / f"rank-{rank}.json").write_text(json.dumps(record))

    def _record(self) -> dict[str, Any]:
        """What was measured."""
        self._done = True
        ended = time.perf_counter()
        self._synchronize()
        self.drain_s = time.perf_counter() - ended
        times, clock = self._spacings()
        if clock == "wall":
            # The host ran ahead of the device: what was still to do belongs to these steps.
            late = self.drain_s / (len(times) * self.request.every)
            times = [value + late for value in times]
        run, sizes = self.run, self.run.sizes
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
            "precision": run.trainer.state.precision.describe(),
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "execution": self._share_replayed(),
            "ddp_logger": run.trainer.strategy.logged_times(),
            **_memory(self.device, self.request.device_ids),
        }

    def _share_replayed(self) -> dict[str, Any]:
        """How the measured steps were executed."""
        now = execution_facts(self.run.trainer)
        steps = now["steps"] - self.before["steps"]
        replayed = now["replayed"] - self.before["replayed"]
        share = replayed / steps if steps else 0.0
        return {"mode": now["mode"], "reason": now["reason"], "share": share}


class StepTimes(Measurement):
    """The user's training, placed as the case asks; `mgt bench` measures it as it is."""

    def changes(self, config: MultiGPUConfig) -> dict[str, Any]:
        found: dict[str, Any] = {
            "epochs": UNLIMITED,
            "lr_scaling": "none",
            "run_name": None,
            "early_stopping_patience": None,
            "on_out_of_memory": "stop",  # a batch that does not fit is a result
        }
        if self.request.mode != TrainingMode.DISTRIBUTED_DATA_PARALLEL:
            found["balance"] = "auto"  # one process, or ranks that cannot be measured alone
        if self.request.mode == TrainingMode.DATA_PARALLEL:
            found["sync_bn"] = False  # which DataParallel cannot do
        if self.request.silent:
            found["consistency_check_every"] = 0  # replicas drift apart, as they must
        return found

    def callbacks(self, run: MeasuredRun) -> list[Callback]:
        super().callbacks(run)
        meter = self.meter(run)
        loader: Any = run.train_loader
        if type(getattr(loader, "source", None)) is ShuffledBatches:
            loader.source = Repeated(loader.source, meter.warmup + meter.steps + 1)
        if self.request.silent:
            run.trainer.strategy.keep_gradients_local()
        return [meter]

    def meter(self, run: MeasuredRun) -> Meter:
        return Meter(run, self.request)


MEASUREMENT = StepTimes


def _memory(device: torch.device, device_ids: list[int] | None) -> dict[str, int]:
    """Peak of this rank, of the fullest GPU where it has several.

    `outside_bytes` is what torch's allocator does not hold: CUDA's own, NCCL's, other programs'.
    """
    if device.type != "cuda":
        # Linux counts in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_bytes": peak, "reserved_bytes": peak, "total_bytes": 0, "outside_bytes": 0}
    gpus = sorted(set(device_ids or [device.index or 0]))
    free, total = torch.cuda.mem_get_info(gpus[0])
    return {
        "peak_bytes": max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus),
        "reserved_bytes": max(torch.cuda.max_memory_reserved(gpu) for gpu in gpus),
        "total_bytes": total,
        "outside_bytes": max(0, total - free - torch.cuda.memory_reserved(gpus[0])),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
