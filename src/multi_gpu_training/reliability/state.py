"""Model and optimizer state by parameter name, copied back into what was freshly built."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.errors import CheckpointError


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Tensors by plain name, names that share another's memory, and state that is no tensor."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            extra[name] = value
            continue
        place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        owner = owners.setdefault(place, name) if value.numel() else name
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
) -> None:
    """Copy into the model; anything that does not fit is an error that names it."""
    saved: dict[str, Any] = {**tensors, **extra}
    saved |= {name: tensors[owner] for name, owner in aliases.items()}
    problems = []
    own = model.state_dict()
    for name in own.keys() - saved.keys():
        problems.append(f"{name} is missing")
    for name in saved.keys() - own.keys():
        problems.append(f"{name} is not in this model")
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
            + "\nResume with the model that wrote it, or start a new run with another --run-name"
        )
    model.load_state_dict(saved)


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"group{g}.{i}")
    return names


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State keyed by parameter name, so that it fits whatever order or sharding comes later."""
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
    names = parameter_names(model, optimizer)
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in saved["groups"]]
    if mine != theirs:
        raise CheckpointError(
            f"{where}: its optimizer has {len(theirs)} groups of "
            f"{[len(g) for g in theirs]} parameters, this one {[len(g) for g in mine]}; build the "
            "optimizer as the run that wrote it did"
        )
    numbers = {name: i for i, name in enumerate(n for group in mine for n in group)}
    count = 0
    groups = []
    for group in saved["groups"]:
        size = len(group["params"])
        groups.append({**group, "params": list(range(count, count + size))})
        count += size
    state = {numbers[name]: values for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _restore_strides(optimizer)


def keep_tensors(optimizer: Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    """Put values that were just loaded into the tensors the optimizer had `before`: recorded
    steps go on reading those."""
    for parameter, state in optimizer.state.items():
        for key, old in before.get(parameter, {}).items():
            new = state.get(key)
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
                state[key] = old.copy_(new)


def _restore_strides(optimizer: Optimizer) -> None:
    """Files hold no strides. Fused optimizers walk memory in order, so that momenta laid out
    otherwise than their channels-last parameter would be applied to the wrong weights."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def random_state(device: torch.device) -> dict[str, Any]:
    """This rank's generators: torch, numpy, Python, and the GPU's."""
    version, keys, gauss = random.getstate()
    name, words, place, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state().tolist(),
        "python": [version, list(keys), gauss],
        "numpy": [name, np.asarray(words).tolist(), int(place), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).tolist()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), place, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)
