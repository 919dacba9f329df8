"""Sketches: a few numbers per tensor from which distances between tensors can be estimated.

Two trainings are compared tensor by tensor and step by step. A sketch is linear, so sketches of
gradients can be added and scaled like the gradients themselves; whole tensors need not be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from multi_gpu_training.distributed.sharding import whole

PROJECTIONS = 8
_WIDTH = 1024

Sketch = list[float]  # the norm, then the projections
Sketches = dict[str, Sketch]


@lru_cache(maxsize=4)
def _signs(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4711)
    across = torch.randint(0, 2, (_WIDTH, PROJECTIONS), generator=generator)
    down = torch.randint(0, 2, (rows, PROJECTIONS), generator=generator)
    return across.double() * 2 - 1, down.double() * 2 - 1


@torch.no_grad()
def sketch(tensor: Tensor) -> Sketch:
    """The tensor's norm and its products with a few fixed random vectors of +1 and -1."""
    tensor = whole(tensor.detach())  # collective where ranks hold parts of it
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.to("cpu", torch.float64).flatten()
    rows = max(1, -(-flat.numel() // _WIDTH))
    across, down = _signs(rows)
    padded = torch.nn.functional.pad(flat, (0, rows * _WIDTH - flat.numel()))
    products = (padded.view(rows, _WIDTH) @ across * down).sum(0)
    return [float(flat.norm()), *products.tolist()]


def sketches(named: Iterable[tuple[str, Tensor]]) -> Sketches:
    return {name: sketch(tensor) for name, tensor in named}


def combined(parts: Iterable[tuple[float, Sketch]]) -> Sketch:
    """The sketch of a weighted sum; its norm is an estimate."""
    total = [0.0] * PROJECTIONS
    for factor, part in parts:
        for place, value in enumerate(part[1:]):
            total[place] += factor * value
    return [math.sqrt(sum(value**2 for value in total) / PROJECTIONS), *total]


def difference(one: Sketch, other: Sketch) -> float:
    """An estimate of ||a - b||; NaN where one is not finite and the other is."""
    if _same_nonfinite(one, other):
        return 0.0
    total = sum((a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True))
    return math.sqrt(total / PROJECTIONS)


def _same_nonfinite(one: Sketch, other: Sketch) -> bool:
    return not math.isfinite(one[0]) and not math.isfinite(other[0])


def total_norm(named: Mapping[str, Sketch]) -> float:
    return math.sqrt(sum(found[0] ** 2 for found in named.values()))


def furthest(
    reference: Mapping[str, Sketch], other: Mapping[str, Sketch], floor: float
) -> tuple[float, str]:
    """The largest ||a - b|| / ||a|| and where it is; a tensor that only one side has is inf.

    A tensor much smaller than all together (`floor` is the ratio) is measured against that: what
    is zero in exact arithmetic is nothing but rounding.
    """
    worst, name = 0.0, "-"
    least = floor * total_norm(reference)
    for key in sorted({*reference, *other}):
        if key not in reference or key not in other:
            apart = math.inf
        else:
            apart = difference(reference[key], other[key])
            apart = apart / max(reference[key][0], least, 1e-300) if apart else 0.0
        if not apart <= worst:  # also where it is NaN
            worst, name = apart, key
        if worst != worst:
            break
    return worst, name


def ratio(reference: Mapping[str, Sketch], other: Mapping[str, Sketch], tolerance: float) -> float:
    """The one factor that `other` is of `reference` in every tensor; NaN where there is none."""
    above = below = 0.0
    for key in {*reference} & {*other}:
        above += sum(a * b for a, b in zip(reference[key][1:], other[key][1:], strict=True))
        below += sum(a * a for a in reference[key][1:])
    if not below or {*reference} != {*other}:
        return math.nan
    factor = above / below
    scaled = {key: [value * factor for value in found] for key, found in reference.items()}
    apart, _ = furthest(scaled, other, 1e-4)
    return factor if apart <= tolerance else math.nan
