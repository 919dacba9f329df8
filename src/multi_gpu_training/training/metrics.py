"""Metrics as sums and weights, added over ranks before anything is divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.accelerator import widened
from multi_gpu_training.distributed.placement import Placement

Number = Tensor | float | int


class MetricsCollector:
    """Collects (sum, weight) pairs and confusion matrices on the device, without stalling it.

        metrics.add("loss", mean_loss * count, count)
        metrics.add_predictions(logits.argmax(1), target, classes=10)
        metrics.compute(placement)  ->  {"loss": ..., "accuracy": ..., "f1": ...}

    `compute` is collective: every rank must call it, also one that collected nothing.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, Tensor | float] = {}
        self._confusion: Tensor | None = None

    def add(self, name: str, total: Number, weight: Number) -> None:
        """Add to a metric that is the summed `total` over the summed `weight`."""
        self._sums[name] = _plus(self._sums.get(name), total)
        self._weights[name] = _plus(self._weights.get(name), weight)

    @property
    def names(self) -> list[str]:
        return list(self._sums)

    def pair(self, name: str) -> tuple[Number, Number]:
        """Summed total and weight of this rank; zeros where it has none."""
        return self._sums.get(name, 0.0), self._weights.get(name, 0.0)

    def add_mean(self, mean: Tensor, weight: Number, pairs: Mapping[str, Any]) -> None:
        """Add a mean loss that stands for `weight`, and (sum, weight) pairs beside it."""
        before, mean = self._sums.get("loss"), mean.detach()
        if isinstance(weight, Tensor):
            # A mean over nothing is NaN, and so is 0 x NaN.
            weight = weight.to(mean.device)
            self.add("loss", torch.where(weight > 0, widened(mean) * weight, 0.0), weight)
        elif isinstance(before, Tensor) and weight:
            self._sums["loss"] = torch.add(before, mean, alpha=weight)
            self._weights["loss"] = _plus(self._weights.get("loss"), weight)
        elif weight:
            self.add("loss", widened(mean) * weight, weight)
        for name, (total, share) in pairs.items():
            self.add(name, total, share)

    def add_predictions(self, predicted: Tensor, target: Tensor, classes: int) -> None:
        """Add whole-number predictions; gives `accuracy` and macro `f1`. Targets below 0 are
        labels to ignore."""
        target = target.flatten().long()
        pairs = target * classes + predicted.flatten().long()
        pairs = torch.where(target >= 0, pairs, classes**2)
        counts = torch.bincount(pairs, minlength=classes**2 + 1)[:-1].view(classes, classes)
        self._confusion = counts if self._confusion is None else self._confusion + counts

    def compute(self, placement: Placement | None = None) -> dict[str, float]:
        """The metrics over all ranks."""
        placement = placement or Placement()
        mine: dict[str, Any] = {
            name: [float(self._sums[name]), float(self._weights[name])] for name in self._sums
        }
        classes = 0 if self._confusion is None else len(self._confusion)
        everyone = placement.gather_json([mine, classes])
        result = {}
        for name in dict.fromkeys(name for pairs, _ in everyone for name in pairs):
            found = [pairs[name] for pairs, _ in everyone if name in pairs]
            weight = math.fsum(w for _, w in found)
            result[name] = math.fsum(s for s, _ in found) / weight if weight else math.nan
        matrix = self.confusion_matrix(placement, max(count for _, count in everyone))
        if matrix is not None:
            result.update(classification_scores(matrix))
        return result

    def confusion_matrix(self, placement: Placement, classes: int) -> Tensor | None:
        """Row: true class; column: predicted. Collective."""
        if classes == 0:
            return None
        matrix = self._confusion
        if matrix is None:
            matrix = torch.zeros(classes, classes, dtype=torch.int64)
        device = placement.device if placement.backend == "nccl" else torch.device("cpu")
        return placement.sum(matrix.to(device).clone()).cpu()

    def merge(self, other: MetricsCollector) -> None:
        """Add what another collector has."""
        for name in other._sums:
            self.add(name, other._sums[name], other._weights[name])
        if other._confusion is not None:
            mine = self._confusion
            self._confusion = other._confusion if mine is None else mine + other._confusion

    def kept(self) -> dict[str, Any]:
        """What is collected now, to be put back later; nothing is read from the device."""
        return {
            "sums": dict(self._sums),
            "weights": dict(self._weights),
            "confusion": self._confusion,
        }

    def put_back(self, kept: dict[str, Any]) -> None:
        self._sums, self._weights = dict(kept["sums"]), dict(kept["weights"])
        self._confusion = kept["confusion"]

    def state_dict(self) -> dict[str, Any]:
        return {
            "pairs": {
                name: [float(self._sums[name]), float(self._weights[name])] for name in self._sums
            },
            "confusion": self._confusion,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        for name, (total, weight) in state["pairs"].items():
            self.add(name, total, weight)
        self._confusion = state["confusion"]

    def reset(self) -> None:
        self._sums.clear()
        self._weights.clear()
        self._confusion = None


def classification_scores(matrix: Tensor) -> dict[str, float]:
    """Accuracy and macro F1 (mean over the classes that occur) of a confusion matrix."""
    counts = widened(matrix)
    hits = counts.diagonal()
    support, predicted = counts.sum(1), counts.sum(0)
    occurs = (support + predicted) > 0
    f1 = 2 * hits / (support + predicted).clamp(min=1)
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        "f1": float(f1[occurs].mean()),
    }


def _plus(before: Tensor | float | None, value: Number) -> Tensor | float:
    """Sums are of type double; a number of another type is made one by the addition itself, which
    saves an operation in every step."""
    if isinstance(value, Tensor):
        value = value.detach()
        value = value if isinstance(before, Tensor) else widened(value)
    return value if before is None else before + value


class EpochSums:
    """The running sums of an unfinished epoch, so that its mean is right after a resume."""

    def __init__(self, epoch: MetricsCollector, interval: MetricsCollector) -> None:
        self.epoch = epoch
        self.interval = interval

    def state_dict(self) -> dict[str, Any]:
        whole = MetricsCollector()
        whole.merge(self.epoch)
        whole.merge(self.interval)
        return whole.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch.load_state_dict(state)

    def load_shares(self, states: list[dict[str, Any]]) -> None:
        """The sums are those of `states`, of ranks that are no longer there; what was collected
        before, also by going back to the same checkpoint, is dropped."""
        self.epoch.reset()
        for state in states:
            part = MetricsCollector()
            part.load_state_dict(state)
            self.epoch.merge(part)
