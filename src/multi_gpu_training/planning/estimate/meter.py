"""The part of `mgt estimate` inside a rank: measure steps as they run, then take one apart."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from multi_gpu_training.data.batch import batch_count, share_of
from multi_gpu_training.planning.estimate.anatomy import Anatomy
from multi_gpu_training.planning.estimate.cutting import memory_by_batch
from multi_gpu_training.planning.estimate.loading import loader_rates, on_device
from multi_gpu_training.planning.estimate.power import watts_while
from multi_gpu_training.training.measurement import Meter, Repeated, Request

if TYPE_CHECKING:
    from multi_gpu_training.manager import MultiGPUTrainingManager

PATIENCE_S = 30.0  # for the warm-up, and for the measured steps: slow ones need fewer
LEAST_WARM_UP = {"cuda": 16, "cpu": 3}
LEAST_STEPS = 8
PICTURES = (torch.nn.Conv2d, torch.nn.Conv3d)  # of a model about images or videos
UNLIMITED = 1_000_000  # epochs, in `measurement.adapt`


class ProfileMeter(Meter):
    """Measures like Meter; then repeats the last step to learn its phases, buckets, memory and
    power, reads samples with more and fewer workers, and ends the process."""

    def __init__(self, manager: MultiGPUTrainingManager, request: Request) -> None:
        super().__init__(manager, request)
        asked = Path(request.out) / "asked.json"
        self.asked = json.loads(asked.read_text()) | {"per_rank_batch": manager.sizes.per_rank}
        asked.write_text(json.dumps(self.asked))
        source = getattr(manager.train_loader, "source", None)
        self.dataset_samples = getattr(source, "samples", None)
        self.window: list[Any] = []
        self.finished: list[Any] = []  # the micro-batches of the newest whole step
        self.own_batches = False
        self.largest = 0
        self.samples_seen = 0
        self.failed = False
        self.began = time.perf_counter()
        atexit.register(self._at_exit)

    def train_step(self, batch: Any) -> Any:
        share = share_of(batch)
        count = batch_count(batch) if share is None else share.count
        self.own_batches = share is None
        self.largest = max(self.largest, count)
        # The step before is let go of: what is kept here must not count as the training's memory.
        self.finished = []
        self.window.append(batch)
        self.failed = True
        result = self._step(batch)
        self.failed = False
        if share is None:
            self._micro += count * self.manager.placement.dp_size
        if result.moved:
            self.finished, self.window = self.window, []
            self.samples_seen = self._micro or getattr(share, "window_count", 0)
            self._micro = 0
            self._shorten()
            if self._tick(self.samples_seen):
                self._conclude()
        return result

    def on_end(self, run: Any) -> None:
        """The script ended before the steps were done: go on with its last one."""
        if not self._done and self.finished and sys.exception() is None:
            self._conclude()

    def _at_exit(self) -> None:
        """The same for a loop of the user's own that does not call `finish`."""
        if not self._done and self.finished and not self.failed:
            with contextlib.suppress(SystemExit):
                self._conclude()

    def _shorten(self) -> None:
        """Where steps are slow, be content with fewer."""
        now, coming = time.perf_counter(), self.taken + 1
        least = LEAST_WARM_UP.get(self.device.type, 3)
        if not self.walls and coming >= least and now - self.began > PATIENCE_S:
            self.warmup = min(self.warmup, coming)
        elif len(self.walls) > LEAST_STEPS and now - self.walls[0] > PATIENCE_S:
            self.steps = min(self.steps, coming - self.warmup)

    def _conclude(self) -> None:
        atexit.unregister(self._at_exit)
        self._done = True
        if len(self.walls) < 1 + min(self.steps, LEAST_STEPS):
            self._repeat_for_times()
        record = self._record()
        record |= self._facts()
        trainer = self.manager.trainer
        record["power_w"] = watts_while(self.device, self._repeat)
        self._save(record)
        self._leave_graphs()
        anatomy = Anatomy(trainer)
        record |= anatomy.dissect(lambda: self._repeat(anatomy))
        if self.asked["compressed"]:
            for bucket in record["buckets"]:
                bucket["size_bytes"] //= 2
        record["memory_by_batch"] = memory_by_batch(
            anatomy, self._take, self.finished, self.largest
        )
        record["profiled"] = True
        self._save(record)
        if self.reads_loader:
            self._loader_rates(record)
        raise SystemExit(0)

    @property
    def reads_loader(self) -> bool:
        """Whether batches come from the manager's loader, and not from a collector of rollouts or
        the like, for which the dataset is only a number."""
        source = getattr(self.manager.train_loader, "source", None)
        return not self.own_batches and (not isinstance(source, Repeated) or source.read)

    def _facts(self) -> dict[str, Any]:
        config, model = self.manager.config, self.manager.model
        epochs = config.epochs if config.epochs != UNLIMITED else self.asked["epochs"]
        return {
            "per_rank_batch": self.largest,
            "accumulation": len(self.finished),
            "own_batches": self.own_batches,
            "epochs": epochs,
            **{key: self.asked[key] for key in ("max_steps", "sync_bn", "keeps_global_batch")},
            "norms": sum(isinstance(module, _BatchNorm) for module in model.modules()),
            "images": any(isinstance(module, PICTURES) for module in model.modules()),
            "dataset_samples": (
                self.dataset_samples if self.reads_loader or self.own_batches else None
            ),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "loader_workers": self.manager.train_loader.feeding.num_workers,
            "data_on_device": on_device(self.manager.train_loader),
            "outside_bytes": _outside(self.device),
            "loader_rates": {},
        }

    def _repeat(self, anatomy: Anatomy | None = None) -> None:
        """The newest whole step once more."""
        for number, batch in enumerate(self.finished, start=1):
            if anatomy is not None and number == len(self.finished):
                anatomy.begin()
            self._step(batch)

    def _take(self, micros: list[Any]) -> None:
        for batch in micros:
            self._step(batch)

    def _repeat_for_times(self) -> None:
        """The script took too few steps: its last one is taken again, without reading data."""
        for readings in (self.marks, self.walls, self.epochs):
            readings.clear()
        self.warmup, self.taken = max(1, self.warmup - self.taken), 0
        self.began = time.perf_counter()
        done = False
        while not done:
            self._repeat()
            self._shorten()
            done = self._tick(self.samples_seen)

    def _leave_graphs(self) -> None:
        """Recordings hold memory of their own, which a step by hand does not need."""
        self.manager.trainer.execution.leave_graphs()

    def _loader_rates(self, record: dict[str, Any]) -> None:
        needed = record["samples_per_step"] / median(record["step_times_s"])

        def note(workers: int, rate: float) -> None:
            record["loader_rates"][workers] = rate
            self._save(record)  # a worker that hangs costs only what comes after it

        try:
            loader_rates(self.manager.train_loader, needed, note)
        except Exception as error:
            print(f"loader rates: {type(error).__name__}: {error}", file=sys.stderr)


def _outside(device: torch.device) -> int:
    """Memory of the GPU that torch's allocator does not hold: CUDA's own, NCCL's, and that of
    other programs."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))
