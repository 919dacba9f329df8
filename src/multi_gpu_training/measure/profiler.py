"""The profile of a step, for `mgt estimate`: measure steps as they run, then take one apart."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import attach, share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentLoader
from multi_gpu_training.measure.loader_rates import loader_rates
from multi_gpu_training.measure.meter import UNLIMITED, Meter, Repeated, StepTimes
from multi_gpu_training.measure.power import watts_while
from multi_gpu_training.measure.request import ASKED, MeasuredRun, MeasureRequest
from multi_gpu_training.measure.step_anatomy import Anatomy
from multi_gpu_training.measure.trainer_access import BATCH_NORMS
from multi_gpu_training.training.callbacks import Run
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.strategy.blocks import find_blocks

PATIENCE_S = 30.0  # for the warm-up, and for the measured steps: slow ones need fewer
LEAST_WARM_UP = {"cuda": 16, "cpu": 3}
LEAST_STEPS = 8
PICTURES = (torch.nn.Conv2d, torch.nn.Conv3d)  # of a model about images or videos


class ProfileMeter(Meter):
    """Measures like Meter. Then it repeats the last step to learn its phases, buckets, memory and
    power, reads samples with more and fewer workers, and ends the process."""

    def __init__(self, run: MeasuredRun, request: MeasureRequest) -> None:
        super().__init__(run, request)
        self.asked = json.loads((Path(request.out) / ASKED).read_text())
        source = getattr(run.train_loader, "source", None)
        self.dataset_samples = getattr(source, "samples", None)
        self.window: list[Any] = []
        self.finished: list[Any] = []  # the micro-batches of the newest whole step
        self.own_batches = False
        self.largest = 0
        self.failed = False
        self.began = time.perf_counter()
        self._share: Share | None = None  # of the micro-batch under way
        run.trainer.state.transform = self._keep
        atexit.register(self._at_exit)

    def on_forward(self, run: Run, share: Share) -> None:
        super().on_forward(run, share)
        self.own_batches = not share.window_count
        self.largest = max(self.largest, share.count)
        self.failed = True
        if self._recording:
            return  # its tensors are the recording's: the step before is as good
        self._share = share
        if share.first:
            # What is kept here must not count as the training's memory.
            self.finished, self.window = [], []

    def on_micro_batch_end(self, run: Run) -> None:
        self._share = None
        self.failed = sys.exception() is not None

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self.window:  # a replayed step has none: an earlier one was of the same shape
            self.finished, self.window = self.window, []
        self._shorten()
        super().on_step_end(run, result)

    def on_end(self, run: Run) -> None:
        """The script ended before the steps were done: continue with its last one."""
        if not self._done and self.finished and sys.exception() is None:
            self._conclude()

    def _keep(self, batch: Any) -> Any:
        """Keep a training batch as the loss gets it; the trainer calls this."""
        share = self._share
        if share is not None:
            self.window.append(attach(batch, share) if share.window_count else batch)
        return batch

    @property
    def _recording(self) -> bool:
        """Whether a CUDA graph is being recorded."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

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
        # Steps from here on are repetitions, which this meter must not count.
        self.run.callbacks.remove(self)
        self.run.trainer.state.transform = None
        self.finished = self._step_of_loader() or self.finished
        if len(self.walls) < 1 + min(self.steps, LEAST_STEPS):
            self._repeat_for_times()
        record = self._record() | self._facts()
        record["power_w"] = watts_while(self.device, self._repeat)
        self._save(record)
        anatomy = Anatomy(self.run)
        record |= anatomy.dissect(self._repeat)
        if self.asked["compressed"]:
            for bucket in record["buckets"]:
                bucket["size_bytes"] //= 2
        record["memory_by_batch"] = anatomy.memory_by_batch(self._take, self.finished, self.largest)
        record["profiled"] = True
        self._save(record)
        if self.reads_loader:
            self._loader_rates(record)
        raise SystemExit(0)

    @property
    def reads_loader(self) -> bool:
        """Whether batches come from the manager's loader, and not from a collector of rollouts or
        the like, for which the dataset is only a number."""
        source = getattr(self.run.train_loader, "source", None)
        return not self.own_batches and (not isinstance(source, Repeated) or source.read)

    def _step_of_loader(self) -> list[Any]:
        """A step of data that lie on the GPU, ungathered: what was kept is gathered already, and
        no recorded step would take it."""
        loader = self.run.train_loader
        if not (isinstance(loader, ResidentLoader) and self.reads_loader):
            return []
        found: list[Any] = []
        loader.seek(0)
        for batch in loader.batches():
            found.append(batch)
            share = share_of(batch)
            if share is None or share.last:
                break
        return found

    def _facts(self) -> dict[str, Any]:
        run, model = self.run, self.run.model
        epochs = self.asked["epochs"] if self.asked["epochs_given"] else None
        if run.config.epochs != UNLIMITED:  # fit(epochs=...) came before the config
            epochs = run.config.epochs
        return {
            "per_rank_batch": self.largest,
            "accumulation": len(self.finished),
            "own_batches": self.own_batches,
            "epochs": epochs,
            "max_steps": self.asked["max_steps"],
            "sync_bn": self.asked["sync_bn"],
            "keeps_global_batch": self.asked["global_batch_size"] is not None,
            "norms": sum(isinstance(module, BATCH_NORMS) for module in model.modules()),
            "images": any(isinstance(module, PICTURES) for module in model.modules()),
            "dataset_samples": (
                self.dataset_samples if self.reads_loader or self.own_batches else None
            ),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            **self._sharding_facts(),
            "loader_workers": run.train_loader.feeding.num_workers,
            "data_on_device": isinstance(run.train_loader, ResidentLoader),
            "loader_rates": {},
        }

    def _sharding_facts(self) -> dict[str, int]:
        """What a forecast of sharded ranks needs: the optimizer's memory, and blocks."""
        run, model = self.run, self.run.model
        states = run.trainer.optimizer.state.values()
        held = [t.nbytes for state in states for t in state.values() if isinstance(t, Tensor)]
        blocks = find_blocks(model, run.config.fsdp_blocks, run.config.find_unused_parameters)
        sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
        rest = sum(p.nbytes for p in model.parameters()) - sum(sizes)
        return {
            "optimizer_bytes": sum(held),
            "block_bytes": max([*sizes, rest]),
            "blocks": len(sizes) + 1,
        }

    def _repeat(self) -> None:
        """The newest whole step once more."""
        self._take(self.finished)

    def _take(self, micros: list[Any]) -> None:
        for batch in micros:
            self.run.trainer.train_step(batch)

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
            done = self._tick()

    def _loader_rates(self, record: dict[str, Any]) -> None:
        needed = record["samples_per_step"] / median(record["step_times_s"])

        def note(workers: int, rate: float) -> None:
            record["loader_rates"][workers] = rate
            self._save(record)  # a worker that hangs costs only what comes after it

        try:
            loader_rates(self.run.train_loader, needed, note)
        except Exception as error:
            print(f"loader rates: {type(error).__name__}: {error}", file=sys.stderr)


class StepProfiling(StepTimes):
    """One rank under DDP, whose step is measured and then taken apart."""

    def changes(self, config: MultiGPUConfig) -> dict[str, Any]:
        # DDP's buckets can only be watched where no other communication hook compresses them.
        plain = {"use_fp16_allreduce": False, "fp16_compression": False}
        return super().changes(config) | plain

    def meter(self, run: MeasuredRun) -> Meter:
        return ProfileMeter(run, self.request)


MEASUREMENT = StepProfiling
