"""Any training state as JSON plus tensors, and back. Nothing that is loaded can run code."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from multi_gpu_training.errors import CheckpointError

_TAG = "$"


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """`value` as plain JSON; its tensors go into `tensors` under their path, or one like it.

    JSON knows neither tuples nor whole-number keys; they are tagged, so that what comes back is
    of the type that went in.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "key": _put(tensors, path, value.detach())}
    if isinstance(value, np.ndarray):
        key = _put(tensors, path, torch.from_numpy(_portable(value)))
        return {_TAG: "array", "key": key, "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [pack(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
        kind = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k)).__name__
        return items if kind == "list" else {_TAG: kind, "items": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, tensors, path)
    if isinstance(value, (int, float)):
        return value + 0
    raise CheckpointError(
        f"cannot save {path or 'this state'}: {type(value).__name__} is neither plain data nor a "
        "tensor; let the object's state_dict() return numbers, strings, lists, dicts and tensors"
    )


def _put(tensors: dict[str, Tensor], path: str, tensor: Tensor) -> str:
    """The name under which `tensor` now lies: its path, or one like it where another tensor has
    the same, as a dot in a key or the keys 1 and "1" make it."""
    names = chain([path], (f"{path}~{number}" for number in count(2)))
    name = next(name for name in names if name not in tensors)
    tensors[name] = tensor
    return name


def _pack_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    kind = "counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and all(isinstance(key, str) for key in value) and _TAG not in value:
        return {
            key: pack(item, tensors, f"{path}.{key}" if path else key)
            for key, item in value.items()
        }
    pairs = [
        [pack(key, tensors, f"{path}.key{i}"), pack(item, tensors, f"{path}.{key}")]
        for i, (key, item) in enumerate(value.items())
    ]
    return {_TAG: kind, "pairs": pairs}


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: unpack(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        return tensors[value["key"]]
    if kind == "array":
        return tensors[value["key"]].numpy().astype(value["dtype"])
    if kind == "bytes":
        return base64.b64decode(value["base64"])
    if kind == "dtype":
        found = getattr(torch, value["name"])
        if not isinstance(found, torch.dtype):
            raise TypeError(f"torch.{value['name']} is no dtype")
        return found
    if kind in ("dict", "counter"):
        pairs = {unpack(k, tensors): unpack(v, tensors) for k, v in value["pairs"]}
        return Counter(pairs) if kind == "counter" else pairs
    items = [unpack(item, tensors) for item in value["items"]]
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def to_text(value: Any) -> dict[str, Any]:
    """A state as JSON alone, tensors included, to be sent between ranks."""
    tensors: dict[str, Tensor] = {}
    plain = pack(value, tensors)
    raw = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    return {"plain": plain, "tensors": base64.b64encode(raw).decode()}


def from_text(text: dict[str, Any]) -> Any:
    return unpack(text["plain"], load(base64.b64decode(text["tensors"])))


def _portable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Types that torch lacks, in ones it has; `unpack` casts back."""
    wider = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
    return array.astype(wider.get(str(array.dtype), array.dtype))
