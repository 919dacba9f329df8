"""Validation: every sample once, counted over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from multi_gpu_training.data.batch import batch_count, share_of, to_device
from multi_gpu_training.training.loss import (
    LossFn,
    SupervisedLoss,
    criterion_weight,
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
) -> MetricsCollector:
    """Collect this rank's part. The model is put back into the mode it was in."""
    collected = MetricsCollector()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                share = share_of(batch)
                count = share.count if share is not None else batch_count(batch)
                if share is None:
                    batch = to_device(batch, device)
                with precision.autocast():
                    if eval_fn is not None:
                        eval_fn(model, batch, collected)
                    else:
                        _add(model, batch, loss_fn, count, collected)
    finally:
        model.train(was_training)
    return collected


def _add(
    model: nn.Module, batch: Any, loss_fn: LossFn, count: int, collected: MetricsCollector
) -> None:
    if not isinstance(loss_fn, SupervisedLoss) or isinstance(batch, dict):
        loss = read_loss(loss_fn(model, batch), torch.device("cpu"))
        weight = count if loss.weight is None else loss.weight
        collected.add_mean(loss.mean, weight, loss.metrics)
        return
    output, target = predict(model, batch)
    criterion = loss_fn.criterion_for(output, target)
    counted = criterion_weight(criterion, output, target)
    collected.add_mean(criterion(output, target), count if counted is None else counted, {})
    if is_classification(output, target):
        collected.add_predictions(output.argmax(1), target, output.shape[1])
