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
from typing import Any

from torch import nn

from multi_gpu_training.errors import ConfigError

FORMAT = 1
# Parts of these build nothing by themselves: a Sequential needs its layers.
_LIBRARIES = ("multi_gpu_training.", "torch.")


def model_description(model: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The description to save with `model`, which is a module or a function that builds one."""
    if given is None:
        found = _own_words(model)
    else:
        try:
            found = json.loads(json.dumps(dict(given), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"description cannot be written as JSON ({error}); use numbers, texts, lists and "
                "dicts with texts as keys"
            ) from None
        if callable(given.get("model")):
            raise ConfigError("description: give the model as text, package.module:Name")
    return {"format": FORMAT, **found} if found else {}


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
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError):
        arguments = None
    if arguments is not None:
        found["arguments"] = arguments
    return found
