"""Validation: every sample once, counted over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.data.batch import share_of, to_device
from multi_gpu_training.data.sample_count import BatchSizeFn, sample_count
from multi_gpu_training.training.loss import (
    LossFn,
    Pairs,
    SupervisedLoss,
    criterion_weight,
    ignored_label,
    is_classification,
    predict,
    read_loss,
)
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.precision import Precision

# Adds what one batch says to the metrics: eval_fn(model, batch, metrics).
EvalFn = Callable[[nn.Module, Any, MetricsCollector], None]


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    eval_fn: EvalFn | None,
    precision: Precision,
    device: torch.device,
    batch_size_fn: BatchSizeFn | None = None,
) -> MetricsCollector:
    """Collect this rank's part. Every module is put back into the mode it was in."""
    collected = MetricsCollector()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                share = share_of(batch)
                if share is None:
                    batch = to_device(batch, device)
                with precision.autocast():
                    if eval_fn is not None:
                        eval_fn(model, batch, collected)
                        continue
                    mean, weight, pairs = _measure(model, batch, loss_fn, collected)
                if weight is None:  # counted only where it matters: shapes may not say it
                    count = sample_count(batch, batch_size_fn) if share is None else share.count
                    collected.add_mean(mean, count, pairs)
                    continue
                # A batch in which nothing counts has a mean of 0/0, and 0 x NaN is NaN.
                counts = (weight > 0).to(mean.device)
                mean = torch.where(counts, mean, torch.zeros_like(mean))
                collected.add_mean(mean, weight, pairs)
    finally:
        for module, training in modes:
            module.training = training
    return collected


def _measure(
    model: nn.Module, batch: Any, loss_fn: LossFn, collected: MetricsCollector
) -> tuple[Tensor, Tensor | None, Pairs]:
    """Mean loss of a batch, its weight where that is not the sample count, and metrics."""
    if not isinstance(loss_fn, SupervisedLoss) or isinstance(batch, Mapping):
        loss = read_loss(loss_fn(model, batch), torch.device("cpu"))
        return loss.mean, loss.weight, loss.metrics
    output, target = predict(model, batch)
    criterion = loss_fn.criterion_for(output, target)
    mean = criterion(output, target)
    if is_classification(output, target):
        valid = target != ignored_label(criterion)
        collected.add_predictions(output.argmax(1)[valid], target[valid], output.shape[1])
    return mean, criterion_weight(criterion, output, target), {}
