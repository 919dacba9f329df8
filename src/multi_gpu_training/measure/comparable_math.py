"""Run the user's loss in float64, and let its random numbers belong to samples.

Both take effect inside a `with` around the loss function, without a change to the script: torch
asks an active function mode before it runs an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from multi_gpu_training.data.order import derive_seed

_DRAWS = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.bernoulli, torch.multinomial, torch.poisson, torch.dropout),
    *(Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_),
    *(Tensor.log_normal_, Tensor.geometric_, Tensor.cauchy_),
    *(Tensor.bernoulli, Tensor.multinomial),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(F.rrelu, torch.rrelu),
    F.gumbel_softmax,  # what a function of torch draws inside does not come by here
}
_ON_ACTIVATIONS = {  # which may have several rows per sample: words, heads
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, F.scaled_dot_product_attention),
}


class DoubleMath(TorchFunctionMode):
    """Turns float32 into float64 where a script asks for it by name: `x.float()`,
    `torch.zeros(n)`, `dtype=torch.float32`; and where an operation refuses a mixture."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(_wider(arg) for arg in args)
        kwargs = {key: _wider(value) for key, value in (kwargs or {}).items()}
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if _in_place(func) or "type" not in str(error):
                raise
            return func(*(_doubled(a) for a in args), **{k: _doubled(v) for k, v in kwargs.items()})
        # A result of counts and masks, such as a quotient, is made here as well.
        made_here = isinstance(result, Tensor) and not any(_holds_float(arg) for arg in args)
        asked = "dtype" in kwargs or func is torch.from_numpy
        return _doubled(result) if made_here and not asked and not result.requires_grad else result


class SampleNoise(TorchFunctionMode):
    """Draws a sample's random numbers from (step, call, sample), so that they do not depend on
    which rank holds it. Draws from a script's own generators are left alone."""

    def __init__(self, step: int, keys: Sequence[int]) -> None:
        super().__init__()
        self.step = step
        self.keys = keys
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func not in _DRAWS:
            before = torch.default_generator.get_state()
            result = func(*args, **kwargs)
            if torch.equal(before, torch.default_generator.get_state()) or _in_place(func):
                return result
            # An operation that draws inside, such as attention with dropout: once more by sample.
        self.calls += 1
        count = len(self.keys)
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.ndim and (each := self._rows_each(func, first)):
            parts = []
            for number, key in enumerate(self.keys):
                self._seed(key)
                rows = slice(number * each, (number + 1) * each)
                parts.append(
                    func(
                        *(_cut(value, rows, count * each) for value in args),
                        **{name: _cut(value, rows, count * each) for name, value in kwargs.items()},
                    )
                )
            return first if _in_place(func) else torch.cat(parts)
        sizes = _one_row(args, kwargs, count)
        if sizes is not None:
            parts = []
            for key in self.keys:
                self._seed(key)
                parts.append(func(*sizes[0], **sizes[1]))
            return torch.cat(parts)
        self._seed(0)
        return func(*args, **kwargs)

    def _rows_each(self, func: Callable[..., Any], first: Tensor) -> int:
        """How many rows of a tensor belong to each sample; 0 where its rows are not samples."""
        each, left = divmod(first.shape[0], len(self.keys) or 1)
        return each if not left and (each == 1 or func in _ON_ACTIVATIONS) else 0

    def _seed(self, key: int) -> None:
        torch.default_generator.manual_seed(derive_seed(self.step, self.calls, key))


def _in_place(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "").endswith("_")


def _cut(value: Any, rows: slice, count: int) -> Any:
    """These rows of a tensor that has one for each of `count`; anything else as it is."""
    fits = isinstance(value, Tensor) and value.ndim and value.shape[0] == count
    return value[rows] if fits else value


def _one_row(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a draw of `count` rows as those of one row; None where it is none."""
    for place, value in enumerate(args):
        if isinstance(value, (tuple, list, torch.Size)) and value and value[0] == count:
            return (*args[:place], (1, *value[1:]), *args[place + 1 :]), kwargs
    if len(args) > 1 and all(isinstance(a, int) for a in args) and args[0] == count:
        return (1, *args[1:]), kwargs
    size = kwargs.get("size")
    if size and size[0] == count:
        return args, {**kwargs, "size": (1, *size[1:])}
    return None


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        return value.double()
    if type(value) in (list, tuple):
        return type(value)(_doubled(part) for part in value)
    return value


def _holds_float(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_float(part) for part in value)
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
