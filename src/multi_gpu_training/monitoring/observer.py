"""Watches a run for its report: who takes part, phases of steps, use of the devices, the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil
import torch

from multi_gpu_training.monitoring.device import DeviceWatch, gpu_uuid
from multi_gpu_training.monitoring.sampling import StepSampler
from multi_gpu_training.monitoring.work import measured_flops, peak_flops, uses_tf32

if TYPE_CHECKING:
    from multi_gpu_training.training.manager import MultiGPUTrainingManager

WORTH_A_REPORT_S = 10.0


class Observer:
    """What `monitor` switches on. Everything it sees goes into the events of this rank."""

    def __init__(self, manager: MultiGPUTrainingManager) -> None:
        self.manager = manager
        self.sampler: StepSampler | None = None
        self._device: DeviceWatch | None = None
        self._begun = time.perf_counter()
        self._first_step = manager.trainer.step
        manager.logger.record("rank", **rank_facts(manager))
        if not manager.config.monitor:
            return
        self.sampler = StepSampler(manager, manager._log.wait)
        manager._log.wait.sampler = self.sampler
        manager.callbacks.add(self.sampler)
        self._device = DeviceWatch(
            manager.placement.device,
            manager.config.monitor_interval_s,
            manager.logger.record,
            manager._log.step_in_epoch,
        )

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Around a save, as long as training stands still for it."""
        if self.sampler is None:
            yield
            return
        begun = time.perf_counter()
        self.sampler.checkpoint_begins()
        try:
            yield
        finally:
            self.sampler.checkpoint_ends()
            self.sampler.checkpointing(time.perf_counter() - begun)

    def end(self) -> None:
        """The run has ended, well or by the error that is being raised."""
        error = sys.exception()
        self.stop()
        manager = self.manager
        facts: dict[str, Any] = {
            "step": manager.trainer.step,
            "steps": manager.trainer.step - self._first_step,
            "elapsed_s": time.perf_counter() - self._begun,
            "execution": manager.trainer.execution.mode,
            "replayed": manager.trainer.execution.replayed,
        }
        if error is not None:
            facts["error"] = f"{type(error).__name__}: {error}"[:500]
        manager.logger.record("run_end", **facts)
        if error is None and facts["elapsed_s"] >= WORTH_A_REPORT_S:
            self._write_report()

    def stop(self) -> None:
        if self.sampler is not None:
            self.manager.callbacks.remove(self.sampler)
            with contextlib.suppress(Exception):
                self.sampler.end_epoch()
        if self._device is not None:
            self._device.stop()

    def _write_report(self) -> None:
        manager = self.manager
        if not manager.config.report or not manager.placement.is_main:
            return
        from multi_gpu_training.monitoring.report import write_report

        try:
            path = write_report([manager.run.path])
            manager.console.line(f"report: {path}")
        except Exception as error:  # the run is done and saved: a picture of it must not fail it
            manager.logger.warning(f"no report was written: {type(error).__name__}: {error}")


def rank_facts(manager: MultiGPUTrainingManager) -> dict[str, Any]:
    """Where this rank runs and what its share of a step is."""
    placement, trainer, sizes = manager.placement, manager.trainer, manager.sizes
    device = placement.device
    cuda = device.type == "cuda"
    parameters = [p for p in manager.model.parameters() if p.requires_grad]
    return {
        "step": trainer.step,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else "CPU",
        "device_uuid": gpu_uuid(device) if cuda else None,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "cores": sorted(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count(),
        "machine_bytes": psutil.virtual_memory().total,
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "local_rank": placement.identity.local_rank,
        "backend": placement.backend,
        "per_rank_batch": sizes.per_rank,
        "accumulation": sizes.accumulation,
        "global_batch": sizes.global_batch,
        **_epoch_facts(manager),
        "copies": sizes.ranks,
        "workers": manager.config.num_workers,
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "precision": trainer.precision.describe(),
        "peak_flops": _peak(manager) if manager.config.monitor else None,
    }


def _epoch_facts(manager: MultiGPUTrainingManager) -> dict[str, int]:
    """How many samples and steps an epoch has, where the loader knows it."""
    loader = manager.train_loader
    samples = getattr(getattr(loader, "source", None), "samples", None)
    steps = getattr(loader, "steps", None)
    if not isinstance(samples, int) or not isinstance(steps, int):
        return {}
    return {"epoch_samples": min(samples, steps * manager.sizes.global_batch), "epoch_steps": steps}


def _peak(manager: MultiGPUTrainingManager) -> float | None:
    device = manager.placement.device
    if device.type != "cuda":
        return measured_flops(torch.get_num_threads())
    name = torch.cuda.get_device_name(device)
    return peak_flops(name, manager.trainer.precision.describe(), uses_tf32())
