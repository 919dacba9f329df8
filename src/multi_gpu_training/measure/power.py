"""Power that a GPU draws while it trains, read through NVML."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

LEAST_S = 1.0  # the counter of a GPU moves every tenth of a second


def watts_while(device: torch.device, work: Callable[[], None]) -> float | None:
    """Mean power of the GPU while `work()` is repeated for a second; None without NVML."""
    handle = _handle(device) if device.type == "cuda" else None
    if handle is None:
        return None
    import pynvml

    torch.cuda.synchronize(device)
    try:
        return _by_energy(pynvml, handle, device, work)
    except pynvml.NVMLError:
        pass  # a GPU older than Volta counts no energy: its momentary power must do
    try:
        readings: list[float] = [
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3 for _ in _repeated(device, work)
        ]
        return sum(readings) / len(readings)
    except pynvml.NVMLError:
        return None


def _by_energy(
    nvml: Any, handle: Any, device: torch.device, work: Callable[[], None]
) -> float | None:
    before = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules
    begun = time.perf_counter()
    for _ in _repeated(device, work):
        pass
    joules = (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3
    return float(joules / (time.perf_counter() - begun)) if joules > 0 else None


def _repeated(device: torch.device, work: Callable[[], None]) -> Iterator[None]:
    """Repeat `work()` for a second; the GPU is waited for about every twentieth of it, so that
    short steps leave it no gaps."""
    end = time.perf_counter() + LEAST_S
    together = 1
    while (begun := time.perf_counter()) < end:
        for _ in range(together):
            work()
        torch.cuda.synchronize(device)
        if time.perf_counter() - begun < LEAST_S / 20:
            together *= 2
        yield


def _handle(device: torch.device) -> Any:
    """NVML counts all GPUs, torch those of CUDA_VISIBLE_DEVICES: the UUID says which it is."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except (ImportError, AttributeError):
        return None
    except pynvml.NVMLError:
        return None
