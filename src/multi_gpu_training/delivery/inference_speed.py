"""Latency and throughput of models on this machine, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multi_gpu_training.recipes.pipeline import device_of

ROUNDS = 7
ROUND_S = 0.15


@dataclass(frozen=True)
class Speed:
    """Seconds for one sample, and samples per second in batches of `batch`."""

    latency_s: float = 0.0
    samples_per_s: float = 0.0
    batch: int = 0


def measure_together(programs: Sequence[nn.Module], batch: tuple[Tensor, ...]) -> list[Speed]:
    """Speeds of models that take the same tensors. They take turns, so that whatever else runs on
    the machine slows down all of them alike; the median of the rounds counts."""
    one = tuple(part[:1] for part in batch)
    alone = _medians(programs, one)
    together = _medians(programs, batch)
    size = len(batch[0])
    return [Speed(a, size / b, size) for a, b in zip(alone, together, strict=True)]


def _medians(programs: Sequence[nn.Module], tensors: tuple[Tensor, ...]) -> list[float]:
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(ROUNDS):
        for program, found in zip(programs, seconds, strict=True):
            found.append(_mean_s(program, tensors))
    return [statistics.median(found) for found in seconds]


@torch.no_grad()
def _mean_s(program: nn.Module, tensors: tuple[Tensor, ...]) -> float:
    """Mean seconds of a call, over calls for ROUND_S."""
    device = device_of(program)
    placed = tuple(part.to(device) for part in tensors)
    program(*placed)  # the first call may prepare something
    _wait(device)
    began, calls = time.perf_counter(), 0
    while True:
        program(*placed)
        calls += 1
        _wait(device)
        spent = time.perf_counter() - began
        if spent > ROUND_S:
            return spent / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
