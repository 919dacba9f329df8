"""What a loss function may return, and the default losses.

A loss function is `loss_fn(model, batch)` and returns one of

    loss                          the mean over the samples of the batch
    (mean_loss, weight)           where samples do not count equally: the sum of their weights
    (mean_loss, weight, metrics)  plus training metrics, as {name: (sum, weight)}

`weight` is what the mean was divided by: valid tokens, summed class weights, frames.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training.accelerator import wide_float
from multi_gpu_training.errors import ModelError
from multi_gpu_training.torch_internals import CriterionBase, version
from multi_gpu_training.training.criterion_divisor import (
    Divisor,
    adds_up_on,
    find_divisor,
    is_torchs_own,
)
from multi_gpu_training.training.loss_weights import (
    check_own_loss,
    entry_of,
    has_class_weights,
    ignored_label,
    own_loss_weight,
    shifts_labels,
)

LossFn = Callable[[nn.Module, Any], Any]
Pairs = Mapping[str, tuple[Tensor | float, Tensor | float]]


@dataclass(frozen=True)
class Loss:
    mean: Tensor
    weight: Tensor | None = None  # None: the sample count, which the loader knows in advance
    metrics: Pairs = field(default_factory=dict)
    rows: int | None = None  # what a mean over samples was taken of, where that is known

    def weight_beside(self, count: int) -> Tensor | None:
        """The weight, where it is not the number of samples that the loader counted: a collate_fn
        may leave samples out, or make several rows of one."""
        if self.weight is not None or self.rows is None or self.rows == count:
            return self.weight
        kind = wide_float(self.mean.device)
        return torch.full((), float(self.rows), dtype=kind, device=self.mean.device)


def read_loss(result: Any, device: torch.device) -> Loss:
    """Normalise what a loss function returned; raise for anything it must not return."""
    if isinstance(result, Loss):
        return result
    weight: Tensor | None = None
    metrics: Pairs = {}
    mean = result
    if isinstance(result, tuple):
        mean = result[0]
        if len(result) not in (2, 3):
            raise ModelError(
                f"loss_fn returned a tuple of {len(result)}; return loss, (mean_loss, weight) or "
                "(mean_loss, weight, metrics)",
                code="MGT401",
            )
        if result[1] is not None:
            weight = _read_weight(result[1], device)
        metrics = _checked_pairs(result[2]) if len(result) == 3 else {}
    if not isinstance(mean, Tensor):
        raise ModelError(
            f"loss_fn returned {type(mean).__name__}; return a scalar tensor with a gradient",
            code="MGT401",
        )
    if mean.numel() != 1:
        raise ModelError(
            f"loss_fn returned a loss of shape {tuple(mean.shape)}; return a scalar: the mean "
            "over the samples (reduction='mean')",
            code="MGT401",
        )
    if torch.is_grad_enabled() and not mean.requires_grad:
        raise ModelError(
            "the loss has no gradient; compute it from the model's output without .detach(), "
            ".item() or torch.no_grad()",
            code="MGT401",
        )
    return Loss(mean.reshape(()), weight, metrics)


def _checked_pairs(metrics: Any) -> Pairs:
    """The metrics returned with a loss. `MetricsCollector.add` checks that they are numbers."""
    wanted = "return (mean_loss, weight, {name: (sum, weight)})"
    if not isinstance(metrics, Mapping):
        raise ModelError(
            f"loss_fn returned {type(metrics).__name__} as its metrics; {wanted}", code="MGT401"
        )
    for name, pair in metrics.items():
        if not isinstance(name, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ModelError(
                f"loss_fn returned the metric {name!r}: {pair!r:.80}, which is not a sum and its "
                f"weight under a name; {wanted}",
                code="MGT401",
            )
        if name == "loss":
            raise ModelError(
                "loss_fn returned a metric called 'loss', which is the mean of its first result; "
                "give the metric another name",
                code="MGT401",
            )
    return metrics


def _read_weight(given: Any, device: torch.device) -> Tensor:
    """What the mean was divided by: one number that must not depend on trained weights."""
    kind = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else ""
    if isinstance(given, Tensor) and given.requires_grad and torch.is_grad_enabled():
        raise ModelError(
            "loss_fn returned (mean_loss, weight), and the weight has a gradient: a mean divided "
            "by something that is trained does not add up from the parts of ranks and "
            "micro-batches. Divide by a constant: compute the weight under torch.no_grad(), or "
            "from .detach()ed values, also where the mean uses it",
            code="MGT401",
        )
    try:
        found = torch.as_tensor(given, dtype=wide_float(device), device=device).detach()
        if found.numel() == 1:
            return found.reshape(())
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ModelError(
        f"loss_fn returned (loss, {kind or type(given).__name__}), but the second entry is the "
        "weight of the mean, one number; return loss alone, (mean_loss, weight), or "
        "(mean_loss, None, {name: (sum, weight)}) for metrics",
        code="MGT401",
    )


def choose_loss(given: Any) -> LossFn:
    """The loss function to train with: the user's, a wrapped criterion, or one the data implies."""
    if given is None:
        return SupervisedLoss()
    if isinstance(given, nn.Module):
        if _takes_the_model(given):
            return ModuleLoss(given)
        # A criterion with another base class may use this name for something else.
        known: tuple[str | None, ...] = ("mean", "batchmean")
        if not isinstance(given, CriterionBase):
            known += ("none", None)
        if getattr(given, "reduction", "mean") not in known:
            raise ModelError(
                f"{type(given).__name__}(reduction={given.reduction!r}): use reduction='mean', "
                "so that the loss can be weighed over ranks and micro-batches",
                code="MGT401",
            )
        return SupervisedLoss(given)
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise ModelError(
            f"loss_fn={given.__name__} is a class; give an object of it: {given.__name__}()",
            code="MGT401",
        )
    if not callable(given):
        raise ModelError(
            f"loss_fn={given!r} is not callable; give loss_fn(model, batch) -> loss", code="MGT401"
        )
    function, keywords = _unwrapped(given)
    if function in CRITERIA:
        module = CRITERIA[function]
        try:
            return choose_loss(module(**keywords))
        except TypeError as error:  # an argument that only the functional form has
            raise ModelError(
                f"loss_fn: {module.__name__} cannot stand for {function.__name__} ({error}); give "
                "loss_fn(model, batch) -> loss",
                code="MGT401",
            ) from None
    if _takes_output_and_target(function):
        return SupervisedLoss(FunctionCriterion(given))
    if not takes(given, 2):
        raise ModelError(
            f"loss_fn is called as loss_fn(model, batch), and takes {inspect.signature(given)}; "
            "give loss_fn(model, batch) -> loss",
            code="MGT401",
        )
    return given  # type: ignore[no-any-return]


# torch functions that people pass as loss_fn, and the equivalent modules.
CRITERIA: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
OUTPUTS = (
    *("input", "output", "outputs", "out", "pred", "preds", "prediction", "predictions"),
    *("logits", "scores", "y_pred", "y_hat", "yhat", "recon", "reconstruction"),
)
TARGETS = ("target", "targets", "label", "labels", "y", "y_true", "gt")


def takes(function: Any, arguments: int) -> bool:
    """Whether it can be called with so many positional arguments; True where nobody knows."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # written in C: it has no signature to inspect
        return True
    return True


def _unwrapped(given: Any) -> tuple[Any, dict[str, Any]]:
    """The function inside a `functools.partial` with its keywords, or the function itself."""
    if isinstance(given, functools.partial) and not given.args:
        return given.func, given.keywords
    return given, {}


def _takes_output_and_target(function: Any) -> bool:
    """Whether the names of its two arguments say that this is a criterion, not a function of
    model and batch."""
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    names = [p.name for p in given[:2]]
    required = [p for p in given[2:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(names) == 2 and names[0] in OUTPUTS and names[1] in TARGETS and not required


class FunctionCriterion(nn.Module):
    """The user's function of (output, target), as a criterion."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self.function(output, target)


def _takes_the_model(module: nn.Module) -> bool:
    """Whether this expects `loss_fn(model, batch)` rather than `criterion(output, target)`."""
    first = next(iter(inspect.signature(module.forward).parameters.values()), None)
    if first is None:
        return False
    kind = first.annotation if isinstance(first.annotation, str) else ""
    is_module = isinstance(first.annotation, type) and issubclass(first.annotation, nn.Module)
    return is_module or kind.endswith("Module") or first.name in ("model", "net", "network")


class ModuleLoss:
    """A loss function of model and batch that is itself a module; kept on the model's device."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._placed = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if not self._placed:
            self.module.to(next(model.parameters()).device)
            self._placed = True
        return self.module(model, batch)


class SupervisedLoss:
    """Loss of `(inputs..., target)` batches, or of models that compute their own `.loss`.

    Without a criterion: cross entropy for whole-number targets, mean squared error for others.
    """

    def __init__(self, criterion: nn.Module | None = None) -> None:
        self.criterion = criterion
        self.chosen_here = criterion is None
        self.every_label_counts = False  # then a mean is over samples, and nothing needs counting
        self._labels_seen: int | None = None  # their version counters at that time
        self._device: torch.device | None = None
        # Then the output may not be class scores: some criteria compute them from an embedding.
        self.learns = criterion is not None and any(True for _ in criterion.parameters())
        # Whether the batch is split (ranks, micro-batches), so means of its parts must add up.
        self.has_parts = False
        self._shifted: bool | None = None  # whether the model's own loss skips the first label
        self._checked = False
        self._divisor: Divisor | None = None
        self._looks = 0  # batches on which the divisor is still to be checked

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        if isinstance(batch, Mapping):
            return self._own_loss(model, batch)
        output, target = predict(model, batch)
        criterion = self.criterion_for(output, target)
        mean = criterion(output, target)
        if isinstance(mean, tuple):  # the user's own, which says what it divided by
            return read_loss(mean, mean[0].device)
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        if is_classification(output, target) and not self.learns:
            hits = (output.detach().argmax(1) == target).sum()  # the ignored label is no class
            counted: Tensor | float = float(target.numel())
            if not self.every_label_counts:
                counted = (target != ignored_label(criterion)).sum()
            metrics["accuracy"] = (hits, counted)
        plain = isinstance(output, Tensor) and output.ndim == 2
        known = is_torchs_own(criterion) and not has_class_weights(criterion)
        rows = rows_of(output, target)
        if self.every_label_counts and plain and known:
            return Loss(mean, None, metrics, rows)
        return Loss(mean, self.weight_of(output, target), metrics, rows)

    def weight_of(self, output: Any, target: Any) -> Tensor | None:
        """What the criterion divided its mean by; None if that is the sample count."""
        assert self.criterion is not None
        if self._divisor is None:
            self._divisor = find_divisor(self.criterion, output, target)
            if self.has_parts and not is_torchs_own(self.criterion):
                self._looks = 2  # later steps are watched for waits, and then recorded
                if not self._divisor.adds_up:
                    self._warn()
        if self._looks and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._looks -= 1
            if not adds_up_on(self.criterion, self._divisor.weigh, output, target):
                self._warn()
        return self._divisor.weigh(output, target)

    def _warn(self) -> None:
        self._looks = 0
        name = getattr(getattr(self.criterion, "function", None), "__name__", None)
        warnings.warn(
            f"{name or type(self.criterion).__name__} is not a mean over samples or labels whose "
            "weight can be found: each rank computes it over its own part of a batch, so results "
            "depend on the number of ranks and micro-batches. Where that matters, give a mean, or "
            "loss_fn(model, batch) -> (mean, weight)",
            stacklevel=2,
        )

    def look_at(self, dataset: Any) -> None:
        """Check in advance whether a TensorDataset has labels that do not count. Called before
        each pass, because its tensors may have been modified."""
        if type(dataset) is not TensorDataset or dataset.tensors[-1].is_floating_point():
            return
        labels = dataset.tensors[-1]
        seen = version(labels)
        if seen != self._labels_seen:
            self._labels_seen = seen
            self.every_label_counts = not bool((labels == ignored_label(self.criterion)).any())

    @property
    def description(self) -> str:
        """One line that says which loss was chosen and why, once a batch has been seen."""
        if not self.chosen_here:
            return f"loss: {type(self.criterion).__name__}"
        if self.criterion is None:
            return "loss: the model's own (.loss of its output), weighted by its labels"
        if isinstance(self.criterion, nn.MSELoss):
            return "loss: mean squared error, because targets are real numbers (no loss_fn given)"
        return "loss: cross entropy, because the targets are whole numbers (no loss_fn given)"

    def criterion_for(self, output: Tensor, target: Tensor) -> nn.Module:
        if self.criterion is None:
            self.criterion = nn.MSELoss() if target.is_floating_point() else nn.CrossEntropyLoss()
        if isinstance(self.criterion, _ELEMENTWISE) and output.shape != target.shape:
            raise ModelError(
                f"the model's output has shape {tuple(output.shape)} but the target "
                f"{tuple(target.shape)}, which {type(self.criterion).__name__} would spread over "
                "each other, within each rank's samples; make them equal, or give a loss_fn",
                code="MGT401",
            )
        if isinstance(output, Tensor) and self._device != output.device:
            self.criterion.to(output.device)
            self._device = output.device
        if isinstance(output, Tensor) and output.dtype is torch.float64 and not self.learns:
            self.criterion.double()  # class weights too: torch needs the same type
        return self.criterion

    def _own_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Loss:
        output = model(**batch)
        mean = entry_of(output, "loss")
        if not isinstance(mean, Tensor):
            named = isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor)
            remedy = (
                "it returned a plain dict: give loss_fn=lambda model, batch: "
                'model(**batch)["loss"], or return an object with .loss and .logits'
                if named
                else "add labels to the batch, or give loss_fn(model, batch) -> loss"
            )
            raise ModelError(
                f"{type(model).__name__} returned no .loss for a batch with keys {sorted(batch)}; "
                f"{remedy}",
                code="MGT401",
            )
        return Loss(mean, self._label_weight(model, batch, output))

    def _label_weight(
        self, model: nn.Module, batch: Mapping[str, Any], output: Any
    ) -> Tensor | None:
        """How many labels a Hugging Face model averaged over; None if it is one per sample."""
        labels, logits = batch.get("labels"), entry_of(output, "logits")
        shifted = self._shifted
        if shifted is None and isinstance(logits, Tensor) and isinstance(labels, Tensor):
            tokens = logits.ndim > 2 and not labels.is_floating_point()
            shifted = tokens and shifts_labels(model, output.loss, logits, labels)
            # Cached: a recorded or compiled step must not read numbers from the device.
            self._shifted = shifted if bool(output.loss.isfinite()) else None
        if self.has_parts and not self._checked and torch.is_grad_enabled():
            self._checked = True
            check_own_loss(
                model, batch, lambda part, out: own_loss_weight(model, part, out, bool(shifted))
            )
        return own_loss_weight(model, batch, output, bool(shifted))


def rows_of(output: Any, target: Any) -> int | None:
    """How many samples a criterion saw, where output and target agree on it."""
    both = isinstance(output, Tensor) and isinstance(target, Tensor) and output.ndim and target.ndim
    return len(output) if both and len(output) == len(target) else None


# Criteria that silently (or with a warning) broadcast outputs and targets of different shapes.
_ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
)


def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Output and target of an `(inputs..., target)` batch."""
    if not isinstance(batch, (list, tuple)) or len(batch) < 2:
        single = isinstance(batch, (list, tuple))
        kind = "one tensor" if single or isinstance(batch, Tensor) else type(batch).__name__
        raise ModelError(
            f"a batch is {kind}, so there is no target to compare with; yield "
            "(input, target) pairs, or give loss_fn(model, batch) -> loss",
            code="MGT401",
        )
    *inputs, target = batch
    return model(*inputs), target


def is_classification(output: Any, target: Any) -> bool:
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and output.ndim == 2
        and target.ndim == 1
    )


def token_cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy over the labels that count, and how many do."""
    mean = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index)
    return mean, (labels != ignore_index).sum()
