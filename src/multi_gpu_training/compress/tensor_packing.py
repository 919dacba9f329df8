"""Quantised and sparse weights as plain tensors for a safetensors file, and back.

torchao keeps an int4 weight in a byte and 2:4 sparsity keeps its zeros; a file need not. Loading
copies into a model that was built and changed in the same way, so a file names no classes: it can
only fill tensors whose shape and type are known beforehand.

    layer.weight                 a float tensor
    layer.weight:qdata           a part of a torchao tensor
    layer.weight:qdata:int4      the same, two numbers to a byte
    layer.weight:nonzero, :where two of every four numbers, and which two
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.errors import CheckpointError

NIBBLES, NONZERO, WHERE = ":int4", ":nonzero", ":where"


def plain_tensors(model: nn.Module, sparse: Collection[str] = ()) -> dict[str, Tensor]:
    """The state of a model. `sparse` names weights of which two of every four are zero."""
    found: dict[str, Tensor] = {}
    for name, value in _own_tensors(model).items():
        for key, part, bits in _parts(name, value):
            packed = {key: part}
            if name in sparse and (key == name or key.endswith(":qdata")):
                packed = pack_sparse(key, part)
            for inner, tensor in packed.items():
                if bits == 4 and not inner.endswith(WHERE):
                    found[inner + NIBBLES] = pack_nibbles(tensor)
                else:
                    found[inner] = tensor.contiguous()
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `plain_tensors` gave into a model of the same form; all of it must fit."""
    unused = dict(tensors)
    problems = []
    with torch.no_grad():
        for name, value in _own_tensors(model).items():
            for key, part, _ in _parts(name, value):
                found = _take(unused, key, part)
                if found is None:
                    problems.append(f"{key} is missing")
                elif found.shape != part.shape or found.dtype != part.dtype:
                    have = f"{found.dtype} of {tuple(found.shape)}"
                    problems.append(f"{key} is {have}, not {part.dtype} of {tuple(part.shape)}")
                else:
                    part.copy_(found)
    problems += [f"{name} belongs to nothing in the model" for name in unused]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the compressed weights do not fit the model: {'; '.join(problems[:5])}{more}",
            code="MGT702",
        )


def _take(tensors: dict[str, Tensor], key: str, like: Tensor) -> Tensor | None:
    """The tensor that was packed under `key`, taken out of `tensors`."""
    if key in tensors:
        return tensors.pop(key)
    if key + NIBBLES in tensors:
        return unpack_nibbles(tensors.pop(key + NIBBLES), like.shape)
    for ending in ("", NIBBLES):
        value, where = key + NONZERO + ending, key + WHERE
        if value in tensors and where in tensors:
            kept, places = tensors.pop(value), tensors.pop(where)
            if ending:
                kept = unpack_nibbles(kept, torch.Size((like.numel() // 2,)))
            return unpack_sparse(kept, places, like.shape)
    return None


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, each once: a shared weight has the first of its names."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def _parts(name: str, value: Any) -> list[tuple[str, Tensor, int]]:
    """Key, plain tensor and bits per number of what a tensor consists of."""
    data = value.data
    if type(data) is Tensor:
        return [(name, data, 8 * data.element_size())]
    names, facts = data.__tensor_flatten__()
    is_int4 = str(facts.get("target_dtype")) == "torch.int4"
    return [
        (f"{name}:{inner}", getattr(data, inner), 4 if is_int4 and inner == "qdata" else 8)
        for inner in names
    ]


def pack_nibbles(tensor: Tensor) -> Tensor:
    """Two int8 numbers between -8 and 7 per byte."""
    flat = tensor.flatten()
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    low, high = (flat.to(torch.int16) & 15).to(torch.uint8).view(-1, 2).unbind(1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor, shape: torch.Size) -> Tensor:
    both = torch.stack([packed & 15, packed >> 4], 1).flatten()[: shape.numel()].to(torch.int8)
    return torch.where(both > 7, both - 16, both).view(shape)


def pack_sparse(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Two numbers of each four, and a byte per two groups that says which."""
    groups = tensor.reshape(-1, 4)
    # Kept numbers first, in their order; where more than two are zero, zeros are kept too.
    order = torch.argsort((groups == 0).to(torch.int8), dim=1, stable=True)[:, :2].sort(1).values
    if torch.count_nonzero(groups) != torch.count_nonzero(groups.gather(1, order)):
        raise ValueError(f"{key}: more than two of four weights are not zero")
    which = (order[:, 0] | (order[:, 1] << 2)).to(torch.uint8)
    return {
        key + NONZERO: groups.gather(1, order).flatten(),
        key + WHERE: pack_nibbles(which.to(torch.int8)),
    }


def unpack_sparse(kept: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    groups = shape.numel() // 4
    which = unpack_nibbles(where, torch.Size((groups,))).to(torch.int64) & 15
    order = torch.stack([which & 3, which >> 2], 1)
    found = kept.new_zeros(groups, 4)
    return found.scatter_(1, order, kept.view(groups, 2)).view(shape)
