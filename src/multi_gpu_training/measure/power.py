"""Power that a GPU draws while it trains, read through NVML."""

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
    try:
        import pynvml

        pynvml.nvmlInit()
        # NVML counts all GPUs, torch those of CUDA_VISIBLE_DEVICES: the UUID says which it is.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        torch.cuda.synchronize(device)
        return _watts(pynvml, handle, device, work)
    except (ImportError, AttributeError):
        return None
    except pynvml.NVMLError:  # a driver that does not count energy
        return None


def _watts(nvml: Any, handle: Any, device: torch.device, work: Callable[[], None]) -> float | None:
    before = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules
    begun = time.perf_counter()
    # Wait for the GPU about twenty times in all: short steps must leave it no gaps.
    together = 1
    while (round_begun := time.perf_counter()) < begun + LEAST_S:
        for _ in range(together):
            work()
        torch.cuda.synchronize(device)
        if time.perf_counter() - round_begun < LEAST_S / 20:
            together *= 2
    joules = (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3
    return float(joules / (time.perf_counter() - begun)) if joules > 0 else None
