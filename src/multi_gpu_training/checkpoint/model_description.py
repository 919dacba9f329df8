"""What a checkpoint says about its own model: plain data, from which it can be rebuilt later.

A recipe describes its models itself. For a script it is what `setup_training(description=...)`
gives, or as much as can be told from the model: the name of its class or of the function that
built it. Names are recorded here, and imported only by whoever loads the model and agrees to it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.errors import ConfigError

FORMAT = 1
# Parts of these build nothing by themselves: a Sequential needs its layers.
_LIBRARIES = ("multi_gpu_training.", "torch.")


def model_description(model: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The description to save with `model`, which is a module or a function that builds one. What
    the user gives comes before what can be told from the model."""
    found = _own_words(model)
    if given is not None:
        if "model" in given:
            found = {}  # recorded arguments would be those of another function
        try:
            found |= json.loads(json.dumps(dict(given), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"description cannot be written as JSON ({error}); use numbers, texts, lists and "
                "dicts with texts as keys"
            ) from None
        _check_tensors(found)
        if callable(given.get("model")):
            raise ConfigError("description: give the model as text, package.module:Name")
    return {"format": FORMAT, **found} if found else {}


def _check_tensors(found: Mapping[str, Any]) -> None:
    """Refuse inputs and outputs that could not be read when the model is loaded."""
    for which in ("inputs", "outputs"):
        for number, one in enumerate(found.get(which) or ()):
            shape = one.get("shape") if isinstance(one, dict) else None
            kind = one.get("dtype", "float32") if isinstance(one, dict) else None
            if not isinstance(shape, list) or not shape:
                problem = 'a shape such as ["batch", 8]'
            elif not isinstance(getattr(torch, str(kind), None), torch.dtype):
                problem = f"a dtype of torch, such as float32, not {str(kind)[:40]!r}"
            else:
                continue
            raise ConfigError(f"description: {which}[{number}] needs {problem}")


def described_inputs(model: nn.Module, given: Any, batch: Any) -> list[dict[str, Any]] | None:
    """What `model(*inputs)` takes, from an `(inputs..., target)` batch as the data gave it and as
    the loss gets it; of a dict what `model(**inputs)` takes, all but the labels. None where that
    cannot be told: `augment` may have changed the form."""
    if isinstance(given, Mapping) and isinstance(batch, Mapping):
        return _keyword_inputs(given, batch)
    forms = [_forms(part) for part in (given, batch)]
    if forms[0] is None or forms[0] != forms[1]:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names: list[str] = []
    with suppress(TypeError, ValueError):  # written in C: no signature
        parameters = inspect.signature(model.forward).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    names += [f"input{number}" for number in range(len(names), len(forms[0]))]
    return [
        {"name": name, "dtype": dtype, "shape": ["batch", *shape]}
        for name, (dtype, shape) in zip(names, forms[0], strict=False)
    ]


def _keyword_inputs(
    given: Mapping[str, Any], batch: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    names = [name for name in batch if name != "labels"]
    target: list[Any] = [None]  # stands where a list has its target
    forms = [_forms([part.get(name) for name in names] + target) for part in (given, batch)]
    if forms[0] is None or forms[0] != forms[1] or "labels" not in batch:
        return None
    return [
        {"name": name, "dtype": dtype, "shape": ["batch", *shape], "keyword": True}
        for name, (dtype, shape) in zip(names, forms[0], strict=True)
    ]


def _forms(batch: Any) -> list[tuple[str, tuple[int, ...]]] | None:
    """Type and shape of a sample of each input."""
    if not isinstance(batch, (list, tuple)) or len(batch) < 2:
        return None
    *inputs, _ = batch
    if not all(isinstance(one, Tensor) and one.ndim and not one.is_nested for one in inputs):
        return None
    if len({len(one) for one in inputs}) != 1:
        return None
    return [(str(one.dtype).removeprefix("torch."), tuple(one.shape[1:])) for one in inputs]


def _own_words(model: Any) -> dict[str, Any]:
    """Where the model comes from, and with which arguments if a function was given with them."""
    arguments: dict[str, Any] | None = None
    positional: tuple[Any, ...] = ()
    maker = type(model) if isinstance(model, nn.Module) else model
    if isinstance(maker, functools.partial):
        positional, arguments = maker.args, dict(maker.keywords)
        maker = maker.func
    elif not isinstance(model, nn.Module):
        arguments = {}
    module, name = getattr(maker, "__module__", None), getattr(maker, "__qualname__", None)
    if not module or not name or f"{module}.".startswith(_LIBRARIES):
        return {}
    found: dict[str, Any] = {"model": f"{module}:{name}"}
    if positional and arguments is not None:
        try:
            arguments = {
                **inspect.signature(maker).bind_partial(*positional).arguments,
                **arguments,
            }
        except (TypeError, ValueError):
            arguments = None
    unrecorded = {n: type(v).__name__ for n, v in (arguments or {}).items() if not _is_plain(v)}
    if unrecorded:
        found["unrecorded"] = unrecorded
    elif arguments is not None:
        found["arguments"] = arguments
    return found


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
