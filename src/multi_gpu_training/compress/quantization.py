"""Quantise the weights of a model, and for int8-dynamic its activations, with torchao.

| scheme       | Linear                              | convolution, embedding |
|--------------|-------------------------------------|------------------------|
| int8         | int8 weights, one scale per output  | int8 weights           |
| int8-dynamic | the same, int8 activations          | int8 weights           |
| int4         | int4 weights, one scale per `group` | int8 weights           |

Everything else stays as it is: norms, biases, LSTMs, and weights that a module keeps outside such
layers. `Quantised.kept` counts them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training.compress import SCHEMES
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.extras import install, installed

GROUP = 32
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Quantised:
    """What happened to the parameters of a model."""

    int8: int
    int4: int
    kept: int  # parameters that stay in floating point
    fallbacks: tuple[str, ...]  # layers that int4 does not fit; they have int8 weights


def quantize(model: nn.Module, scheme: str, group: int = GROUP) -> Quantised:
    """Quantise `model` in place. The result depends on its shapes and weights alone."""
    check_scheme(scheme, group)
    linear_from_conv1d(model)
    torchao = import_torchao()
    shared = _shared_parameters(model)
    of_linear = torchao.linear_config(scheme, group)
    fallbacks, counts = [], {"int8": 0, "int4": 0}
    done: set[int] = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not _is_quantisable(module) or id(weight) in done:
            continue
        # A weight that an embedding shares with the last layer keeps one form: int8.
        is_linear = type(module) is nn.Linear
        by_config = is_linear and not _has_embedding(shared.get(id(weight), []))
        if by_config and scheme == "int4" and module.in_features % group:
            fallbacks.append(name)
            by_config = False
        counts["int4" if by_config and scheme == "int4" else "int8"] += module.weight.numel()
        with quietly():
            if by_config:
                torchao.quantize_(module, of_linear, lambda child, _, this=module: child is this)
            else:
                module.weight = torchao.int8_weight(module.weight)
        done.add(id(module.weight))
        for other, attribute in shared.get(id(weight), []):
            setattr(other, attribute, module.weight)
    total = sum(p.numel() for p in model.parameters())
    kept = total - counts["int8"] - counts["int4"]
    return Quantised(counts["int8"], counts["int4"], kept, tuple(fallbacks))


def with_float_weights(model: nn.Module) -> nn.Module:
    """A copy of a quantised model whose weights are the float numbers that they stand for."""
    found = copy.deepcopy(model)
    made: dict[int, nn.Parameter] = {}  # a shared weight stays shared
    for module in found.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if hasattr(weight, "qdata"):
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(weight.dequantize(), requires_grad=False)
                setattr(module, name, made[id(weight)])
    return found


def check_scheme(scheme: str, group: int = GROUP) -> None:
    problems = []
    if scheme not in SCHEMES:
        problems.append(f"quantize={scheme!r} is unknown; use {', '.join(SCHEMES)}")
    if group < 2 or group & (group - 1):
        problems.append(f"group={group}: use a power of two, such as {GROUP}")
    if not installed("torchao"):
        problems.append(f"quantisation needs torchao; run {install('compress')}")
    if problems:
        raise ConfigError(problems)


def _is_quantisable(module: nn.Module) -> bool:
    # Subclasses may read their weights in ways of their own, as nn.MultiheadAttention does.
    return type(module) in (nn.Linear, nn.Embedding, *CONVOLUTIONS)


def _has_embedding(owners: list[tuple[nn.Module, str]]) -> bool:
    return any(isinstance(module, nn.Embedding) for module, _ in owners)


def _shared_parameters(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Owners of each parameter that has several, by the parameter's id."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return {key: found for key, found in owners.items() if len(found) > 1}


def linear_from_conv1d(model: nn.Module) -> int:
    """Replace the Conv1D layers of Hugging Face's GPT-2 by the Linear layers that they are with
    their weights transposed. Returns how many there were."""
    found: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == "Conv1D" and hasattr(child, "nf")
    ]
    for parent, name, child in found:
        weight, bias = child.weight, child.bias
        inputs, outputs = weight.shape
        made = nn.Linear(inputs, outputs, device="meta")
        made.weight = nn.Parameter(weight.detach().T.contiguous(), weight.requires_grad)
        made.bias = bias
        setattr(parent, name, made.train(child.training))
    return len(found)


# torchao


class Torchao:
    """What is used of torchao."""

    def __init__(self) -> None:
        from torchao import quantization
        from torchao.quantization.granularity import PerGroup

        self.quantize_: Callable[..., None] = quantization.quantize_
        self._configs: Any = quantization
        self._per_group: Any = PerGroup
        self._tensor: Any = quantization.IntxUnpackedToInt8Tensor
        for convolution in (F.conv1d, F.conv3d):  # it knows conv2d
            self._tensor.implements_torch_function(convolution)(_with_plain_weight)

    def linear_config(self, scheme: str, group: int) -> Any:
        if scheme == "int8":
            return self._configs.Int8WeightOnlyConfig()
        if scheme == "int8-dynamic":
            return self._configs.Int8DynamicActivationInt8WeightConfig()
        return self._configs.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, "int4"),  # noqa: B009, unknown to the stubs of torch
            granularity=self._per_group(group),
        )

    def int8_weight(self, weight: Tensor) -> nn.Parameter:
        """int8 with one scale per output channel, or per row of an embedding."""
        made = self._tensor.from_hp(weight.detach(), (1, *weight.shape[1:]), torch.int8)
        return nn.Parameter(made, requires_grad=False)


def _with_plain_weight(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    inputs, weight, *rest = args
    return func(inputs, weight.dequantize(), *rest, **(kwargs or {}))


def import_torchao() -> Torchao:
    with quietly():
        return Torchao()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """torchao warns about GPU libraries of its own that a machine does not have."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
