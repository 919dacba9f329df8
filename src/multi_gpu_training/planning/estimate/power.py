"""Watts that a GPU takes while it trains, through NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

LEAST_S = 1.0  # the counter of a GPU moves every tenth of a second


def watts_while(device: torch.device, work: Callable[[], None]) -> float | None:
    """Mean power of the GPU while `work()` is repeated for a second; None without NVML."""
    if device.type != "cuda":
        return None
    handle = _handle(device)
    if handle is None:
        return None
    import pynvml

    torch.cuda.synchronize(device)
    try:
        before: int | None = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules
    except pynvml.NVMLError:
        before = None  # a GPU older than Volta: its momentary power must do
    begun = time.perf_counter()
    readings: list[float] = []
    while time.perf_counter() - begun < LEAST_S:
        work()
        torch.cuda.synchronize(device)
        if before is None:
            readings.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
    seconds = time.perf_counter() - begun
    if before is None:
        return sum(readings) / len(readings)
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3
    return float(joules / seconds) if joules > 0 else None


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
