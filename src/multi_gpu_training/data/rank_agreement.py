"""Do all ranks hold the same data? Each builds its dataset in its own process.

Compared are the length and, of tensors in memory, some values spread over the data: a few
milliseconds, however large they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import DataError

_VALUES = 4096  # looked at per tensor, in runs: a tensor may be mapped from a slow disk
_RUN = 32
_PARTS = 64  # looked at of a ConcatDataset

Part = tuple[str, Tensor]  # what it is, and the tensor itself


def check_same_data(dataset: Any, purpose: str, placement: Placement) -> None:
    """Refuse a dataset with a length that is another one on some rank: batches are shared out by
    the samples' numbers, so a batch would be put together from several datasets. Collective."""
    world = placement.world
    if world.dp_size == 1:
        return
    parts = list(_parts(dataset))
    mine = [_length(dataset), [[name, *_described(tensor)] for name, tensor in parts]]
    first, *others = world.gather_json(mine)
    apart = {rank: _difference(first, o) for rank, o in enumerate(others, 1) if o != first}
    if apart and not any(apart.values()):
        # Only floats differ. What machines of several kinds compute differs by rounding.
        apart = _apart_beyond_rounding(parts, world)
    if not apart:
        return
    what = next(text for text in apart.values() if text)
    raise DataError(
        f"the {purpose} {type(dataset).__name__} is not the same on every rank: on "
        f"{_named(list(apart))} {what} than on rank 0. Each rank runs the whole script and makes "
        "its own dataset, so random data need the same seed everywhere: call torch.manual_seed(0) "
        "(np.random.seed(0)) before you make, shuffle or split the data. Do not give a rank only "
        "its part of them: the manager shares out every batch",
        code="MGT305",
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _parts(dataset: Any, name: str = "") -> Iterator[Part]:
    """The tensors that a dataset consists of, and which samples a Subset takes. Of all other
    classes nothing: reading a sample may take long, open files or draw random numbers."""
    if type(dataset) is TensorDataset:
        for number, tensor in enumerate(dataset.tensors):
            yield f"tensor {number}{name}", tensor
    elif type(dataset) is Subset:
        indices = _some_indices(dataset.indices)
        if indices is not None:
            yield f"the indices of the Subset{name}", indices
        yield from _parts(dataset.dataset, name)
    elif type(dataset) is ConcatDataset:
        sets = dataset.datasets
        for number in _spread(len(sets), _PARTS):
            yield from _parts(sets[number], f" of part {number}{name}")


def _some_indices(indices: Any) -> Tensor | None:
    try:
        chosen = [int(indices[place]) for place in _spread(len(indices), _VALUES)]
    except (TypeError, ValueError, LookupError):
        return None
    return torch.tensor(chosen, device="cpu")


def _spread(length: int, most: int) -> Sequence[int]:
    """At most so many of the numbers below `length`, from the first to the last."""
    if length <= most:
        return range(length)
    return [place * (length - 1) // (most - 1) for place in range(most)]


def _described(tensor: Tensor) -> list[Any]:
    """Shape, dtype and a checksum of some values; None where they cannot be looked at."""
    shape = list(tensor.shape)
    if not _is_plain(tensor):
        return [shape, str(tensor.dtype), None]
    picked = _picked(tensor)
    crc = zlib.crc32(memoryview(picked.view(torch.uint8).numpy())) if picked.numel() else 0  # type: ignore[arg-type]
    return [shape, str(tensor.dtype), crc]


def _is_plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return known and not tensor.is_meta and not tensor.is_quantized


def _picked(tensor: Tensor) -> Tensor:
    """Values from the same places on every rank, on the host; complex ones as pairs."""
    flat, count = tensor.detach(), tensor.numel()
    if count > _VALUES:
        draws = torch.Generator("cpu").manual_seed(count)
        starts = torch.randint(
            0, count - _RUN + 1, (_VALUES // _RUN, 1), generator=draws, device="cpu"
        )
        places = (starts + torch.arange(_RUN, device="cpu")).flatten().to(flat.device)
        flat = flat[torch.unravel_index(places, flat.shape)]  # of strided tensors, too: no copy
    flat = flat.cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


def _difference(first: list[Any], other: list[Any]) -> str:
    """What is surely different; nothing where only the values of floats are."""
    if first[0] != other[0]:
        more = "more" if (other[0] or 0) > (first[0] or 0) else "fewer"
        return f"it has {more} samples ({other[0]}, not {first[0]})"
    if [part[:3] for part in first[1]] != [part[:3] for part in other[1]]:
        return "its tensors have other shapes or types"
    for (name, _, dtype, crc), (*_, theirs) in zip(first[1], other[1], strict=True):
        if crc != theirs and not ("float" in dtype or "complex" in dtype):
            return f"{name} has other values"
    return ""


def _apart_beyond_rounding(parts: Sequence[Part], world: Placement) -> dict[int, str]:
    """By rank, the tensor of floats whose values are not those of rank 0. Collective."""
    floats = {name: tensor for name, tensor in parts if tensor.is_floating_point()}
    floats |= {name: tensor for name, tensor in parts if tensor.is_complex()}
    mine = {name: _picked(t).double() for name, t in floats.items() if _is_plain(t)}
    zeroth = world.broadcast_json({name: values.tolist() for name, values in mine.items()})
    found = ""
    for name, values in mine.items():
        theirs = torch.tensor(zeroth.get(name, []), dtype=torch.float64, device="cpu")
        eps = torch.finfo(floats[name].dtype).eps
        if theirs.shape == values.shape and _differ(values, theirs, max(1e-3, 2 * eps)):
            found = f"{name} has other values"
            break
    told = world.gather_json(found)
    return {rank: text for rank, text in enumerate(told) if text}


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether more than one in a hundred values differs by more than rounding. A value near zero
    may be nothing but rounding; zeros on both sides say nothing."""
    same = (one == other) | (one.isnan() & other.isnan())
    same |= (one - other).abs() <= tolerance * torch.maximum(one.abs(), other.abs())
    telling = int(((one != 0) | (other != 0)).sum())
    return int((~same).sum()) * 100 > telling


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
