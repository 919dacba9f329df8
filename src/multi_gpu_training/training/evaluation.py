"""Validation: every sample once, counted over all ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.data.batch import share_of, tensors_of, to_device
from multi_gpu_training.data.sample_count import BatchSizeFn, sample_count
from multi_gpu_training.distributed.batchnorm import Attendance, exchanges_in_evaluation
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.training.averaged_weights import AveragedWeights
from multi_gpu_training.training.loss import (
    Loss,
    LossFn,
    SupervisedLoss,
    is_classification,
    predict,
    read_loss,
    rows_of,
    takes,
)
from multi_gpu_training.training.loss_weights import ignored_label
from multi_gpu_training.training.metric_states import is_metric, refuse_inexact
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.precision import Precision
from multi_gpu_training.training.prediction import PredictFn, call_model, gather_outputs
from multi_gpu_training.training.step_state import StepState

# Adds one batch to the metrics: eval_fn(model, batch, metrics).
EvalFn = Callable[[nn.Module, Any, MetricsCollector], None]


class MetricObjects(dict[str, Any]):
    """torchmetrics objects by name, in place of an eval_fn. Each is updated with the model's
    output and the target, in addition to the default metrics."""


def choose_eval_fn(given: Any, ranks: int) -> EvalFn | MetricObjects | None:
    """Accept `eval_fn` as a function, a torchmetrics object, or several of those by name."""
    named = {"": given} if is_metric(given) else given
    if isinstance(named, Mapping) and named and all(map(is_metric, named.values())):
        for name, metric in named.items() if ranks > 1 else ():
            refuse_inexact(name or type(metric).__name__, metric)
        # A single metric is named after its class; a collection names its own members.
        return MetricObjects({name or _own_name(metric): metric for name, metric in named.items()})
    wanted = (
        "give a function eval_fn(model, batch, metrics), a torchmetrics Metric or "
        "MetricCollection, or a dict of them"
    )
    if given is not None and not callable(given):
        raise ConfigError(f"eval_fn is a {type(given).__name__}; {wanted}")
    if isinstance(given, type):
        raise ConfigError(f"eval_fn is the class {given.__name__} itself; {wanted}")
    if given is not None and not takes(given, 3):
        raise ConfigError(
            f"eval_fn is called as eval_fn(model, batch, metrics), and takes "
            f"{inspect.signature(given)}; {wanted}"
        )
    return given  # type: ignore[no-any-return]


def _own_name(metric: Any) -> str:
    return "" if hasattr(metric, "compute_groups") else type(metric).__name__.lower()


def named_sets(data: Any) -> dict[str, Any]:
    """Validation sets by name; a single set has no name."""
    return dict(data) if isinstance(data, Mapping) else {"": data}


def prefixed(name: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics under the names they have when there are several sets."""
    return {f"{name}/{key}": value for key, value in metrics.items()} if name else metrics


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients. Every module is then put back into its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Any, bool]],
    loss_fn: LossFn,
    eval_fn: EvalFn | MetricObjects | None,
    precision: Precision,
    device: torch.device,
    batch_size_fn: BatchSizeFn | None = None,
    f1_average: str = "macro",
    call: Callable[[Callable[[], Any]], Any] = lambda function: function(),
) -> MetricsCollector:
    """Collect this rank's part. A batch that does not count only keeps the model running in step
    with the other ranks; `call` is what runs it."""
    collected, nowhere = MetricsCollector(f1_average), MetricsCollector(f1_average)
    with evaluation_mode(model):
        for batch, counts in batches:
            share = share_of(batch)
            if share is None:
                batch = to_device(batch, device)
            into = collected if counts else nowhere
            with precision.autocast():
                if eval_fn is not None and not isinstance(eval_fn, MetricObjects):
                    eval_fn(model, batch, into)
                    continue
                objects = eval_fn if eval_fn is not None and counts else {}
                loss = call(partial(_measure, model, batch, loss_fn, objects, into))
            if not counts:
                continue
            mean, weight, pairs = loss.mean, loss.weight, loss.metrics
            if weight is None:  # counted only where it matters: shapes may not tell
                count = loss.rows
                if count is None:
                    count = sample_count(batch, batch_size_fn) if share is None else share.count
                collected.add_mean(mean, count, pairs)
                continue
            # A batch in which nothing counts has a mean of 0/0, and 0 x NaN is NaN.
            counts = (weight != 0).to(mean.device)
            mean = torch.where(counts, mean, torch.zeros_like(mean))
            collected.add_mean(mean, weight, pairs)
    return collected


def _in_step(
    batches: Iterator[Any], placement: Placement, attendance: Attendance, exchanges: bool
) -> Iterator[tuple[Any, bool]]:
    """As many batches as the rank with the most has. Those beyond this rank's own do not count.
    Each rank must have at least one. exchanges: ranks talk in the forward, about one batch."""
    nothing, batch = object(), None
    try:
        while True:
            found = next(batches, nothing)
            counts = attendance.present = found is not nothing
            batch = found if counts else batch  # the other ranks wait in the forward of theirs
            if placement.all_agree(not counts):
                return
            if exchanges:
                _check_same_batch(batch, counts, placement)
            yield batch, counts
    finally:
        attendance.present = True


def _check_same_batch(batch: Any, counts: bool, placement: Placement) -> None:
    """Raise where ranks have come to parts of different batches. Collective."""
    share = next((s for s in map(share_of, (batch, *tensors_of(batch))) if s is not None), None)
    place = -1 if share is None else share.position
    first = placement.all_min(place if counts else sys.maxsize)
    last = -placement.all_min(-place if counts else 1)
    if first != last or first < 0:
        raise _apart("some rank has no sample of a batch before the last")


def _apart(why: str) -> ModelError:
    return ModelError(
        "a BatchNorm without running statistics (track_running_stats=False) normalises each "
        f"validation batch over all ranks (sync_bn), but {why}; use batches with at least as many "
        "samples as ranks, keep running statistics, or set sync_bn=false",
        code="MGT403",
    )


def _measure(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    objects: Mapping[str, Any],
    collected: MetricsCollector,
) -> Loss:
    """Mean loss of a batch, its weight if that is not the sample count, and metrics."""
    if not isinstance(loss_fn, SupervisedLoss) or isinstance(batch, Mapping):
        loss = read_loss(loss_fn(model, batch), torch.device("cpu"))
        if objects:
            _update(objects, *_predicted(model, batch), collected)
        return loss
    output, target = predict(model, batch)
    criterion = loss_fn.criterion_for(output, target)
    mean = criterion(output, target)
    if is_classification(output, target) and not loss_fn.learns:
        valid = target != ignored_label(criterion)
        collected.add_predictions(output.argmax(1)[valid], target[valid], output.shape[1])
    _update(objects, output, target, collected)
    if isinstance(mean, tuple):  # the user's own, which says what it divided by
        return read_loss(mean, mean[0].device)
    return Loss(mean, loss_fn.weight_of(output, target), {}, rows_of(output, target))


def _update(
    objects: Mapping[str, Any], output: Tensor, target: Tensor, collected: MetricsCollector
) -> None:
    for name, metric in objects.items():
        collected.update(name, metric, output, target)


def _predicted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Compute output and target separately from a loss_fn, which does not expose its own."""
    if isinstance(batch, Mapping):
        raise ModelError(
            f"eval_fn is a torchmetrics object, and a batch has keys {sorted(batch)}: which of "
            "them it is to be updated with is not known. Give eval_fn(model, batch, metrics), and "
            "call metrics.update(name, metric, predictions, target) in it"
        )
    return predict(model, batch)


@dataclass
class Evaluator:
    """Evaluates and predicts on all ranks, with the averaged weights if there are any.

    verify: finds recorded steps that were wrong, before anyone uses their weights.
    evaluated: what the latest evaluation collected.
    """

    state: StepState
    verify: Callable[[], None]
    averaged: AveragedWeights
    loss_fn: LossFn
    eval_fn: EvalFn | MetricObjects | None
    evaluated: MetricsCollector = field(default_factory=MetricsCollector)

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Metrics over all ranks on any batches, or on several named sets of them. Records
        nothing."""
        metrics: dict[str, float] = {}
        for name, batches in named_sets(data).items():
            metrics |= prefixed(name, self.metrics_of(batches))
        return metrics

    def metrics_of(self, batches: Iterable[Any]) -> dict[str, float]:
        """The same, on one set."""
        state, placement = self.state, self.state.placement
        # torchmetrics objects next to the user's own loss need an extra forward.
        by_itself = isinstance(self.loss_fn, SupervisedLoss) and not callable(self.eval_fn)
        own_code = self.eval_fn is not None and not by_itself
        with self._judged(batches, own_code) as (model, together, call):
            self.evaluated = evaluate(
                model,
                together,
                self.loss_fn,
                self.eval_fn,
                state.precision,
                placement.device,
                state.batch_size_fn,
                state.config.f1_average,
                call,
            )
            return self.evaluated.compute(placement)

    def predict(self, batches: Iterable[Any], predict_fn: PredictFn) -> Any:
        """Outputs for the samples of all ranks, in the order of the data, on every rank."""
        state = self.state

        def pairs(model: nn.Module, together: Any, call: Any) -> Iterator[tuple[Any, Any]]:
            for batch, counts in together:
                with state.precision.autocast():
                    outputs = call(partial(predict_fn, model, batch))
                if counts:
                    yield batch, outputs

        own_code = predict_fn is not call_model
        with self._judged(batches, own_code) as judged, evaluation_mode(judged[0]):
            return gather_outputs(pairs(*judged), state.placement)

    @contextmanager
    def ready_model(self) -> Iterator[nn.Module]:
        """The model as it is evaluated: recorded steps are verified, ranks have the same buffers,
        and averaged weights are in place if there are any. Collective."""
        self.verify()
        self.state.strategy.sync_buffers()
        with self.averaged.applied(), self.state.strategy.gathered():
            yield self.state.model

    @contextmanager
    def _judged(self, batches: Iterable[Any], own_code: bool) -> Iterator[tuple[Any, Any, Any]]:
        """The model, its batches with whether each counts, and the function that calls the model.

        Ranks that cannot compute alone must take the same number of batches: a rank that runs
        out repeats its last one. The user's own code may call the model as often as it likes, so
        it gets the whole model.
        """
        placement, strategy = self.state.placement, self.state.strategy
        found, nothing = iter(self._as_computed(batches)), object()
        exchanges = placement.dp_size > 1 and exchanges_in_evaluation(self.state.model)
        if exchanges and own_code and not strategy.computes_alone:
            raise _apart("your own code runs on whole copies of a sharded model")
        alone = (strategy.computes_alone or own_code) and not exchanges
        first = nothing if alone else next(found, nothing)
        if not alone and not placement.all_agree(first is not nothing):
            if exchanges:
                raise _apart("some rank has no sample at all")
            alone = True  # a rank has no batch at all to run the model on
        if first is not nothing:
            found = chain([first], found)
        if alone:
            with self.ready_model() as model:
                yield model, ((batch, True) for batch in found), lambda function: function()
            return
        self.verify()
        strategy.sync_buffers()
        with self.averaged.applied(), strategy.in_step() as call:
            together = _in_step(found, placement, self.state.attendance, exchanges)
            yield self.state.model, together, call

    def _as_computed(self, batches: Iterable[Any]) -> Iterable[Any]:
        transform = self.state.transform
        return batches if transform is None else map(transform, batches)
