"""The samples of a collated batch one by one: hash them, keep them, and put some of them together.

A batch may be any structure of tensors. Which dimension counts samples is told by its length.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Rows = dict[str, list[Any]]  # per leaf of the batch, one entry per sample


def row_leaves(batch: Any, count: int) -> Rows:
    """Everything in the batch that belongs to single samples, by its place in the structure."""
    return {path: split for path, split, _ in _leaves(batch, count) if split is not None}


def row_hashes(rows: Rows, count: int) -> list[str]:
    """A hash per sample of all that belongs to it."""
    found = []
    for number in range(count):
        digest = hashlib.blake2b(digest_size=8)
        for path in sorted(rows):
            digest.update(path.encode())
            digest.update(_bytes(rows[path][number]))
        found.append(digest.hexdigest())
    return found


def sample_dims(batch: Any, count: int) -> dict[str, int | None]:
    """Per tensor of the batch, which dimension counts its samples."""
    return {
        path: _sample_dim(value, count)
        for path, _, value in _leaves(batch, count)
        if isinstance(value, Tensor)
    }


def sample_shapes(rows: Rows) -> dict[str, list[int]]:
    """Per tensor of the batch, the shape of a sample; collate functions pad to the longest."""
    first = {path: leaf[0] for path, leaf in rows.items() if leaf}
    return {path: list(row.shape) for path, row in first.items() if isinstance(row, Tensor)}


def same_rows(one: Any, other: Any) -> bool:
    """Whether two samples are equal but for rounding and for how far they were padded."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and _bytes(one) == _bytes(other)
    if one.ndim != other.ndim or one.dtype != other.dtype:
        return False
    inner = tuple(slice(0, min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    if not _close(one[inner], other[inner]):
        return False
    for tensor in (one, other):
        if tensor.shape != one[inner].shape:
            outside = torch.ones(tensor.shape, dtype=torch.bool)
            outside[inner] = False
            padding = tensor[outside]
            if padding.numel() and not bool((padding == padding[0]).all()):
                return False
    return True


def take_rows(batch: Any, numbers: Sequence[int], count: int) -> Any:
    """A batch of the same structure that holds only the samples `numbers`, in this order."""

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            dim = _sample_dim(value, count)
            if dim is None:
                return value
            return value.index_select(dim, torch.tensor(list(numbers), device=value.device))
        if _is_per_sample(value, count):
            return type(value)(value[number] for number in numbers)
        return value

    return _rebuild(batch, count, pick)


def _leaves(batch: Any, count: int, path: str = "") -> Iterator[tuple[str, list[Any] | None, Any]]:
    if isinstance(batch, Tensor):
        dim = _sample_dim(batch, count)
        yield path, None if dim is None else list(batch.detach().cpu().unbind(dim)), batch
    elif _is_per_sample(batch, count):
        yield path, list(batch), batch
    elif isinstance(batch, Mapping):
        for key in batch:
            yield from _leaves(batch[key], count, f"{path}.{key}")
    elif isinstance(batch, (list, tuple)):
        for number, part in enumerate(batch):
            yield from _leaves(part, count, f"{path}.{number}")
    elif hasattr(batch, "__dict__"):
        for key, part in vars(batch).items():
            if isinstance(part, (Tensor, Mapping, list, tuple)):
                yield from _leaves(part, count, f"{path}.{key}")


def _sample_dim(tensor: Tensor, count: int) -> int | None:
    """0, or 1 for batches whose first dimension is time; None where neither counts samples."""
    return next((dim for dim in (0, 1) if tensor.ndim > dim and tensor.shape[dim] == count), None)


def _is_per_sample(value: Any, count: int) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != count or hasattr(value, "_fields"):
        return False
    whole = [isinstance(part, Tensor) and _sample_dim(part, count) is not None for part in value]
    nested = [isinstance(part, (Mapping, list, tuple)) for part in value]
    return not all(whole) and not any(nested)


def _rebuild(batch: Any, count: int, pick: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Tensor) or _is_per_sample(batch, count):
        return pick(batch)
    if isinstance(batch, dict):
        return {key: _rebuild(part, count, pick) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rebuild(part, count, pick) for part in batch))
    if isinstance(batch, (list, tuple)):
        plain = list if isinstance(batch, list) else tuple
        return plain(_rebuild(part, count, pick) for part in batch)
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for key in list(batch):
            changed[key] = _rebuild(batch[key], count, pick)
        return changed
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        parts = {name: _rebuild(getattr(batch, name), count, pick) for name in names}
        return dataclasses.replace(batch, **parts)
    return batch


def _bytes(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    if value.layout is not torch.strided:
        value = value.to_dense()
    plain = value.detach().cpu().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain).contiguous()
    plain = plain + 0 if plain.is_floating_point() else plain  # -0.0 is 0.0
    found: bytes = plain.flatten().view(torch.uint8).numpy().tobytes()
    return found


def _close(one: Tensor, other: Tensor) -> bool:
    if one.is_floating_point() or one.is_complex():
        return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True))
    return bool(torch.equal(one, other))
