"""Split one batch the way several ranks do, on one rank, and see what the split alone changes.

A rank that computes a part of a batch must give what the whole batch gives for these samples.
Where it does not, the first module whose rows change, or the loss function, mixes samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from multi_gpu_training.measure.batch_rows import take_rows
from multi_gpu_training.measure.tensor_sketch import combined, furthest, sketches
from multi_gpu_training.measure.trainer_access import BATCH_NORMS
from multi_gpu_training.training.loss import Loss, LossFn, read_loss

Event = tuple[str, str, Tensor]  # "in" or "out", the module's name, its first tensor


class SplitProbe:
    """Computes the loss of a batch and of its parts, always from the same state."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        count: int,
        buffers: Sequence[Tensor],
        noise: Tensor,
        tolerance: float,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.batch = batch
        self.count = count
        self.buffers = buffers
        self.noise = noise
        self.tolerance = tolerance
        self.device = next(model.parameters()).device

    def run(self, parts: Sequence[Sequence[int]]) -> dict[str, Any]:
        parts = [part for part in parts if part]
        whole_events: list[Event] = []
        with _events(self.model, whole_events):
            whole = self._measure(self.batch)
        found: dict[str, Any] = {"whole": whole, "again": self._loss(self.batch).mean.item()}
        found["parts"], mixing = [], None
        for part in parts:
            events: list[Event] = []
            with _events(self.model, events):
                measured = self._measure(take_rows(self.batch, part, self.count))
            found["parts"].append({"rows": list(part), **measured})
            mixing = mixing or self._first_mixing(whole_events, events, part)
        found["mixing"] = mixing
        if mixing is None:
            with _batchnorms_beside(self.model) as beside:
                found["structure"] = self._structure()
            if beside and found["structure"] != "mean":
                for module in beside:
                    module.eval()
                found["batchnorm_beside"] = self._structure() != found["structure"]
        return found

    def _restore(self) -> None:
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(before)
        torch.set_rng_state(self.noise)
        for parameter in self.model.parameters():
            parameter.grad = None

    def _loss(self, batch: Any) -> Loss:
        self._restore()
        return read_loss(self.loss_fn(self.model, batch), self.device)  # may take gradients itself

    def _measure(self, batch: Any) -> dict[str, Any]:
        self._restore()
        loss = read_loss(self.loss_fn(self.model, batch), self.device)
        loss.mean.backward()
        named = self.model.named_parameters()
        grads = sketches((name, p.grad) for name, p in named if p.grad is not None)
        weight = None if loss.weight is None else float(loss.weight)
        largest = [float(p.grad.abs().max()) for p in self.model.parameters() if p.grad is not None]
        return {
            "loss": loss.mean.item(),
            "weight": weight,
            "grads": grads,
            "largest": max(largest, default=0.0),
        }

    def _first_mixing(
        self, whole: list[Event], part: list[Event], rows: Sequence[int]
    ) -> dict[str, Any] | None:
        """The first module, in the order of the forward, whose rows change with the batch."""
        index = torch.tensor(list(rows))
        modules = dict(self.model.named_modules())
        for (kind, name, before), (other_kind, other, after) in zip(whole, part, strict=False):
            if (kind, name) != (other_kind, other) or before.ndim != after.ndim:
                return None  # another path through the model: rows cannot be laid side by side
            dim = next(
                (
                    d
                    for d in range(min(2, before.ndim))
                    if before.shape[d] == self.count and after.shape[d] == len(rows)
                ),
                None,
            )
            if dim is None:
                continue
            expected = before.index_select(dim, index)
            if expected.shape != after.shape:
                continue  # padded to another length
            apart = float((expected - after).norm())
            if not apart <= self.tolerance * max(float(expected.norm()), 1e-12):
                # What goes into a module is the work of the code around it.
                guilty = name if kind == "out" else name.rpartition(".")[0]
                module = modules[guilty]
                return {
                    "name": guilty or "the model",
                    "class": type(module).__name__,
                    "batchnorm": isinstance(module, BATCH_NORMS),
                    "before": name if kind == "in" else None,
                }
        return None

    def _structure(self) -> str:
        """How the loss of a union follows from the losses of its parts."""
        size = self.count // 4 if self.count >= 8 else 1
        starts = range(0, min(self.count, 4 * size), size)
        blocks = [list(range(start, start + size)) for start in starts]
        if len(blocks) < 2:
            return "unknown"
        try:
            single = [self._of(block) for block in blocks]
            pairs = {
                (a, b): self._of(blocks[a] + blocks[b])
                for a in range(len(blocks))
                for b in range(a + 1, len(blocks))
            }
        except (RuntimeError, ValueError):  # a loss that does not take so few samples
            return "unknown"
        tolerance = max(self.tolerance, 1e-9) * 10
        found = _name_structure(single, pairs, tolerance)
        if found == "weighted" and not self._weights_are_constant(blocks, single, pairs):
            return "statistics"
        if found != "mixed":
            return found
        # Every sample twice: means and other statistics stay, pairs meet new partners.
        rows = list(range(self.count))
        once = self._of(rows)
        doubled = self._of([*rows, *rows]), self._of(sorted([*rows, *rows]))
        limit = tolerance * max(abs(once), 1e-12)
        if all(abs(once - twice) <= limit for twice in doubled):
            return "statistics"
        # A sum grows by the same amount every time; pairs do not.
        thrice = self._of([*rows, *rows, *rows])
        return "part sum" if abs(thrice - 2 * doubled[0] + once) <= limit else "pairs"

    def _weights_are_constant(
        self,
        blocks: Sequence[list[int]],
        single: Sequence[float],
        pairs: dict[tuple[int, int], float],
    ) -> bool:
        """Whether gradients are averaged with the weights of the losses. In a ratio of sums whose
        divisor depends on the model they are not, and no weight makes its parts add up."""
        shares = {
            (a, b): (found - single[b]) / (single[a] - single[b])
            for (a, b), found in pairs.items()
            if abs(single[a] - single[b]) > 1e-3 * abs(found)  # else nothing but rounding
        }
        if shares and all(min(abs(share), abs(share - 1)) < 1e-6 for share in shares.values()):
            return False  # one of the two is selected: the hardest
        for (a, b), share in shares.items():
            grads = [
                self._measure(take_rows(self.batch, rows, self.count))["grads"]
                for rows in (blocks[a], blocks[b], blocks[a] + blocks[b])
            ]
            mixed = {
                name: combined([(share, grads[0][name]), (1 - share, grads[1][name])])
                for name in grads[2]
                if name in grads[0] and name in grads[1]
            }
            off, _ = furthest({name: grads[2][name] for name in mixed}, mixed, 1e-3)
            return off <= 1e-4
        return True

    def _of(self, rows: Sequence[int]) -> float:
        return self._loss(take_rows(self.batch, rows, self.count)).mean.item()


def _name_structure(
    single: Sequence[float], pairs: dict[tuple[int, int], float], tolerance: float
) -> str:
    """mean, sum, weighted (a mean with other weights), root (of a mean) or mixed (none of them)."""

    def holds(expected: Callable[[float, float], float]) -> bool:
        return all(
            abs(found - expected(single[a], single[b])) <= tolerance * max(abs(found), 1e-12)
            for (a, b), found in pairs.items()
        )

    if not all(math.isfinite(value) for value in [*single, *pairs.values()]):
        return "unknown"
    if holds(lambda a, b: (a + b) / 2):
        return "mean"
    if holds(lambda a, b: a + b):
        return "sum"
    if min(single) >= 0 and holds(lambda a, b: math.sqrt((a * a + b * b) / 2)):
        return "root"
    return "weighted" if _consistent_weights(single, pairs, tolerance) else "mixed"


def _consistent_weights(
    single: Sequence[float], pairs: dict[tuple[int, int], float], tolerance: float
) -> bool:
    """Whether one positive weight per block explains every pair as a weighted mean."""
    ratios = {}
    for (a, b), found in pairs.items():
        above, below = single[a] - found, found - single[b]
        if abs(single[a] - single[b]) <= tolerance * max(abs(found), 1e-12):
            if abs(above) > tolerance * max(abs(found), 1e-12):
                return False  # two equal losses have another mean
            continue
        if above * below < 0:
            return False  # outside of the two
        if above == 0 or below == 0:
            return True  # a block that does not count at all
        ratios[a, b] = above / below
    chains = [
        (ratios[a, d], first * second)
        for (a, b), first in ratios.items()
        for (c, d), second in ratios.items()
        if b == c and (a, d) in ratios
    ]
    # Ratios of small differences: rounding is larger here than in the losses.
    if any(abs(direct - chained) > 1e-4 * direct for direct, chained in chains):
        return False
    return bool(ratios)


@contextmanager
def _batchnorms_beside(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Collect the BatchNorms in training mode that run, and are not in the model: a teacher's."""
    own = {id(module) for module in model.modules()}
    found: list[nn.Module] = []

    def note(module: nn.Module, _: Any) -> None:
        if isinstance(module, BATCH_NORMS) and module.training and id(module) not in own:
            own.add(id(module))
            found.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _events(model: nn.Module, events: list[Event]) -> Iterator[None]:
    """Note what goes into every module and comes out of it."""
    handles = []

    def note(kind: str, name: str, values: Any) -> None:
        tensor = _first_float(values)
        if tensor is not None:
            events.append((kind, name, tensor.detach().cpu().clone()))

    def pre(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: note("in", name, args)

    def post(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: note("out", name, output)

    for name, module in model.named_modules():
        if name:  # what goes into the model is the batch, and it may be called in many ways
            handles.append(module.register_forward_pre_hook(pre(name)))
        handles.append(module.register_forward_hook(post(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_float(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else None
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return next((t for t in map(_first_float, values) if t is not None), None)
    return None
