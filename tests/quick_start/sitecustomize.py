"""Spares the programs that tests start a third of their start-up time.

An optimizer and DDP load `torch._dynamo` (1.2 s of processor time) to ask whether they are being
compiled. Here a stand-in answers "no" to that; it loads the real module for any other question,
so a program that compiles behaves as ever. Python imports this file by itself where its folder
is on the path: tests/processes.py puts it there.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Part:
    """Some answers of a submodule; for all others it asks the submodule itself."""

    def __init__(self, name: str, **answers: Any) -> None:
        self._name = name
        self.__dict__ |= answers

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(real(), self._name), name)


class StandIn(ModuleType):
    """Knows what optimizers, DDP and process groups ask when nothing is compiled."""

    def disable(self, fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        return fn if fn is not None else lambda function: function

    def graph_break(self, *_: Any, **__: Any) -> None:
        pass

    utils = Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = Part("trace_rules", clear_lru_cache=lambda: None)
    loaded = False

    def __getattr__(self, name: str) -> Any:
        if not self.loaded:  # Python itself looks at a module that it is about to load
            raise AttributeError(name)
        return getattr(real(), name)


def real() -> ModuleType:
    """The module itself, from now on also for everybody else."""
    finder.stands_in = False
    if isinstance(sys.modules.get(NAME), StandIn):
        del sys.modules[NAME]
    return importlib.import_module(NAME)


class Finder(MetaPathFinder, Loader):
    stands_in = True

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == NAME and self.stands_in:
            return ModuleSpec(name, self)
        # Whoever imports a submodule asks the stand-in for its folder, which loads all of them.
        if name.startswith(NAME + ".") and name in sys.modules:
            return ModuleSpec(name, self, loader_state=sys.modules[name].__spec__)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(NAME) if spec.name == NAME else sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, StandIn):
            module.loaded = True
        elif module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


finder = Finder()
sys.meta_path.insert(0, finder)
