"""What the events tell of a run as a whole: who takes part, its epochs, its devices, its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from multi_gpu_training.accelerator import device_name
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import BatchSizes, Loader
from multi_gpu_training.monitoring.device import DeviceWatch, gpu_uuid
from multi_gpu_training.monitoring.events import StructuredLogger
from multi_gpu_training.monitoring.flops import measured_flops, peak_flops, uses_tf32
from multi_gpu_training.monitoring.report.run_record import RunRecord, read_run
from multi_gpu_training.portability import usable_cores
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.runner.selection import StepExecution
from multi_gpu_training.training.step_state import StepState
from multi_gpu_training.training.stopping import Stopped

WORTH_A_REPORT_S = 10.0


class RunEvents(Callback):
    """Records who takes part, every epoch, how the devices are used, and how the run ended, for the
    report and for a resumed run. `monitor=false` leaves out the devices."""

    watches_only = True

    def __init__(
        self,
        config: MultiGPUConfig,
        state: StepState,
        execution: StepExecution,
        sizes: BatchSizes,
        loader: Loader,
        logger: StructuredLogger,
    ) -> None:
        self._config = config
        self._state = state
        self._execution = execution
        self._logger = logger
        self._device: DeviceWatch | None = None
        self._first_step = state.step
        self._in_epoch = False
        logger.record("rank", **rank_facts(config, state, sizes, loader))
        self._begun = time.perf_counter()  # as the report counts: from the event `rank` on
        if config.monitor:
            self._device = DeviceWatch(
                state.placement.device,
                config.monitor_interval_s,
                logger.record,
                self.step_in_epoch,
            )

    def step_in_epoch(self) -> int | None:
        """The step that training is at; None between epochs."""
        return self._state.step if self._in_epoch else None

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        self._in_epoch = True

    def on_data_end(self, run: Run) -> None:
        self._in_epoch = False

    def on_epoch_end(self, run: Run, epoch: int, metrics: Mapping[str, float]) -> None:
        last = run.progress.last
        val = last["val"] or None
        self._logger.record("epoch", epoch=epoch, step=run.step, train=last["train"], val=val)

    def stop(self) -> None:
        """No more readings of the device."""
        if self._device is not None:
            self._device.stop()

    def end(self, folder: Path, error: BaseException | None) -> RunRecord | None:
        """The run has ended, well or by `error`. Returns what its events tell of it, on the main
        rank: summary and report take their figures from there, and so agree."""
        self.stop()
        state, execution = self._state, self._execution
        facts: dict[str, Any] = {
            "step": state.step,
            "steps": state.step - self._first_step,
            "elapsed_s": time.perf_counter() - self._begun,
            "execution": execution.mode,
            "replayed": execution.replayed,
        }
        if is_asked_for(error):
            facts["stopped"] = "SIGTERM" if getattr(error, "code", None) == 143 else "Ctrl-C"
        elif error is not None:
            facts["error"] = f"{type(error).__name__}: {error}"[:500]
        self._logger.record("run_end", **facts)
        if not state.placement.is_main:
            return None
        try:
            return read_run(folder)
        except Exception:  # a folder that is gone: the run has ended all the same
            return None

    def write_report(
        self, run: RunRecord | None, say: Callable[[str], None], error: BaseException | None
    ) -> None:
        """The report of a run that has ended well and was long enough for one."""
        if run is None or not self._config.report or error is not None:
            return
        if run.trained_s < WORTH_A_REPORT_S:
            return
        from multi_gpu_training.monitoring.report import write_page

        try:
            say(f"report: {write_page([run])}")
        except Exception as error:  # the run is done and saved: a picture of it must not fail it
            self._logger.warning(f"no report was written: {type(error).__name__}: {error}")


def is_asked_for(error: BaseException | None) -> bool:
    """Whether a run that ends by this was asked to: not a failure."""
    return isinstance(error, Stopped | KeyboardInterrupt)


def rank_facts(
    config: MultiGPUConfig, state: StepState, sizes: BatchSizes, loader: Loader
) -> dict[str, Any]:
    """Where this rank runs and what its share of a step is."""
    placement, device = state.placement, state.placement.device
    cuda = device.type == "cuda"
    parameters = [p for p in state.trained.parameters() if p.requires_grad]
    return {
        "step": state.step,
        "device": str(device),
        "device_name": device_name(device),
        "device_uuid": gpu_uuid(device) if cuda else None,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "cores": usable_cores(),
        "machine_cores": os.cpu_count(),
        "machine_bytes": psutil.virtual_memory().total,
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "local_rank": placement.identity.local_rank,
        "backend": placement.backend,
        "per_rank_batch": sizes.per_rank,
        "accumulation": sizes.accumulation,
        "global_batch": sizes.global_batch,
        **_epoch_facts(loader, sizes.global_batch),
        "copies": sizes.ranks,
        "workers": config.num_workers,
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "precision": state.precision.describe(),
        "peak_flops": _peak(device, state.precision.describe()) if config.monitor else None,
    }


def _epoch_facts(loader: Loader, global_batch: int) -> dict[str, int]:
    """How many samples and steps an epoch has, where the loader knows it."""
    samples = getattr(getattr(loader, "source", None), "samples", None)
    steps = getattr(loader, "steps", None)
    if not isinstance(samples, int) or not isinstance(steps, int):
        return {}
    return {"epoch_samples": min(samples, steps * global_batch), "epoch_steps": steps}


def _peak(device: torch.device, precision: str) -> float | None:
    if device.type != "cuda":
        return measured_flops(torch.get_num_threads())
    return peak_flops(torch.cuda.get_device_name(device), precision, uses_tf32())
