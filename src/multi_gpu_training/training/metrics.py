"""Metrics as sums and weights, added over ranks before anything is divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.accelerator import widened
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.training.metric_states import compute_over_ranks, is_metric

Number = Tensor | float | int


class MetricsCollector:
    """Collects (sum, weight) pairs and confusion matrices on the device without waiting for it.

        metrics.add("loss", mean_loss * count, count)
        metrics.add_predictions(logits.argmax(1), target, classes=10)
        metrics.update("auroc", torchmetrics_object, logits, target)
        metrics.compute(placement)  ->  {"loss": ..., "accuracy": ..., "f1": ..., "auroc": ...}

    `compute` is collective: every rank must call it, even one that collected nothing.
    f1_average: the kind of `f1`, see `classification_scores`.
    """

    def __init__(self, f1_average: str = "macro") -> None:
        if f1_average not in ("macro", "micro", "binary"):
            raise ConfigError(f"f1_average={f1_average!r}: use macro, micro or binary")
        self._f1_average = f1_average
        self._objects: dict[str, Any] = {}  # torchmetrics objects
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, Tensor | float] = {}
        self._confusion: Tensor | None = None

    def add(self, name: str, total: Number, weight: Number) -> None:
        """Add to a metric defined as the summed `total` divided by the summed `weight`."""
        for given in (total, weight):
            if given.numel() != 1 if isinstance(given, Tensor) else not hasattr(given, "__float__"):
                raise _not_a_number(name, given)
        self._sums[name] = _plus(self._sums.get(name), total)
        self._weights[name] = _plus(self._weights.get(name), weight)

    @property
    def names(self) -> list[str]:
        return list(self._sums)

    def pair(self, name: str) -> tuple[Number, Number]:
        """Summed total and weight on this rank; zeros if it has none."""
        return self._sums.get(name, 0.0), self._weights.get(name, 0.0)

    def add_mean(self, mean: Tensor, weight: Number, pairs: Mapping[str, Any]) -> None:
        """Add a mean loss with its `weight`, and further (sum, weight) pairs."""
        before, mean = self._sums.get("loss"), mean.detach()
        if isinstance(weight, Tensor):
            # A mean over nothing is NaN, and so is 0 x NaN.
            weight = weight.to(mean.device)
            self.add("loss", torch.where(weight != 0, widened(mean) * weight, 0.0), weight)
        elif isinstance(before, Tensor) and weight:
            self._sums["loss"] = torch.add(before, mean, alpha=weight)
            self._weights["loss"] = _plus(self._weights.get("loss"), weight)
        elif weight:
            self.add("loss", widened(mean) * weight, weight)
        for name, (total, share) in pairs.items():
            self.add(name, total, share)

    def add_predictions(self, predicted: Tensor, target: Tensor, classes: int) -> None:
        """Add integer predictions, for `accuracy` and macro `f1`. Targets below 0 are
        ignored."""
        if predicted.numel() != target.numel():
            raise ConfigError(
                f"add_predictions got predictions of shape {tuple(predicted.shape)} for targets of "
                f"shape {tuple(target.shape)}; give one class per target: logits.argmax(1)"
            )
        target, predicted = target.flatten().long(), predicted.flatten().long()
        pairs = torch.where(target >= 0, target * classes + predicted, classes**2)
        strange = (target >= classes) | ((target >= 0) & ((predicted < 0) | (predicted >= classes)))
        pairs = torch.where(strange, classes**2 + 1, pairs)
        counts = torch.bincount(pairs, minlength=classes**2 + 2)
        if counts[-1]:  # otherwise they would count as other classes
            raise ConfigError(
                f"add_predictions got {int(counts[-1])} samples whose class is not among 0 to "
                f"{classes - 1}; give classes={int(max(target.max(), predicted.max())) + 1}, or "
                "correct predictions and targets (below 0: ignored)"
            )
        counts = counts[:-2].view(classes, classes)
        self._confusion = counts if self._confusion is None else self._confusion + counts

    def update(self, name: str, metric: Any, *values: Any, **named: Any) -> None:
        """Update a torchmetrics Metric or MetricCollection with this rank's samples.

        `compute` combines the states of all ranks. The metric is reset when it is first updated in
        a validation, and after it.
        """
        known = self._objects.get(name)
        if known is None:
            if not is_metric(metric):
                raise ConfigError(
                    f"metrics.update({name!r}, ...) takes a torchmetrics Metric, and got "
                    f"{type(metric).__name__}; for numbers use metrics.add(name, total, weight)"
                )
            if any(metric is other for other in self._objects.values()):
                raise ConfigError(
                    f"metrics.update({name!r}, ...) got an object that another name updates as "
                    "well; give each name its own: metric.clone()"
                )
            tensors = [value for value in (*values, *named.values()) if isinstance(value, Tensor)]
            if tensors:
                metric.to(tensors[0].device)
            metric.reset()  # it may hold what the user tried out before the training
            self._objects[name] = metric
        elif known is not metric:
            raise ConfigError(
                f"metrics.update({name!r}, ...) got another object than before; make the metric "
                "once, outside eval_fn"
            )
        metric.update(*values, **named)

    def compute(self, placement: Placement | None = None) -> dict[str, float]:
        """The metrics over all ranks."""
        placement = placement or Placement()
        mine: dict[str, Any] = {
            name: [float(self._sums[name]), float(self._weights[name])] for name in self._sums
        }
        # Names and classes are gathered too: a rank may have seen no sample, or no metric of some
        # name.
        classes = 0 if self._confusion is None else len(self._confusion)
        everyone = placement.gather_json([mine, classes, bool(self._objects)])
        result = {}
        for name in dict.fromkeys(name for pairs, *_ in everyone for name in pairs):
            found = [pairs[name] for pairs, *_ in everyone if name in pairs]
            weight = math.fsum(w for _, w in found)
            # fsum rounds once, so the order of the ranks does not matter.
            result[name] = math.fsum(s for s, _ in found) / weight if weight else math.nan
        matrix = self.confusion_matrix(placement, max(count for _, count, _ in everyone))
        if matrix is not None:
            result.update(classification_scores(matrix, self._f1_average))
        if any(objects for *_, objects in everyone):
            result.update(compute_over_ranks(self._objects, placement))
        return result

    def confusion_matrix(self, placement: Placement, classes: int) -> Tensor | None:
        """Row: true class; column: predicted. Collective."""
        if classes == 0:
            return None
        matrix = self._confusion
        if matrix is None:
            matrix = torch.zeros(classes, classes, dtype=torch.int64)  # this rank had no sample
        device = placement.device if placement.backend == "nccl" else torch.device("cpu")
        return placement.sum(matrix.to(device).clone()).cpu()

    def merge(self, other: MetricsCollector) -> None:
        """Add the contents of another collector."""
        for name in other._sums:
            self.add(name, other._sums[name], other._weights[name])
        if other._confusion is not None:
            mine = self._confusion
            self._confusion = other._confusion if mine is None else mine + other._confusion

    def kept(self) -> dict[str, Any]:
        """A copy of the current contents, to be restored later; reads nothing from the device."""
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
        self._objects.clear()


def classification_scores(matrix: Tensor, f1_average: str = "macro") -> dict[str, float]:
    """Accuracy and F1 of a confusion matrix.

    f1_average: "macro" is the mean over the classes that occur, "micro" counts all samples
    equally, "binary" is the F1 of class 1 out of two.
    """
    counts = widened(matrix)
    hits = counts.diagonal()
    support, predicted = counts.sum(1), counts.sum(0)
    occurs = (support + predicted) > 0
    f1 = 2 * hits / (support + predicted).clamp(min=1)
    if f1_average == "binary" and len(counts) != 2:
        raise ConfigError(
            f"f1_average=binary is for 2 classes, and the model has {len(counts)}; use macro or "
            "micro"
        )
    averages = {
        "macro": lambda: f1[occurs].mean(),
        "micro": lambda: 2 * hits.sum() / (support + predicted).sum(),
        "binary": lambda: f1[1],
    }
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        "f1": float(averages[f1_average]()),
    }


def _not_a_number(name: str, value: Any) -> ConfigError:
    if isinstance(value, Tensor):
        found = f"a tensor of shape {tuple(value.shape)}"
    else:
        found = f"{type(value).__name__} {value!r:.60}"
    return ConfigError(
        f"metric {name!r} is {found}, not a number; add a sum and its weight as numbers or tensors "
        "of one element: metrics.add(name, total, weight)"
    )


def _plus(before: Tensor | float | None, value: Number) -> Tensor | float:
    """Add to a sum in double precision; the addition itself converts other types, which saves an
    operation in every step."""
    if isinstance(value, Tensor):
        value = value.detach()
        value = value if isinstance(before, Tensor) else widened(value)
    return value if before is None else before + value


class EpochSums:
    """The running sums of an unfinished epoch, so its mean is right after a resume."""

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
        """Replace the sums by `states`, which came from ranks that no longer exist; whatever was
        collected before is dropped."""
        self.epoch.reset()
        for state in states:
            part = MetricsCollector()
            part.load_state_dict(state)
            self.epoch.merge(part)
