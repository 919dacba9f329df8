"""Find what a mean loss was divided by, the weight for combining ranks and micro-batches.

torch's criteria and the losses of Hugging Face models are known. The model's own loss is tried on
the first batch: the loss of the whole must equal the weighted mean over its parts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from multi_gpu_training.accelerator import wide_float, widened
from multi_gpu_training.data.batch import rows
from multi_gpu_training.data.generators import global_generators_kept
from multi_gpu_training.distributed.sharding import is_split, sharded_modules
from multi_gpu_training.errors import ModelError

IGNORED = -100  # the ignored label, unless a criterion says otherwise
Weigh = Callable[[Any, Any], Tensor | None]  # of output and target; None: the sample count


def ignored_label(criterion: nn.Module | None) -> int:
    """The label that a criterion ignores."""
    label: int = getattr(criterion, "ignore_index", IGNORED)
    return label


def has_class_weights(criterion: nn.Module) -> bool:
    return getattr(criterion, "weight", None) is not None


def criterion_weight(criterion: nn.Module, output: Any, target: Any) -> Tensor | None:
    """What one of torch's criteria divided its mean by; None if that is the sample count."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    if getattr(criterion, "reduction", None) == "batchmean":  # a sum over rows, by their number
        return output.new_tensor(float(output.shape[0]), dtype=wide_float(output.device))
    if not isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) or target.is_floating_point():
        if output.ndim > 2 and not isinstance(criterion, nn.CTCLoss):
            return output.new_tensor(float(target.numel()), dtype=wide_float(output.device))
        return None
    return counted_labels(target, criterion.ignore_index, criterion.weight)


def counted_labels(target: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """How many labels count, or the sum of their classes' weights."""
    valid = target != ignored
    if weight is None:
        return widened(valid.sum())
    safe = target.where(valid, torch.zeros_like(target))
    return widened(weight)[safe].mul(valid).sum()


# The model's own loss


def own_loss_weight(
    model: nn.Module, batch: Mapping[str, Any], output: Any, shifted: bool
) -> Tensor | None:
    """How many labels a Hugging Face model averaged over; None where it is one per sample."""
    starts, scores = batch.get("start_positions"), entry_of(output, "start_logits")
    if isinstance(starts, Tensor) and isinstance(scores, Tensor):  # truncated answers do not count
        return (starts < scores.shape[1]).sum().to(wide_float(starts.device))
    labels, logits = batch.get("labels"), entry_of(output, "logits")
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor):
        return None
    if labels.is_floating_point() or labels.ndim == 0 or logits.ndim < 2 or is_ctc(model):
        return None
    if logits.ndim == 2 and labels.ndim != 1:
        return None
    ignored = _setting(model, "semantic_loss_ignore_index") if logits.ndim == 4 else None
    counted = (labels[..., 1:] if shifted else labels) != (IGNORED if ignored is None else ignored)
    return counted.sum().to(wide_float(labels.device))


def entry_of(output: Any, name: str) -> Any:
    """An attribute of a model's output; None if it has none. A dict whose attributes are its
    entries may raise KeyError for those that it lacks."""
    try:
        return getattr(output, name, None)
    except KeyError:
        return None


def is_ctc(model: nn.Module) -> bool:
    return any(type(module).__name__.endswith("ForCTC") for module in model.modules())


def _setting(model: nn.Module, name: str) -> Any:
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), name):
            return getattr(config, name)
    return None


def shifts_labels(model: nn.Module, loss: Tensor, logits: Tensor, labels: Tensor) -> bool:
    """Whether the model predicts the next token, so that the first label counts for nothing.

    The model's own loss tells: it equals the cross entropy of either the shifted labels or the
    unshifted ones. If both fit, or neither does (label smoothing, extra terms), the model's class
    name decides, also under wrappers.
    """
    if logits.shape[:-1] != labels.shape:
        return False
    found = float(loss.detach())
    plain = _mean_cross_entropy(logits, labels)
    shifted = _mean_cross_entropy(logits[..., :-1, :], labels[..., 1:])
    near = [abs(value - found) <= 1e-5 * abs(found) for value in (plain, shifted)]
    if near[0] != near[1]:
        return near[1]
    names = [type(module).__name__ for module in model.modules()]
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


@torch.no_grad()
def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> float:
    total, count = 0.0, 0
    for row, wanted in zip(logits.detach(), labels, strict=True):  # one by one: logits are large
        flat = row.double() if row.dtype == torch.float64 else row.float()
        total += float(F.cross_entropy(flat.flatten(0, -2), wanted.flatten(), reduction="sum"))
        count += int((wanted != IGNORED).sum())
    return total / count if count else float("nan")


def check_own_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    weight_of: Callable[[Mapping[str, Any], Any], Tensor | None],
) -> None:
    """Check on one batch that a model's own loss matches its assumed weight: the losses of the
    batch's parts must add up to that of the whole. A sum is refused; a loss that is neither
    triggers a warning. Runs without noise and leaves no trace."""
    size = _size(batch)
    if size == 1:  # beside its own copy, a sample still tells a sum from a mean
        batch = {key: _twice(value) for key, value in batch.items()}
        size = 2
    if size < 2 or sharded_modules(model) or any(is_split(p) for p in model.parameters()):
        return  # ranks would have to compute this together
    with _as_in_evaluation(model):
        for given in (_shaken(model), {}):
            look = partial(_weighed, model, given, batch, weight_of, size)
            whole, total = look(slice(0, size))
            if math.isfinite(whole):
                break
        parts = [look(part) for part in uneven_parts(size)]
        again, _ = look(slice(0, size))
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    near = (1e-4 if exact else 0.05) * abs(whole)
    if whole != again or not total:  # it draws random numbers, or no label counts here
        return
    if abs(sum(w * loss for loss, w in parts if w) / total - whole) <= near:
        return
    name = type(model).__name__
    if abs(sum(loss for loss, _ in parts) - whole) <= near:
        remedy = "set ctc_loss_reduction='mean' in its config, or " if is_ctc(model) else ""
        raise ModelError(
            f"the own loss of {name} is a sum over the samples of a batch, so its size depends on "
            f"how many a rank holds; {remedy}give loss_fn(model, batch) -> mean or (mean, weight)",
            code="MGT401",
        )
    warnings.warn(
        f"the own loss of {name} is not one mean over samples or labels: each rank computes it "
        "over its own part of a batch, so results depend on the number of ranks. Where its terms "
        "can be weighed, give loss_fn(model, batch) -> (mean, weight)",
        stacklevel=2,
    )


def uneven_parts(size: int) -> list[slice]:
    """Parts of a batch, of which wrong weights rarely add up by chance."""
    first = max(1, size // 3)
    second = max(first + 1, size // 2)
    cuts = [0, first, second, size] if second < size else [0, first, size]
    return [slice(begin, end) for begin, end in pairwise(cuts)]


def _size(batch: Mapping[str, Any]) -> int:
    """The samples of a batch whose tensors and lists all have one entry per sample; else 0."""
    columns = [
        v for v in batch.values() if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim)
    ]
    lengths = {len(column) for column in columns}
    return lengths.pop() if len(lengths) == 1 else 0


def _twice(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.cat([value, value]) if value.ndim else value
    return value + value if isinstance(value, list) else value


def _shaken(model: nn.Module) -> dict[str, Tensor]:
    """Other values for the small parameters. Losses add up whatever the weights are, but before
    training they are so alike that wrong weights would do as well."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    found = {}
    for name, value in model.named_parameters():
        if value.ndim == 1 and value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator, device=device)
            found[name] = value.detach() + noise.to(value.device, value.dtype)
    return found


def _weighed(
    model: nn.Module,
    parameters: dict[str, Tensor],
    batch: Mapping[str, Any],
    weight_of: Callable[[Mapping[str, Any], Any], Tensor | None],
    size: int,
    part: slice,
) -> tuple[float, float]:
    given = rows(batch, size, part.start, part.stop)
    output = functional_call(model, parameters, (), dict(given))
    weight = weight_of(given, output)
    return float(output.loss), float(part.stop - part.start if weight is None else weight)


@contextmanager
def _as_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Without dropout, gradients, 16-bit rounding, or draws from the global generators."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    for module, _ in modes:
        module.training = False
    try:
        with (
            torch.no_grad(),
            global_generators_kept(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        for module, training in modes:
            module.training = training
