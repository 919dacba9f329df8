"""The arguments of `manager.prepare`: modules, optimizers and schedulers of one training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import CheckpointError, ModelError
from multi_gpu_training.state_dicts import load_optimizer_state, optimizer_state, parameter_names
from multi_gpu_training.training.learning_rate import Schedule


def sort_out(
    parts: Sequence[Any],
) -> tuple[nn.Module, list[Optimizer], list[LRScheduler]]:
    """Split `parts` into model, optimizers and schedulers. Several modules become one, each named
    after its class; optimizer parameters that no module holds are added to it."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    optimizers = [part for part in parts if isinstance(part, Optimizer)]
    schedulers = [part for part in parts if isinstance(part, LRScheduler)]
    strange = [p for p in parts if not isinstance(p, (nn.Module, Optimizer, LRScheduler))]
    if strange:
        raise ModelError(
            f"prepare got a {type(strange[0]).__name__}; it takes modules, torch optimizers and "
            "their schedulers. Data go into dataset=, anything else to be saved into states="
        )
    if not modules or not optimizers:
        raise ModelError(
            f"prepare got {len(modules)} modules and {len(optimizers)} optimizers; it needs at "
            "least one of each: prepare(model, optimizer)"
        )
    for scheduler in schedulers:
        if not any(scheduler.optimizer is one for one in optimizers):
            raise ModelError(
                f"prepare got a {type(scheduler).__name__} of an optimizer that it did not get "
                f"({type(scheduler.optimizer).__name__}): the rates of none would change; give "
                "prepare its optimizer, or make the scheduler with one that prepare gets"
            )
    known = {id(p) for module in modules for p in module.parameters()}
    loose = [
        p
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) not in known
    ]
    if not all(isinstance(p, nn.Parameter) for p in loose):
        raise ModelError(
            "an optimizer holds a tensor that belongs to no module and is not an nn.Parameter: it "
            "could not be saved; write nn.Parameter(torch.zeros(1)), or put it into a module"
        )
    if len(modules) == 1 and not loose:
        return modules[0], optimizers, schedulers
    # Names by class and count: they must be the same in the run that resumes.
    named = nn.ModuleDict()
    for module in modules:
        name = type(module).__name__
        same = sum(key.rstrip("0123456789") == name for key in named)
        named[f"{name}{same + 1}" if same else name] = module
    if loose:
        named["parameters_of_optimizers"] = nn.ParameterList(loose)
    return named, optimizers, schedulers


class FurtherOptimizers:
    """The state of all optimizers after the first and of their schedules, saved with a run."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        config: MultiGPUConfig,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._schedules = schedules
        self._anyway = config.resume_anyway
        self._made_with = [_settings(model, optimizer) for optimizer in optimizers]

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer_state(self._model, one) for one in self._optimizers],
            "schedules": [schedule.state_dict() for schedule in self._schedules],
            "made_with": self._made_with,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        then, now = state["made_with"], self._made_with
        if then != now and not self._anyway:
            raise CheckpointError(
                "the optimizers after the first one were made with other settings, kinds or "
                f"parameters than in the checkpoint: {_difference(then, now)}. Build them as the "
                "run that wrote it did; resume_anyway=true keeps the checkpoint's",
                code="MGT702",
            )
        for number, optimizer in enumerate(self._optimizers):
            where = f"optimizer {number + 2} of the checkpoint"
            load_optimizer_state(self._model, optimizer, state["optimizers"][number], where)
        for schedule, saved in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)


def _settings(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = parameter_names(model, optimizer)
    groups = [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        | {"params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def _difference(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    if [one["kind"] for one in then] != [one["kind"] for one in now]:
        return f"{[one['kind'] for one in then]}, now {[one['kind'] for one in now]}"
    for number, (old, new) in enumerate(zip(then, now, strict=True), 2):
        for one, other in zip(old["groups"], new["groups"], strict=False):
            for key in one.keys() & other.keys():
                if one[key] != other[key] and key != "params":
                    return f"{key} of optimizer {number} was {one[key]}, now {other[key]}"
    return "their parameters differ"


class GeneratorState:
    """Gives a torch generator a `state_dict`."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"].cpu())


class NumpyGeneratorState:
    """Gives a numpy `Generator` a `state_dict`."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._bits = generator.bit_generator

    def state_dict(self) -> dict[str, Any]:
        return dict(self._bits.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bits.state = state


def stateful(name: str, item: Any) -> tuple[Any, ...]:
    """What to register for an entry of `states`: (object,) or (object, scope)."""
    thing, *scope = item if isinstance(item, tuple) else (item,)
    if isinstance(thing, torch.Generator):
        thing = GeneratorState(thing)
    elif isinstance(thing, np.random.Generator):
        thing = NumpyGeneratorState(thing)
    elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ModelError(
            f"states[{name!r}] is a {type(thing).__name__} without state_dict and load_state_dict; "
            "give an object that has both, or a torch or numpy generator"
        )
    return (thing, *scope)
