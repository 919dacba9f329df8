"""Trained parameters that belong to the loss: a criterion's own, or a learned temperature.

As in plain PyTorch, the optimizer decides: what it holds is trained. Ranks exchange, clip, compare
and save these parameters like those of the model.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.errors import ModelError
from multi_gpu_training.torch_internals import CriterionBase
from multi_gpu_training.training.loss import LossFn, ModuleLoss, SupervisedLoss

_DEPTH = 3  # nesting depth of containers and objects that is searched


def criterion_of(loss_fn: LossFn) -> nn.Module | None:
    """The user's own loss module, if any; torch's criteria hold only settings."""
    module = loss_fn.module if isinstance(loss_fn, ModuleLoss) else None
    if isinstance(loss_fn, SupervisedLoss):
        module = loss_fn.criterion
    return None if isinstance(module, CriterionBase) else module


def trainable(loss_fn: LossFn, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of a criterion that an optimizer may move beside the model's."""
    criterion, own = criterion_of(loss_fn), {id(p) for p in model.parameters()}
    found = () if criterion is None else criterion.parameters()
    return [p for p in found if p.requires_grad and id(p) not in own]


def parts_beside(loss_fn: LossFn, model: nn.Module, optimizer: Optimizer) -> nn.Module | None:
    """What the loss uses and the optimizer moves besides the model, as one module; None if there is
    nothing. A parameter that belongs to neither model nor loss is an error."""
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = {id(p) for p in held if id(p) not in own}
    criterion, beside = criterion_of(loss_fn), nn.Module()
    if criterion is not None and _belongs(criterion, strangers):
        beside.add_module("criterion", criterion)
    missing = strangers - {id(p) for p in beside.parameters()}
    if missing and len(strangers) < len(held):
        for name, part in _used_by(loss_fn, missing):
            if isinstance(part, nn.Parameter):
                beside.register_parameter(_free(beside, name), part)
            else:
                beside.add_module(_free(beside, name), part)
        missing -= {id(p) for p in beside.parameters()}
    if missing:
        raise ModelError(
            f"the optimizer holds {len(missing)} parameters that are neither the model's nor found "
            "in the loss function; build it from this model's parameters, or give a function of "
            "them. What the loss trains may be a criterion, or a variable that loss_fn uses"
        )
    return beside if [*beside.parameters(), *beside.buffers()] else None


def _belongs(criterion: nn.Module, strangers: set[int]) -> bool:
    """Whether a criterion takes part in training: the optimizer moves it, or it has no parameters
    but keeps statistics, which ranks share and checkpoints hold."""
    parameters = list(criterion.parameters())
    if not parameters:
        return any(True for _ in criterion.buffers())
    return any(id(p) in strangers for p in parameters)


def describe(loss_fn: LossFn, model: nn.Module, beside: nn.Module | None) -> str | None:
    """A line that says which parameters of the loss are trained, and which are not."""
    if beside is not None and (count := sum(p.requires_grad for p in beside.parameters())):
        names = ", ".join(name for name, _ in beside.named_parameters())
        return f"loss: {count} parameters are trained with the model's: {names}"
    if left := trainable(loss_fn, model):
        name = type(criterion_of(loss_fn)).__name__
        return (
            f"loss: {len(left)} parameters of {name} are not trained: the optimizer does not hold "
            "them; add them to it, or freeze them with requires_grad_(False)"
        )
    return None


class LossState:
    """Checkpoint state of the parts besides the model; a part may contain the model itself."""

    def __init__(self, beside: nn.Module, model: nn.Module) -> None:
        self._beside, self._model = beside, model

    def state_dict(self) -> dict[str, Any]:
        own = {id(value) for value in self._model.state_dict(keep_vars=True).values()}
        found = self._beside.state_dict(keep_vars=True)
        return {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in found.items()
            if id(value) not in own
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved.keys() != self.state_dict().keys():
            raise ValueError(
                f"the loss had {', '.join(saved)} to train, and has {', '.join(self.state_dict())}"
            )
        self._beside.load_state_dict(saved, strict=False)


def _free(module: nn.Module, name: str) -> str:
    name = name.replace(".", "_") or "part"
    while hasattr(module, name):
        name += "_"
    return name


# What a loss function uses


def _used_by(loss_fn: Any, wanted: set[int]) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """The modules and parameters a function can reach that are, or contain, wanted ones."""
    pending: list[tuple[str, Any, int]] = [("loss_fn", loss_fn, 0)]
    seen: set[int] = set()
    while pending:
        name, value, depth = pending.pop(0)
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Parameter):
            if id(value) in wanted:
                yield name, value
        elif isinstance(value, nn.Module):
            if any(id(p) in wanted for p in value.parameters()):
                yield name, value
        elif isinstance(value, types.FunctionType):  # functions do not add depth
            pending += [(n, v, depth) for n, v in _variables(value)]
        else:
            pending += [(n, v, depth + 1) for n, v in _contents(value)]


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code, scope = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # an empty closure cell
    for name in _global_names(code):
        if name in scope and not isinstance(scope[name], types.ModuleType):
            yield name, scope[name]
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _contents(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        return [("function", value.func), *_contents(value.args), *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, (list, tuple)):
        return [(f"part{i}", item) for i, item in enumerate(value[:64])]
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in list(value.items())[:64]]
    if isinstance(value, (type, Tensor)) or type(value).__module__ == "builtins":
        return ()
    call = vars(type(value)).get("__call__")
    own = list(getattr(value, "__dict__", {}).items())
    return [*own, ("call", call)] if isinstance(call, types.FunctionType) else own
