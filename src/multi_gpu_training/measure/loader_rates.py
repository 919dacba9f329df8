"""Samples per second that this machine reads and collates, by the number of workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multi_gpu_training.data.loader import ShareLoader
from multi_gpu_training.portability import usable_cores

SECONDS = 1.0
LEAST_BATCHES = 4
ENOUGH = 16.0  # times what one GPU trains: eight fast ones on a machine, and as much again


def loader_rates(loader: Any, needed: float, say: Callable[[int, float], None]) -> None:
    """Call `say(workers, samples per second)` for 0, 1, 2, 4 ... workers, up to the cores of this
    machine or until there is far more than `needed` for one GPU."""
    if type(loader) is not ShareLoader:
        return
    for workers in worker_counts(loader):
        rate = rate_of(loader, workers)
        if rate is not None:
            say(workers, rate)
            if rate > ENOUGH * needed and workers >= loader.feeding.num_workers:
                return


def worker_counts(loader: ShareLoader) -> list[int]:
    if loader.gathers and loader.feeding.device.type == "cpu":
        return [0]  # one gather a batch: workers are not used
    cores = len(usable_cores())
    powers = [0, *(2**n for n in range(12) if 2**n <= cores)]
    return sorted({*powers, loader.feeding.num_workers})


def rate_of(loader: ShareLoader, workers: int) -> float | None:
    """Samples per second of host batches, once the first is there; None where there are too few."""
    feeding = replace(
        loader.feeding,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        persistent_workers=False,
    )
    fresh = ShareLoader(loader.dataset, loader.source, feeding)
    samples = batches = 0
    begun = time.perf_counter()
    for number, (share, _) in enumerate(fresh.host_batches()):
        if number < max(1, workers):
            begun = time.perf_counter()  # workers start together: their first ones come at once
            continue
        samples += share.count
        batches += 1
        elapsed = time.perf_counter() - begun
        if elapsed > 5 * SECONDS or (elapsed > SECONDS and batches >= LEAST_BATCHES + workers):
            break
    elapsed = time.perf_counter() - begun
    return samples / elapsed if samples and elapsed > 0 else None
