"""The use of this rank's device, read now and then in a thread beside training."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch

from multi_gpu_training.portability import peak_memory_bytes

STALL_S = 60.0  # without a step, where steps are short
STALL_STEPS = 50  # of their usual length, where they are long


class DeviceReader:
    """Reads a GPU through NVML, else what this process takes of the machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only sets the mark
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda":
            with contextlib.suppress(Exception):  # no library, no driver, a slice of a GPU
                import pynvml

                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device))
                self._nvml = pynvml

    def read(self) -> dict[str, float]:
        """What can be read now; what cannot is left out."""
        facts = {"cpu_percent": self._process.cpu_percent()}
        if self.device.type != "cuda":
            facts["memory_bytes"] = float(self._process.memory_info().rss)
            facts["peak_bytes"] = max(float(peak_memory_bytes()), facts["memory_bytes"])
            facts["load"] = os.getloadavg()[0]
            return facts
        facts["memory_bytes"] = float(torch.cuda.memory_allocated(self.device))
        facts["peak_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
        return facts | self._gpu()

    def _gpu(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return {}
        questions: dict[str, Callable[[], float]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        found = {}
        for name, ask in questions.items():
            with contextlib.suppress(Exception):  # a question that this GPU does not answer
                found[name] = float(ask())
        return found


def gpu_uuid(device: torch.device) -> str:
    """What tells this GPU from every other, on any machine."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid else f"GPU {device.index or 0}"


class DeviceWatch:
    """Hands a reading to `record` every `interval_s`, and says when no step comes any more.

    `progress` gives the step of a training loop, None outside of one. Both are methods; the
    thread ends with the object that they belong to.
    """

    def __init__(
        self,
        device: torch.device,
        interval_s: float,
        record: Callable[..., None],
        progress: Callable[[], int | None],
    ) -> None:
        self._reader = DeviceReader(device)
        self._interval_s = interval_s
        self._record_of = weakref.WeakMethod(record)
        self._progress_of = weakref.WeakMethod(progress)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
        self._stalls = StallWatch()
        self._thread.start()

    def stop(self) -> None:
        """A last reading, and the thread ends."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join(5.0)
        self._look()

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            if not self._look():
                return

    def _look(self) -> bool:
        """Record a reading; False once there is nobody to record it for."""
        record, progress = self._record_of(), self._progress_of()
        if record is None or progress is None:
            return False
        # A driver may go away; training has its own opinion on that.
        with contextlib.suppress(Exception):
            record("device", **self._reader.read())
            stalled = self._stalls.look(progress(), time.monotonic())
            if stalled is not None:
                record("stall", **stalled)
        return True


class StallWatch:
    """Notices that the steps of a training loop have stopped coming."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._told = False

    def look(self, step: int | None, now: float) -> dict[str, float] | None:
        """What to record about it, once a stall; None where all is well."""
        if step is None:
            self._first = self._last = None
            return None
        if self._last is None or self._first is None or step < self._last[0]:
            self._first = self._last = (step, now)
            self._told = False
            return None
        if step > self._last[0]:
            self._last, self._told = (step, now), False
            return None
        waited = now - self._last[1]
        steps = self._last[0] - self._first[0]
        usual = (self._last[1] - self._first[1]) / steps if steps else 0.0
        if self._told or waited < max(STALL_S, STALL_STEPS * usual):
            return None
        self._told = True
        return {"step": self._last[0], "waited_s": waited}
