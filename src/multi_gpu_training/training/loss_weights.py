"""Find what a mean loss was divided by, the weight for combining ranks and micro-batches.

torch's criteria and the losses of Hugging Face models are known. The user's own criterion is tried
on small synthetic batches, and the model's own loss on the first batch: the loss of the whole must
equal the weighted mean over its parts.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training.accelerator import wide_float, widened
from multi_gpu_training.data.generators import global_generators_kept
from multi_gpu_training.distributed.sharding import is_split, sharded_modules
from multi_gpu_training.errors import ModelError
from multi_gpu_training.torch_internals import CriterionBase

IGNORED = -100  # the ignored label, unless a criterion says otherwise
Weigh = Callable[[Any, Any], Tensor | None]  # of output and target; None: the sample count


def ignored_label(criterion: nn.Module | None) -> int:
    """The label that a criterion ignores."""
    label: int = getattr(criterion, "ignore_index", IGNORED)
    return label


def has_class_weights(criterion: nn.Module) -> bool:
    return getattr(criterion, "weight", None) is not None


def is_torchs_own(criterion: nn.Module) -> bool:
    """Whether the forward is torch's own, also in a subclass that does not override it."""
    return type(criterion).forward.__module__ == CriterionBase.__module__


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
    return _counted(target, criterion.ignore_index, criterion.weight)


def _counted(target: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """How many labels count, or the sum of their classes' weights."""
    valid = target != ignored
    if weight is None:
        return widened(valid.sum())
    safe = target.where(valid, torch.zeros_like(target))
    return widened(weight)[safe].mul(valid).sum()


# The user's own criterion


@dataclass(frozen=True)
class Divisor:
    """What a criterion divides by, and whether its parts add up to the whole with that."""

    weigh: Weigh
    adds_up: bool = True


def find_divisor(criterion: nn.Module, output: Any, target: Any) -> Divisor:
    """How to weigh a criterion for an output and a target of these shapes.

    The user's own criterion may average over samples, over the labels that count, or over the
    weights of their classes. Synthetic batches of a few samples tell which. They are the same on
    every rank, and a copy on the CPU computes them.
    """
    usual: Weigh = partial(criterion_weight, criterion)
    if is_torchs_own(criterion) or not isinstance(output, Tensor):
        return Divisor(usual)
    by_samples: Weigh = _by_size
    if not isinstance(target, Tensor) or any(True for _ in criterion.parameters()):
        return Divisor(by_samples)
    if getattr(criterion, "reduction", None) == "batchmean":
        return Divisor(usual)
    # Tensors that a function uses cannot be converted: try them as they are, too.
    wide = torch.zeros((), dtype=torch.float64)
    for like in (wide, output.new_zeros(()) if output.is_floating_point() else wide):
        try:
            twin = _twin(criterion, like)
            candidates = [by_samples, *_by_labels(criterion, output, target)]
            with global_generators_kept(), torch.no_grad():
                for number in _fitting(twin, candidates, output, target, like):
                    return Divisor(candidates[number])
            return Divisor(by_samples, adds_up=False)
        except Exception:  # it rejects such a batch, or cannot be copied
            continue
    return Divisor(by_samples)  # nothing is known


def _twin(criterion: nn.Module, like: Tensor) -> nn.Module:
    """A copy with the device and floating-point type of `like`, in tensors that are neither
    buffers nor parameters as well."""
    twin = copy.deepcopy(criterion).to(like).train(criterion.training)
    for module in twin.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                kind = like.dtype if value.is_floating_point() else value.dtype
                setattr(module, name, value.to(like.device, kind))
    return twin


def _by_size(output: Any, target: Any) -> Tensor | None:
    if isinstance(output, Tensor) and isinstance(target, Tensor) and output.ndim > 2:
        return output.new_tensor(float(target.numel()), dtype=wide_float(output.device))
    return None


def _by_labels(criterion: nn.Module, output: Tensor, target: Tensor) -> list[Weigh]:
    """Every way to count labels that the settings of a criterion and its submodules allow."""
    place = _classes_at(output, target)
    if place is None:
        return []
    ignored = _ignored_labels(criterion)
    weights: dict[int, Tensor] = {}
    for module in criterion.modules():
        listed = vars(module).get("tensors", ())  # of a criterion that is a function
        for value in [*vars(module).values(), *module.buffers(recurse=False), *listed]:
            if isinstance(value, Tensor) and value.shape == (output.shape[place],):
                weights[id(value)] = value
    return [
        partial(_counted_by, label, weight)
        for weight in [*weights.values(), None]
        for label in sorted(ignored)
    ]


def _ignored_labels(criterion: nn.Module) -> set[int]:
    """Every number that may be the label a criterion ignores."""
    found = {IGNORED, *(ignored_label(module) for module in criterion.modules())}
    for module in criterion.modules():
        found.update(vars(module).get("labels", ()))
    return found


def _counted_by(ignored: int, weight: Tensor | None, output: Any, target: Any) -> Tensor:
    return _counted(target, ignored, None if weight is None else weight.to(target.device))


def _classes_at(output: Tensor, target: Tensor) -> int | None:
    """The output axis that holds one score per class; None if labels are not classes."""
    if target.is_floating_point() or target.is_complex() or output.ndim != target.ndim + 1:
        return None
    if output.shape[:1] + output.shape[2:] == target.shape:
        return 1
    return output.ndim - 1 if output.shape[:-1] == target.shape else None


def _fitting(
    criterion: nn.Module,
    candidates: Sequence[Weigh],
    output: Tensor,
    target: Tensor,
    like: Tensor,
) -> Iterator[int]:
    """The candidates for which the losses of the parts add up to the loss of the whole."""
    generator = torch.Generator().manual_seed(0)
    trials: list[tuple[Tensor, Tensor]] = []
    near = 1e-7 if like.dtype == torch.float64 else 1e-4
    for ignored in (None, *sorted(_ignored_labels(criterion))):
        out, wanted = _made_up(output, target, ignored, generator)
        out, wanted = out.to(like), wanted.to(like.device)
        if wanted.is_floating_point():
            wanted = wanted.to(like.dtype)
        made = out, wanted
        try:
            criterion(*made)
        except (IndexError, ValueError, RuntimeError):
            if ignored is None:
                raise
            continue  # it rejects such a label
        trials.append(made)
    fits = set(range(len(candidates)))
    for out, wanted in trials:
        whole, again = (float(criterion(out, wanted)) for _ in range(2))
        if abs(whole - again) > 1e-9 * abs(whole):
            raise ValueError("it draws random numbers")
        for number in sorted(fits):
            weigh, total, weights = candidates[number], 0.0, 0.0
            for part in (slice(0, 2), slice(2, 7)):
                weight = weigh(out[part], wanted[part])
                count = float(len(out[part]) if weight is None else weight)
                if count:  # a mean over nothing is NaN
                    total += count * float(criterion(out[part], wanted[part]))
                    weights += count
            if not abs(total - whole * weights) <= near * abs(whole * weights):
                fits.discard(number)
    yield from sorted(fits)


def _made_up(
    output: Tensor, target: Tensor, ignored: int | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Seven synthetic samples in the shape of an output and a target; long axes are shortened."""
    place = _classes_at(output, target)
    shape = [7, *(min(3, size) for size in output.shape[1:])]
    if place is not None:
        shape[place] = output.shape[place]
        wanted_shape = [size for axis, size in enumerate(shape) if axis != place]
    elif output.shape == target.shape:
        wanted_shape = shape
    else:
        shape, wanted_shape = [7, *output.shape[1:]], [7, *target.shape[1:]]
        if max(output[0].numel(), target[0].numel()) > 1_000_000:
            raise ValueError("too large to try out")
    out = torch.rand(shape, generator=generator, dtype=torch.float64)
    if place is None:
        wanted = torch.rand(wanted_shape, generator=generator, dtype=torch.float64)
        if not target.is_floating_point():
            wanted = (wanted > 0.5).to(target.dtype)
        return out, wanted
    # Every class occurs, in different proportions in the first two samples and in the rest.
    wanted = torch.arange(math.prod(wanted_shape)).view(wanted_shape) % shape[place]
    if ignored is not None:
        wanted.view(7, -1)[[0, 3, 4], -1] = ignored
    return out, wanted.to(target.dtype)


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
    rows = {len(v) if isinstance(v, Tensor) and v.ndim else 0 for v in batch.values()}
    size = rows.pop() if len(rows) == 1 else 0
    if size == 1:  # beside its own copy, a sample still tells a sum from a mean
        batch = {key: torch.cat([value, value]) for key, value in batch.items()}
        size = 2
    if size < 2 or sharded_modules(model) or any(is_split(p) for p in model.parameters()):
        return  # ranks would have to compute this together
    with _as_in_evaluation(model):
        whole, total = _weighed(model, batch, weight_of, size)
        first = max(1, size // 3)  # uneven, so that wrong candidates rarely agree by chance
        cut = [slice(0, first), slice(first, size)]
        parts = [
            _weighed(model, {k: v[s] for k, v in batch.items()}, weight_of, s.stop - s.start)
            for s in cut
        ]
        again, _ = _weighed(model, batch, weight_of, size)
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


def _weighed(
    model: nn.Module,
    batch: Mapping[str, Any],
    weight_of: Callable[[Mapping[str, Any], Any], Tensor | None],
    size: int,
) -> tuple[float, float]:
    output = model(**batch)
    weight = weight_of(batch, output)
    return float(output.loss), float(size if weight is None else weight)


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
