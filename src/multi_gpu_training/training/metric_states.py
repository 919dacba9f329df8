"""torchmetrics objects in validation: combine their states over ranks, each sample counted once.

Each rank updates its own copy with its own samples. Then all states are exchanged, and one rank
computes the metric from them. torchmetrics' own synchronisation is not used: it bypasses the
run's process group, and counts a state's default once per rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.data.batch import to_device
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.state_dicts import from_bytes, to_bytes
from multi_gpu_training.torch_internals import metric_reductions

# The states of each metric, by its path inside wrapping metrics.
States = dict[str, dict[str, Any]]


def is_metric(value: Any) -> bool:
    """Whether this is a torchmetrics Metric or MetricCollection, without importing torchmetrics."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, (library.Metric, library.MetricCollection))


def refuse_inexact(name: str, metric: Any) -> None:
    """Refuse a metric that cannot be combined exactly over ranks with uneven sample counts."""
    for part in _parts(metric).values():
        kind = type(part).__name__
        means = [state for state, how in metric_reductions(part).items() if _kind(how) == "mean"]
        if means:
            raise ConfigError(
                f"metric {name!r}: {kind} averages its state {means[0]!r} over ranks, which is not "
                "exact where they have different numbers of samples; use a metric that keeps sums "
                "and counts, or metrics.add(name, total, weight)"
            )


def compute_over_ranks(metrics: Mapping[str, Any], placement: Placement) -> dict[str, float]:
    """The metrics' values over the samples of all ranks. Collective. A rank with an empty share has
    no metrics and gets the others' result."""
    mine = {name: _states(metric) for name, metric in _members(metrics).items()}
    everyone = [from_bytes(raw) for raw in placement.gather_bytes(to_bytes(mine))]
    found: dict[str, float] = {}
    problem = None
    try:
        for name, metric in _members(metrics).items():
            owners = [rank for rank, theirs in enumerate(everyone) if name in theirs]
            if len(owners) > 1:
                refuse_inexact(name, metric)
            if owners[0] == placement.dp_rank:
                found |= _numbers(name, _computed(metric, [everyone[r][name] for r in owners]))
    except Exception as error:  # the other ranks wait: tell them before the error ends this one
        problem = (
            f"{error}" if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        )
    answers = placement.gather_json([found, problem])
    problems = [text for _, text in answers if text is not None]
    if problems:
        raise ConfigError(problems[0])
    for metric in metrics.values():
        metric.reset()  # a state may hold the predictions of a whole set
    return {name: value for numbers, _ in answers for name, value in numbers.items()}


def _members(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The single metrics, including those inside collections, by their logged name."""
    members: dict[str, Any] = {}
    for name, metric in metrics.items():
        if hasattr(metric, "compute_groups"):  # a collection, whose members may share states
            members |= {f"{name}/{key}" if name else key: part for key, part in metric.items()}
        else:
            members[name] = metric
    return members


def _parts(metric: nn.Module) -> dict[str, Any]:
    """The metric and those inside it, by path."""
    return {path: part for path, part in metric.named_modules() if hasattr(part, "dist_sync_fn")}


def _states(metric: nn.Module) -> States:
    return {path: dict(part.metric_state) for path, part in _parts(metric).items()}


def _computed(metric: Any, ranks: list[States]) -> Any:
    """Compute a copy of the metric from the states of all ranks."""
    total, fresh = metric.clone(), metric.clone()
    fresh.reset()
    defaults = _states(fresh)
    for path, part in _parts(total).items():
        for state, reduction in metric_reductions(part).items():
            values = [rank[path][state] for rank in ranks]
            combined = _combined(values, defaults[path][state], reduction)
            setattr(part, state, to_device(combined, part.device))
        part.distributed_available_fn = _no  # the states already cover all ranks
    return total.compute()


def _combined(values: list[Any], default: Any, reduction: Callable[[Tensor], Tensor] | None) -> Any:
    """Combine one state over all ranks that have samples, into what one process would hold."""
    kind = _kind(reduction)
    if isinstance(default, list):
        return [entry for value in values for entry in value]
    if kind == "sum":
        # A sum that starts at a number other than 0 counts it once, not once per rank.
        default = default.cpu()
        return values[0] + sum((value - default for value in values[1:]), torch.zeros_like(default))
    if len(values) == 1:
        return values[0]
    if kind in ("max", "min"):
        stacked = torch.stack(values)
        return stacked.amax(0) if kind == "max" else stacked.amin(0)
    if kind == "cat":
        return torch.cat(values)
    return torch.stack(values) if reduction is None else reduction(torch.stack(values))


def _kind(reduction: Any) -> str:
    return getattr(reduction, "__name__", "").removeprefix("dim_zero_")


def _no() -> bool:
    return False


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The computed values as named numbers."""
    if isinstance(value, Mapping):
        return {
            k: v for key, part in value.items() for k, v in _numbers(f"{name}/{key}", part).items()
        }
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: float(value)}
    if isinstance(value, (int, float)):
        return {name: float(value)}
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ConfigError(
        f"metric {name!r} computes {found:.80}, not a number; choose an average over classes "
        "(average='macro'), or wrap it in torchmetrics.ClasswiseWrapper"
    )
