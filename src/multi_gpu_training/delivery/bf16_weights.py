"""Weights in bf16: half the memory, and matrix products in bf16 with float32 results.

Both factors of a product are rounded to bf16, which tensor cores multiply exactly and add up in
float32. That sum is not rounded again, so what runs through the layers, norms, softmax and the
scores stay in float32. Autocast rounds every result: bf16 has steps of 0.06 at 13, and where two
scores are closer than that, it chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training.accelerator import computes_bf16, device_name
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_output import brief

DTYPES = ("float32", "bf16")


def check_dtype(dtype: str, device: torch.device) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={brief(dtype)}: use {' or '.join(DTYPES)}")
    if dtype == "bf16" and not computes_bf16(device):
        raise ConfigError(f"dtype=bf16, but {device_name(device)} computes no bf16; use float32")


class Bf16Weight(Tensor):
    """A weight in bf16 that calls itself float32, as what layers compute with it is: models ask
    their weights which type inputs and states should have."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        product = _WITH_WEIGHTS.get(func)
        if product is None:
            other = super().__torch_function__
            return other(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        named = {name: _plain(one) for name, one in (kwargs or {}).items()}
        return product(*map(_plain, args), **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bf16Weight:
        memo[id(self)] = copied = _as_parameter(_plain(self).clone())
        return cast(Bf16Weight, copied)


def _plain(given: Any) -> Any:
    return given.as_subclass(Tensor) if isinstance(given, Bf16Weight) else given


def _as_parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().as_subclass(Bf16Weight), requires_grad=False)


def _product(inputs: Tensor, matrix: Tensor) -> Tensor:
    """inputs @ matrix in float32, of factors in bf16."""
    rows = inputs.reshape(-1, inputs.shape[-1]).bfloat16()
    if rows.is_cuda:
        found = torch.mm(rows, matrix, out_dtype=torch.float32)
    else:  # no such operation: the same numbers, without the speed
        found = rows.float() @ matrix.float()
    return found.view(*inputs.shape[:-1], matrix.shape[1])


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = _product(inputs, weight.t())
    return found if bias is None else found + bias


def _addmm(bias: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    return _product(inputs, weight) + bias


def _convolution(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(
        inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any, **more: Any
    ) -> Tensor:
        inputs = inputs.bfloat16()
        if inputs.is_cuda:
            found = func(inputs, weight, None, *how, **more).float()
        else:
            found = func(inputs.float(), weight.float(), None, *how, **more)
        return found if bias is None else found + bias.view(-1, *[1] * (weight.ndim - 2))

    return call


_WITH_WEIGHTS: dict[Any, Callable[..., Any]] = {
    Tensor.dtype.__get__: lambda weight: torch.float32,  # type: ignore[attr-defined]
    F.linear: _linear,
    torch.addmm: _addmm,  # Conv1D of transformers' GPT-2
    **{func: _convolution(func) for func in (F.conv1d, F.conv2d, F.conv3d)},
}


def put_in_bf16(model: nn.Module) -> None:
    """Keep the float32 weights of linear layers and convolutions in bf16. Embeddings, and what is
    tied to them, stay: what they give is no product, so their rounding would go through all layers.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(id(weight), []).append(module)
    for weight in list(model.parameters()):
        users = owners[id(weight)]
        own = all(_takes_bf16(user) and user.weight is weight for user in users)
        if own and weight.dtype is torch.float32:
            kept = _as_parameter(weight.bfloat16())
            for user in users:
                user.weight = kept


def is_in_bf16(model: nn.Module) -> bool:
    return any(isinstance(weight, Bf16Weight) for weight in model.parameters())


def put_in_float32(model: nn.Module) -> None:
    """The same numbers in plain float32 weights."""
    kept: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Bf16Weight):
            wide = nn.Parameter(_plain(weight).detach().float())
            module.weight = kept.setdefault(id(weight), wide)


def _takes_bf16(module: nn.Module) -> bool:
    # Subclasses may read their weights in ways of their own, as nn.MultiheadAttention does.
    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return type(module) in known or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
