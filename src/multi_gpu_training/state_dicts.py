"""State as plain data: any state as JSON and tensors, and that of models, optimizers, generators.

Nothing that is loaded can run code.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.accelerator import device_generators
from multi_gpu_training.errors import CheckpointError

_TAG = "$"
# Generators have states of 600 numbers, and a history has one dict per epoch: these are not looked
# at one by one, because training stands still meanwhile.
_PLAIN = {type(None), bool, str, int, float}
_NO_TENSORS = base64.b64encode(save({})).decode()

# Any state as JSON and tensors


@dataclass(frozen=True)
class Later:
    """Plain data that whoever writes the JSON makes. `make` must not depend on what changes."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class WrittenList:
    """A list whose items are JSON already. What makes a `Later` may return it."""

    items: list[str]


@dataclass(frozen=True)
class Packed:
    """What `pack` made of a state: its JSON, and its tensors by name. Not to be changed."""

    plain: Any
    tensors: dict[str, Tensor]


def packed(value: Any) -> Packed:
    if isinstance(value, Packed):
        return value
    tensors: dict[str, Tensor] = {}
    return Packed(pack(value, tensors), tensors)


def json_text(plain: Any) -> str:
    """The text of what `pack` returned."""
    written: dict[str, str] = {}

    def made(value: Any) -> Any:
        if not isinstance(value, WrittenList):
            return _made(value)
        mark = secrets.token_hex(16)  # in no text of the user's
        written[f'"{mark}"'] = f"[{', '.join(value.items)}]"
        return mark

    text = json.dumps(plain, default=made)
    for mark, items in written.items():
        text = text.replace(mark, items, 1)
    return text


def _made(value: Any) -> Any:
    if not isinstance(value, Later):
        raise TypeError(f"{type(value).__name__} is not plain data")
    found = packed(value.make())
    assert not found.tensors  # they would have to be copied before training goes on
    return found.plain


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return `value` as plain JSON, and put its tensors into `tensors` under their paths.

    JSON has neither tuples nor integer keys; they are tagged, so that `unpack` returns the types
    that went in. `Later` stays as it is: see `json_text`.
    """
    kind = type(value)
    if kind in _PLAIN or kind in (Later, WrittenList) or isinstance(value, str):
        return value
    if kind is dict:  # before all checks that a dict would go through
        return _pack_mapping(value, tensors, path)
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
        if _PLAIN.issuperset(map(type, value)):
            items = list(value)
        else:
            items = [pack(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
        name = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k)).__name__
        return items if name == "list" else {_TAG: name, "items": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, tensors, path)
    if isinstance(value, (int, float)):
        return value + 0
    raise CheckpointError(
        f"cannot save {path or 'this state'}: {type(value).__name__} is neither plain data nor a "
        "tensor; make the object's state_dict() return numbers, strings, lists, dicts and tensors"
    )


def _put(tensors: dict[str, Tensor], path: str, tensor: Tensor) -> str:
    """Store `tensor` under its path and return the name it got."""
    # Two tensors can spell the same path: a dot in a key, or the keys 1 and "1".
    names = chain([path], (f"{path}~{number}" for number in count(2)))
    name = next(name for name in names if name not in tensors)
    tensors[name] = tensor
    return name


def _pack_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    kind = "counter" if isinstance(value, Counter) else "dict"
    words = {*map(type, value)} <= {str} or all(isinstance(key, str) for key in value)
    if kind == "dict" and words and _TAG not in value:
        if _PLAIN.issuperset(map(type, value.values())):
            return dict(value)
        return {
            key: pack(item, tensors, f"{path}.{key}" if path else key)
            for key, item in value.items()
        }
    pairs = [
        [pack(key, tensors, f"{path}.key{i}"), pack(item, tensors, f"{path}.{key}")]
        for i, (key, item) in enumerate(value.items())
    ]
    return {_TAG: kind, "pairs": pairs}


def copied(value: Any) -> Any:
    """A deep copy of a state. Lists of plain numbers, which states have many of, are copied at
    once: training stands still meanwhile."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        plain = _PLAIN.issuperset(map(type, value))
        return list(value) if plain else [copied(item) for item in value]
    return copy.deepcopy(value)


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
            raise TypeError(f"torch.{value['name']} is not a dtype")
        return found
    if kind in ("dict", "counter"):
        pairs = {unpack(k, tensors): unpack(v, tensors) for k, v in value["pairs"]}
        return Counter(pairs) if kind == "counter" else pairs
    items = [unpack(item, tensors) for item in value["items"]]
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def to_text(value: Any) -> dict[str, Any]:
    """Return a state as JSON alone, tensors included, to send between ranks."""
    tensors: dict[str, Tensor] = {}
    plain = pack(value, tensors)
    if not tensors:
        return {"plain": plain, "tensors": _NO_TENSORS}
    raw = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    return {"plain": plain, "tensors": base64.b64encode(raw).decode()}


def from_text(text: dict[str, Any]) -> Any:
    """The inverse of `to_text`."""
    return unpack(text["plain"], load(base64.b64decode(text["tensors"])))


def to_bytes(value: Any) -> bytes:
    """Return a state as bytes, for much data: the JSON's length, the JSON, the tensors."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(pack(value, tensors)).encode()
    raw = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    return len(plain).to_bytes(8, "little") + plain + raw


def from_bytes(raw: bytes) -> Any:
    """The inverse of `to_bytes`."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return unpack(json.loads(raw[8:end]), load(raw[end:]))


def _portable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert types that torch lacks to wider ones; `unpack` casts back."""
    wider = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
    return array.astype(wider.get(str(array.dtype), array.dtype))


# Models, optimizers, generators


def plain_name(name: str) -> str:
    """The name of a tensor in the model as it was before `torch.compile`, which wraps it."""
    return name.replace("_orig_mod.", "")


def model_state(
    state: Mapping[str, Any], held: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Split a state_dict: tensors by name, names that share another's memory, and the rest.
    held: what this rank has of a tensor that is split over ranks."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            extra[name] = value
            continue
        part = held(value)
        place = (value.device, part.data_ptr(), value.shape, value.stride(), value.dtype)
        owner = owners.setdefault(place, name) if part.numel() else name
        if owner != name:
            aliases[name] = owner
        else:
            tensors[name] = value
    return tensors, aliases, extra


def load_model_state(
    model: nn.Module,
    tensors: dict[str, Tensor],
    aliases: dict[str, str],
    extra: dict[str, Any],
    where: str,
    remedy: str = "Resume with the model that wrote it, or start a new run with another --run-name",
) -> None:
    """Copy saved state into the model; the error names everything that does not fit."""
    saved: dict[str, Any] = {**tensors, **extra}
    saved |= {name: tensors[owner] for name, owner in aliases.items()}
    saved = {plain_name(name): value for name, value in saved.items()}
    real_names = {plain_name(name): name for name in model.state_dict()}
    own = {plain_name(name): value for name, value in model.state_dict().items()}
    problems = [f"{name} is missing" for name in own.keys() - saved.keys()]
    problems += [f"{name} is not in this model" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        mine, theirs = own[name], saved[name]
        if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
            continue
        if mine.shape != theirs.shape:
            problems.append(
                f"{name} has shape {tuple(theirs.shape)}, the model wants {tuple(mine.shape)}"
            )
        elif mine.dtype != theirs.dtype:
            problems.append(f"{name} is {theirs.dtype}, the model wants {mine.dtype}")
    if problems:
        shown = sorted(problems)[:6]
        more = f"\n  ... and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(
            f"{where} belongs to another model:\n"
            + "\n".join(f"  - {line}" for line in shown)
            + more
            + f"\n{remedy}",
            code="MGT702",
        )
    model.load_state_dict({real_names[name]: value for name, value in saved.items()})


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Name every parameter of the optimizer, also those that are not in the model."""
    names: dict[Tensor, str] = {p: plain_name(name) for name, p in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"group{g}.{i}")
    return names


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return state keyed by parameter name, which does not depend on order or sharding."""
    names = parameter_names(model, optimizer)
    return {
        "state": {names[p]: dict(state) for p, state in optimizer.state.items()},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], where: str
) -> None:
    """Give a freshly built optimizer the saved state; `where` names its origin in errors."""
    names = parameter_names(model, optimizer)
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    saved = {
        "state": {plain_name(name): values for name, values in saved["state"].items()},
        "groups": [
            {**group, "params": [plain_name(name) for name in group["params"]]}
            for group in saved["groups"]
        ],
    }
    theirs = [group["params"] for group in saved["groups"]]
    if mine != theirs:
        raise CheckpointError(
            f"{where}: its optimizer has {len(theirs)} groups of "
            f"{[len(g) for g in theirs]} parameters, this one {[len(g) for g in mine]}; build the "
            "optimizer as the run that wrote it did",
            code="MGT702",
        )
    numbers = {name: i for i, name in enumerate(n for group in mine for n in group)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in saved["groups"]
    ]
    state = {numbers[name]: values for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _restore_strides(optimizer)


def keep_tensors(optimizer: Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    """Copy freshly loaded values into the tensors that the optimizer had `before`."""
    # Recorded steps keep reading those tensors.
    for parameter, state in optimizer.state.items():
        for key, old in before.get(parameter, {}).items():
            new = state.get(key)
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
                state[key] = old.copy_(new)


def _restore_strides(optimizer: Optimizer) -> None:
    """Lay out momenta as their parameters are."""
    # Files hold no strides. Fused optimizers walk memory in order: momenta laid out differently
    # from their channels-last parameter would be applied to the wrong weights.
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's generators: torch, numpy, Python and the GPU."""
    state: dict[str, Any] = taken_random_state(device).make()
    return state


def taken_random_state(device: torch.device) -> Later:
    """`random_state` as it is now, still to be made thousands of plain numbers."""
    version, keys, gauss = random.getstate()
    name, words, place, has_gauss, cached = np.random.get_state()
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type != "cpu":
        tensors[device.type] = device_generators(device)[0].get_state()
    return Later(
        lambda: {
            **{kind: state.tolist() for kind, state in tensors.items()},
            "python": [version, list(keys), gauss],
            "numpy": [name, np.asarray(words).tolist(), int(place), int(has_gauss), float(cached)],
        }
    )


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), place, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)
    elif device.type != "cpu" and device.type in state:
        saved = torch.tensor(state[device.type], dtype=torch.uint8)
        device_generators(device)[0].set_state(saved)
