"""Metrics on their way from the device: read without stopping it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.training.metrics import MetricsCollector, Number


class Reading:
    """A list of numbers that is being added up over ranks and copied to the host."""

    def __init__(self, names: list[str], values: Tensor, event: torch.cuda.Event | None) -> None:
        self._names = names
        self._values = values
        self._event = event

    @property
    def is_on_host(self) -> bool:
        """Whether there is nothing to wait for, on any rank."""
        return self._event is None

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> tuple[dict[str, float], float, float | None, bool]:
        """Metrics over all ranks, mean seconds of a rank, gradient norm, and whether a rank had a
        metric that the others do not know of yet. Waits for the device where it must."""
        if self._event is not None:
            self._event.synchronize()
        *pairs, seconds, norm, strangers, ranks = self._values.tolist()
        metrics = {}
        for i, name in enumerate(self._names):
            total, weight = pairs[2 * i], pairs[2 * i + 1]
            if weight:  # a step that was skipped has none
                metrics[name] = total / weight
        return metrics, seconds / ranks, None if math.isnan(norm) else norm / ranks, strangers > 0


class MetricsReader:
    """Starts readings. Ranks agree on the names of metrics once, then only add up numbers."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._names: list[str] | None = None

    def begin(self, metrics: MetricsCollector, seconds: float, norm: Tensor | None) -> Reading:
        """Collective, but waits for no one on a GPU once the names are agreed on."""
        placement = self._placement
        if placement.dp_size == 1:
            names = metrics.names
        else:
            if self._names is None:
                everyone = placement.gather_json(metrics.names)
                self._names = list(dict.fromkeys(name for mine in everyone for name in mine))
            names = self._names
        strangers = float(any(name not in names for name in metrics.names))
        numbers: list[Number] = [part for name in names for part in metrics.pair(name)]
        numbers += [seconds, math.nan if norm is None else norm, strangers, 1.0]
        vector = _vector(numbers, placement.wire)
        placement.sum(vector)
        if vector.device.type != "cuda":
            return Reading(names, vector, None)
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        host.copy_(vector, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Reading(names, host, event)

    def agree_anew(self) -> None:
        """A rank knows a metric that the others do not: list the names at the next reading."""
        self._names = None


def _vector(numbers: list[Number], device: torch.device) -> Tensor:
    """The numbers as one float64 vector on `device`, without waiting for it."""
    plain = torch.tensor(
        [0.0 if isinstance(number, Tensor) else float(number) for number in numbers],
        dtype=torch.float64,
    )
    if device.type == "cuda":
        plain = plain.pin_memory()
    parts = list(plain.to(device, non_blocking=True).unbind())
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            parts[place] = number.detach().double().reshape(()).to(device)
    return torch.stack(parts)
