"""Find what the user's own criterion divides its mean by.

It may average over samples, over the labels that count, the weights of their classes, or a mask.
Synthetic batches in the shapes of an output and a target tell: the losses of the parts, weighed by
the right divisor, add up to the loss of the whole. They are the same on every rank, and a copy on
the CPU computes them. The first real batches then check the choice.
"""

from __future__ import annotations

import copy
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from multi_gpu_training.accelerator import wide_float, widened
from multi_gpu_training.data.batch import rows
from multi_gpu_training.data.generators import global_generators_kept
from multi_gpu_training.torch_internals import CriterionBase
from multi_gpu_training.training.loss_weights import (
    IGNORED,
    counted_labels,
    criterion_weight,
    uneven_parts,
)

Test = Callable[[Tensor], Tensor]
Weigh = Callable[[Any, Any], Tensor | None]  # of output and target; None: the sample count

_ROWS = 7  # synthetic samples, and where they are cut
_PARTS = slice(0, 2), slice(2, _ROWS)
_MOST = 1_000_000  # synthetic numbers
_UNUSUAL = (math.nan, 0.0, -1.0)  # targets that people mark as missing


@dataclass(frozen=True)
class Divisor:
    """What a criterion divides by, and whether its parts add up to the whole with that."""

    weigh: Weigh
    adds_up: bool = True


def is_torchs_own(criterion: nn.Module) -> bool:
    """Whether the forward is torch's own, also in a subclass that does not override it."""
    return type(criterion).forward.__module__ == CriterionBase.__module__


def find_divisor(criterion: nn.Module, output: Any, target: Any) -> Divisor:
    """How to weigh a criterion for an output and a target of these shapes: tensors, or tuples and
    dicts of them."""
    usual: Weigh = partial(criterion_weight, criterion)
    plain = isinstance(output, Tensor) and isinstance(target, Tensor)
    if is_torchs_own(criterion):
        return Divisor(usual)
    if plain and getattr(criterion, "reduction", None) == "batchmean":
        return Divisor(usual)
    # Tensors that a function uses cannot be converted: try them as they are, too.
    wide = torch.zeros((), dtype=torch.float64)
    kinds = [wide, *(t.new_zeros(()) for t in _tensors(output)[:1] if t.is_floating_point())]
    for like in kinds:
        for short, few in ((True, False), (False, False), (True, True)):
            try:
                form = _Form(output, target, short, few)
                candidates = [_by_size, *_by_targets(criterion, form)]
                with global_generators_kept(), torch.no_grad():
                    found = _fitting(_twin(criterion, like), candidates, criterion, form, like)
            except Exception:  # it rejects such a batch, or cannot be copied
                continue
            return Divisor(_by_size, adds_up=False) if found is None else Divisor(candidates[found])
    return Divisor(_by_size)  # nothing is known


def _twin(criterion: nn.Module, like: Tensor) -> nn.Module:
    """A copy with the device and floating-point type of `like`, in tensors that are neither
    buffers nor parameters as well."""
    twin = _copied(criterion).to(like).train(criterion.training)
    for module in twin.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                kind = like.dtype if value.is_floating_point() else value.dtype
                setattr(module, name, value.to(like.device, kind))
    return twin


def _copied(criterion: nn.Module) -> nn.Module:
    """A copy that may count and average as it likes. It may hold the model: that is not copied."""
    held = [criterion, *getattr(vars(criterion).get("function"), "__dict__", {}).values()]
    modules = [value for value in held if isinstance(value, nn.Module)]
    if sum(p.numel() for module in modules for p in module.parameters()) > _MOST:
        raise ValueError("too large to try out")
    return copy.deepcopy(criterion)


# Candidates


def _by_size(output: Any, target: Any) -> Tensor | None:
    """The elements that a mean over everything divides by, where shares may differ in length."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        outputs, targets = _tensors(output), _tensors(target)
        if not outputs or not targets:
            return None
        output, target = outputs[0], targets[0]
    if output.ndim <= 2:
        return None
    count: Tensor = output.new_tensor(float(target.numel()), dtype=wide_float(output.device))
    return count


def _by_targets(criterion: nn.Module, form: _Form) -> list[Weigh]:
    """Every way to count targets that a criterion's settings allow."""
    settings = [*_settings(criterion)]
    labels = _labels(settings)
    found: list[Weigh] = []
    for number, (target, place) in enumerate(zip(form.targets, form.places, strict=True)):
        if place is not None:
            output, axis = place
            classes = None if form.few else form.outputs[output].shape[axis]
            weights = [*_class_weights(settings, classes), None]
            found += [partial(_count, number, lb, w) for w in weights for lb in labels]
        else:
            tests: list[Test] = [torch.isfinite]
            tests += [partial(torch.gt, other=0), partial(torch.ge, other=0)]
            tests += [partial(torch.ne, other=v) for v in (*labels, 0, -1)]
            if target.dtype != torch.bool:
                found += [partial(_true, number, test) for test in tests]
            found.append(partial(_true, number, None))
    return found


def _count(number: int, ignored: int, weight: Tensor | None, output: Any, target: Any) -> Tensor:
    labels = _tensors(target)[number]
    return counted_labels(labels, ignored, None if weight is None else weight.to(labels.device))


def _true(number: int, test: Test | None, output: Any, target: Any) -> Tensor:
    """How many entries of a target pass a test; without one, their sum, as of a mask."""
    entries = _tensors(target)[number].detach()
    return widened((entries if test is None else test(entries)).sum())


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _settings(criterion: nn.Module) -> Iterator[Any]:
    """Whatever a criterion may have been told about labels: attributes, buffers, and what its
    code names."""
    for module in criterion.modules():
        yield from vars(module).values()
        yield from module.buffers(recurse=False)
        function = vars(module).get("function", type(module).forward)  # FunctionCriterion's
        if not str(getattr(function, "__module__", "")).startswith("torch."):
            yield from _named_in(function)


def _named_in(function: Any) -> Iterator[Any]:
    keywords = getattr(function, "keywords", {})  # of a functools.partial
    yield from keywords.values()
    function = getattr(function, "func", function)
    if not isinstance(function, types.FunctionType):
        yield from getattr(function, "__dict__", {}).values()
        function = vars(type(function)).get("__call__")
    if isinstance(function, types.FunctionType):
        cells = inspect.getclosurevars(function)
        yield from cells.nonlocals.values()
        yield from cells.globals.values()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield from _constants(function.__code__)


def _constants(code: types.CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        yield constant
        if isinstance(constant, types.CodeType):
            yield from _constants(constant)


def _labels(settings: Sequence[Any]) -> list[int]:
    """Every number that may be the label a criterion ignores."""
    found = {IGNORED, *(value for value in settings if type(value) is int)}
    return sorted(found, key=lambda label: (label != IGNORED, abs(label)))[:16]


def _class_weights(settings: Sequence[Any], classes: int | None) -> list[Tensor]:
    """Lists and tensors of one number per class; of any length if the classes are not known."""
    found: dict[int, Tensor] = {}
    for value in settings:
        listed = isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim == 1)
        if not listed or len(value) < 2 or len(value) != (classes or len(value)):
            continue
        if isinstance(value, Tensor):
            found[id(value)] = value.detach()
        elif all(type(entry) in (int, float) for entry in value):
            found[id(value)] = torch.tensor(value, dtype=torch.float64)
    return [*found.values()]


# Synthetic batches


class _Form:
    """The shapes of an output and a target, and where their classes are.

    places: for each tensor of the target that holds classes, which tensor of the output scores
    them, and along which axis. short: with other axes of at most three. few: with the labels 0 and
    1 alone, as the output may be an embedding that is longer than there are classes.
    """

    def __init__(self, output: Any, target: Any, short: bool, few: bool) -> None:
        self.output, self.target, self.few = output, target, few
        self.outputs, self.targets = _tensors(output), _tensors(target)
        if not self.outputs or not self.targets:
            raise ValueError("no tensors")
        if len({len(t) for t in (*self.outputs, *self.targets) if t.ndim}) != 1:
            raise ValueError("not one row per sample")
        self.places = [_place(target, self.outputs) for target in self.targets]
        shapes = {tensor.shape for tensor in self.outputs}
        related = all(
            place is not None or target.shape in shapes
            for place, target in zip(self.places, self.targets, strict=True)
        )
        sizes = [size for tensor in (*self.outputs, *self.targets) for size in tensor.shape]
        most = 3 if short and related else max(sizes)
        axes = {place for place in self.places if place is not None}

        def shape_of(tensor: Tensor, number: int | None = None) -> list[int]:
            cut = [
                size if (number, axis) in axes else min(most, size)
                for axis, size in enumerate(tensor.shape)
            ]
            return [_ROWS, *cut[1:]] if cut else []

        self.output_shapes = [shape_of(tensor, i) for i, tensor in enumerate(self.outputs)]
        self.target_shapes = []
        for tensor, place in zip(self.targets, self.places, strict=True):
            shape = shape_of(tensor)
            if place is not None:
                shape = [*self.output_shapes[place[0]]]
                del shape[place[1]]
            self.target_shapes.append(shape)
        if sum(math.prod(s) for s in (*self.output_shapes, *self.target_shapes)) > _MOST:
            raise ValueError("too large to try out")

    def made_up(self, like: Tensor, unusual: tuple[int, float] | None = None) -> tuple[Any, Any]:
        """Synthetic samples; `unusual`: the number of a target and an entry to put into it."""
        generator = torch.Generator().manual_seed(0)
        rand = partial(torch.rand, generator=generator, dtype=torch.float64)
        outputs = [rand(shape) for shape in self.output_shapes]
        targets = []
        for number, tensor in enumerate(self.targets):
            shape, place = self.target_shapes[number], self.places[number]
            made = rand(shape)
            if place is not None:
                # Every class occurs, in different proportions in the two parts.
                classes = 2 if self.few else self.outputs[place[0]].shape[place[1]]
                made = torch.arange(math.prod(shape)).view(shape) % classes
            elif not tensor.is_floating_point():
                made = made > 0.5
            made = made.to(tensor.dtype)
            if unusual is not None and unusual[0] == number:
                made.view(_ROWS, -1)[[0, 3, 4], -1] = unusual[1]
            targets.append(made)
        kept = [
            [t.to(like if t.is_floating_point() else like.device) for t in made]
            for made in (outputs, targets)
        ]
        return _filled(self.output, kept[0]), _filled(self.target, kept[1])


def _filled(tree: Any, tensors: list[Tensor]) -> Any:
    """The tree with other tensors in place of its own."""
    if isinstance(tree, Tensor):
        return tensors[0]
    given = iter(tensors)
    return tree_map(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, tree)


def _place(target: Tensor, outputs: Sequence[Tensor]) -> tuple[int, int] | None:
    """The output, and its axis, that holds one score per class of a target."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        return None
    for number, output in enumerate(outputs):
        if output.ndim == target.ndim + 1 and output.is_floating_point():
            if output.shape[:1] + output.shape[2:] == target.shape:
                return number, 1
            if output.shape[:-1] == target.shape:
                return number, output.ndim - 1
    return None


def _fitting(
    criterion: nn.Module,
    candidates: Sequence[Weigh],
    original: nn.Module,
    form: _Form,
    like: Tensor,
) -> int | None:
    """The first candidate for which the losses of the parts add up to the loss of the whole."""
    fits = {number: True for number in range(len(candidates))}
    also = dict(fits)
    near = 1e-7 if like.dtype == torch.float64 else 1e-4
    trials: list[tuple[tuple[int, float] | None, bool]] = [(None, True)]
    labels = _labels([*_settings(original)])
    for number, place in enumerate(form.places):
        if place is not None:
            trials += [((number, label), True) for label in labels]
        elif form.targets[number].is_floating_point():
            trials += [((number, value), False) for value in (*_UNUSUAL, *labels)]
    for unusual, certain in trials:
        made = form.made_up(like, unusual)
        try:
            whole, again = (float(criterion(*made)) for _ in range(2))
        except (IndexError, ValueError, RuntimeError):
            if unusual is None:
                raise
            continue  # it rejects such a target
        if abs(whole - again) > 1e-9 * abs(whole):
            raise ValueError("it draws random numbers")
        if not math.isfinite(whole):
            if unusual is None:
                raise ValueError("it wants other numbers")
            continue  # no such target occurs
        parts = [tree_map(lambda leaf, s=s: _cut(leaf, s), made) for s in _PARTS]
        losses: dict[int, float] = {}
        for number, weigh in enumerate(candidates):
            told = fits if certain else also
            if fits[number] and told[number]:
                told[number] = _adds_up(criterion, weigh, parts, losses, whole, near)
    sure = [number for number, well in fits.items() if well]
    return next((n for n in sure if also[n]), sure[0] if sure else None)


def _adds_up(
    criterion: nn.Module,
    weigh: Weigh,
    parts: Sequence[Any],
    losses: dict[int, float],
    whole: float,
    near: float,
) -> bool:
    total = weights = 0.0
    for place, part in enumerate(parts):
        try:
            count = _number(weigh, *part)
        except (IndexError, ValueError, RuntimeError):
            return False
        if count:  # a mean over nothing is NaN
            if place not in losses:
                losses[place] = float(criterion(*part))
            total += count * losses[place]
            weights += count
    return weights != 0 and abs(total - whole * weights) <= near * abs(whole * weights)


def _number(weigh: Weigh, output: Any, target: Any) -> float:
    weight = weigh(output, target)
    return float(len(_tensors(output)[0]) if weight is None else weight)


def _cut(leaf: Any, part: slice) -> Any:
    return leaf[part] if isinstance(leaf, Tensor) and leaf.ndim else leaf


# Real batches


def adds_up_on(criterion: nn.Module, weigh: Weigh, output: Any, target: Any) -> bool:
    """Whether the parts of this batch add up, in their losses and in the gradients of the output,
    as far as can be told. At the start of a training all losses are nearly the same; gradients
    are not."""
    sizes = {len(tensor) for tensor in _tensors(output) if tensor.ndim}
    if len(sizes) != 1:
        return True
    (count,) = sizes
    if not _has_rows(target, count):
        return True
    most = 4 * _MOST * count // max(1, sum(t.numel() for t in _tensors((output, target))))
    size = min(count, most)
    if size < 2:
        return True
    try:
        with global_generators_kept(), torch.enable_grad():
            twin = _copied(criterion)
            whole, again, *parts = (
                _Looked(twin, weigh, output, target, part, count)
                for part in (slice(0, size), slice(0, size), *uneven_parts(size))
            )
    except Exception:  # it takes no parts of a batch, or cannot be copied
        return True
    if whole.loss != again.loss or not math.isfinite(whole.loss) or not whole.weight:
        return True
    # A part of the loss that the model has computed itself: a mean over samples.
    if any(t.ndim == 0 and t.requires_grad for t in _tensors(output)):
        counted = [p.weight * size - whole.weight * p.rows for p in parts]
        if max(map(abs, counted)) > 1e-6 * abs(whole.weight) * size:
            return False
    loss = sum(p.loss * p.weight for p in parts if p.weight) / whole.weight
    if not abs(loss - whole.loss) <= whole.near * abs(whole.loss):
        return False
    for number, gradient in enumerate(whole.gradients):
        if not gradient.isfinite().all():
            continue
        scaled = [
            p.gradients[number] * (p.weight / whole.weight)
            if p.weight
            else torch.zeros_like(p.gradients[number])
            for p in parts
        ]
        if not (torch.cat(scaled) - gradient).norm() <= whole.near * gradient.norm():
            return False
    return True


def _has_rows(target: Any, count: int) -> bool:
    """Whether a target has one entry per sample, all the way or in lists of anything."""
    if isinstance(target, Tensor):
        return not target.ndim or len(target) == count
    if isinstance(target, list) and len(target) == count:
        return True
    parts = target.values() if isinstance(target, Mapping) else target
    return isinstance(target, (list, tuple, Mapping)) and all(_has_rows(p, count) for p in parts)


class _Looked:
    """The loss of a part of a batch, its weight, and the gradients of the output."""

    def __init__(
        self,
        criterion: nn.Module,
        weigh: Weigh,
        output: Any,
        target: Any,
        part: slice,
        size: int,
    ) -> None:
        cut = [_cut(t, part).detach() for t in _tensors(output)]
        leaves = [t.requires_grad_() for t in cut if t.is_floating_point() and t.ndim]
        given = _filled(output, cut), rows((target,), size, part.start, part.stop)[0]
        self.rows = part.stop - part.start
        loss = criterion(*given)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        self.gradients = [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, found, strict=True)
        ]
        self.loss, self.weight = float(loss.detach()), _number(weigh, *given)
        worst = min((leaf.dtype for leaf in leaves), key=lambda kind: kind.itemsize)
        self.near = {torch.float64: 1e-7, torch.float32: 1e-3}.get(worst, 0.05)
