"""Spares the programs that tests start half of their start-up time.

An optimizer and DDP load `torch._dynamo` (1.5 s of processor time) to ask whether they are being
compiled. Here a stand-in answers "no" to that; it loads the real module for any other question,
so a program that compiles behaves as ever. Python imports this file by itself where its folder
is on the path: tests/processes.py puts it there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


class StandIn(ModuleType):
    """Knows what optimizers, DDP and process groups ask when nothing is compiled."""

    def disable(self, fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        return fn if fn is not None else lambda function: function

    def graph_break(self, *_: Any, **__: Any) -> None:
        pass

    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    loaded = False

    def __getattr__(self, name: str) -> Any:
        if not self.loaded:  # Python itself looks at a module that it is about to load
            raise AttributeError(name)
        return getattr(real(self), name)


def real(stand_in: ModuleType) -> ModuleType:
    """The module itself, from now on also for everybody else."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
    if sys.modules.get(NAME) is stand_in:
        del sys.modules[NAME]
    return importlib.import_module(NAME)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.loaded = True  # type: ignore[attr-defined]


finder = Finder()
sys.meta_path.insert(0, finder)
