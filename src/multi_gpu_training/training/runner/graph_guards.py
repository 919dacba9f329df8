"""Find which Python values a step reads, and whether they have changed.

A recorded step computes with the numbers it saw when it was recorded. A loss function that reads
a number that changes (a curriculum weight, a counter) must not be replayed.

Occasional comparisons with the eager step are not enough. They never catch a value that has changed
back by then, such as a penalty in every 16th step. And if the user's own loop sets the value,
recomputed steps would all see the latest one.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.torch_internals import version

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_DEPTH = 4
_MOST = 500  # values: all of them are compared before every replayed step
# Of torch's own modules, what people do change while training.
_TORCH_KNOBS = ("p", "dropout", "momentum", "training")
_LIBRARIES = frozenset({"torch", "numpy", "functools", "typing", "collections", "builtins"})


class Guards:
    """The plain values that `functions` can reach: in closures, globals, defaults and attributes.

    They are found by reading the code, not by running it: a value behind a property, a file or a
    clock is missed. Only the comparison with the eager step can catch such a value.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self._items: list[tuple[Any, Any, Any, str]] = []
        self._visited: set[int] = set()
        self._explored: set[int] = set()
        self._pending: list[tuple[Any, str, int]] = []
        self._names: set[str] = set()
        for function in functions:
            self._visit(function)
        while self._pending and len(self._items) < _MOST:
            self._explore(*self._pending.pop(0))

    def __len__(self) -> int:
        return len(self._items)

    def watch_settings(self, optimizer: Optimizer) -> None:
        """Guard an optimizer's settings as well, except its rates, which every step reads."""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key not in ("params", "lr", "initial_lr", "capturable"):
                    name = f"{key} of the optimizer's group {number}"
                    self._items.append((group, key, value, name))

    def changed(self) -> str | None:
        """A description of what changed since the guards were made; None if nothing did."""
        for container, key, expected, name in self._items:
            try:
                value = container[key]
            except (KeyError, IndexError):
                return f"{name} is gone"
            if value is not expected and not _same(value, expected):
                return f"{name} changed from {_short(expected)} to {_short(value)}"
        return None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Restore the old values inside a `with` block, where possible."""
        put_back = []
        for container, key, expected, _ in self._items:
            with suppress(KeyError, IndexError):
                value = container[key]
                if value is not expected and not _same(value, expected):
                    with suppress(TypeError):  # a tuple cannot change
                        container[key] = expected
                        put_back.append((container, key, value))
        try:
            yield
        finally:
            for container, key, value in put_back:
                container[key] = value

    # Finding them

    def _visit(self, item: Any) -> None:
        """Record what a callable reads, and descend into what it calls."""
        if id(item) in self._visited:
            return
        self._visited.add(id(item))
        if isinstance(item, functools.partial):
            self._visit(item.func)
            self._queue(list(item.args), "argument", 0)
            self._queue(dict(item.keywords), "argument", 0)
        elif isinstance(item, types.MethodType):
            self._visit(item.__func__)
            self._queue(item.__self__, type(item.__self__).__name__, 0)
        elif isinstance(item, types.FunctionType):
            self._read_function(item)
        elif isinstance(item, nn.Module):
            self._queue(item, type(item).__name__, 0)
        elif not isinstance(item, type) and callable(item) and _is_foreign(type(item)):
            call = vars(type(item)).get("__call__")
            if isinstance(call, types.FunctionType):
                self._visit(call)
            self._queue(item, type(item).__name__, 0)

    def _read_function(self, function: types.FunctionType) -> None:
        names = set(_names(function.__code__))
        self._names |= names
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                self._watch(_Cell(cell), 0, cell.cell_contents, name, 0)
            except ValueError:
                continue  # an empty cell
        for name in sorted(names & function.__globals__.keys()):
            self._watch(function.__globals__, name, function.__globals__[name], name, 0)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._queue(value, "default", 0)

    def _watch(self, container: Any, key: Any, value: Any, name: str, depth: int) -> None:
        if isinstance(value, Tensor):
            # A step reads GPU memory at every replay; a CPU tensor is read only when recording.
            self._items.append((container, key, value, name))
            if value.device.type == "cpu":
                self._items.append((_Version(value), 0, version(value), f"{name} (in place)"))
        elif isinstance(value, _PLAIN):
            self._items.append((container, key, value, name))
        elif callable(value) and not isinstance(value, nn.Module):
            if _is_foreign(value):
                self._visit(value)
        else:
            self._queue(value, name, depth)

    def _queue(self, value: Any, name: str, depth: int) -> None:
        self._pending.append((value, name, depth))

    def _explore(self, value: Any, name: str, depth: int) -> None:
        if depth > _DEPTH or id(value) in self._explored:
            return
        self._explored.add(id(value))
        for container, key, found, path in self._contents(value, name):
            self._watch(container, key, found, path, depth + 1)

    def _contents(self, value: Any, name: str) -> Iterator[tuple[Any, Any, Any, str]]:
        if isinstance(value, nn.Module):
            yield from self._module(value, name)
        elif isinstance(value, (list, tuple)) and len(value) <= 64:
            for i, item in enumerate(value):
                yield value, i, item, f"{name}[{i}]"
        elif isinstance(value, Mapping) and len(value) <= 64:
            for key, item in value.items():
                yield value, key, item, f"{name}[{key!r}]"
        elif isinstance(value, types.ModuleType):
            if _is_foreign(value):
                for key in sorted(self._names & vars(value).keys()):
                    yield vars(value), key, vars(value)[key], f"{name}.{key}"
        elif hasattr(value, "__dict__") and _is_foreign(type(value)):
            for name_read in sorted(self._names):
                method = getattr(type(value), name_read, None)
                if isinstance(method, types.FunctionType):
                    self._visit(method)
            for key, item in vars(value).items():
                if key in self._names:
                    yield vars(value), key, item, f"{name}.{key}"

    def _module(self, model: nn.Module, name: str) -> Iterator[tuple[Any, Any, Any, str]]:
        for path, module in model.named_modules(prefix=name):
            own = vars(module)
            if not _is_foreign(type(module)):
                for key in _TORCH_KNOBS:
                    if key in own:
                        yield own, key, own[key], f"{path}.{key}"
                continue
            forward = type(module).forward
            if not isinstance(forward, types.FunctionType):
                continue
            self._visit(forward)
            read = {"training", *self._reads(type(module), forward)}
            for key, item in own.items():
                if key in read:
                    yield own, key, item, f"{path}.{key}"

    def _reads(self, kind: type, function: types.FunctionType) -> set[str]:
        """Attribute names that a method reads, also through other methods of its class."""
        found: set[str] = set()
        new = set(_names(function.__code__))
        while new:
            found |= new
            methods = [getattr(kind, name, None) for name in new]
            new = set()
            for method in methods:
                if isinstance(method, types.FunctionType) and _is_foreign(method):
                    self._visit(method)
                    new |= set(_names(method.__code__)) - found
        return found


class _Cell:
    """A closure variable, accessed like a container."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, _: int) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, _: int, value: Any) -> None:
        self._cell.cell_contents = value


class _Version:
    """A tensor's count of in-place writes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, _: int) -> int:
        return version(self._tensor)


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(expected, Tensor):
        return False  # a different object: the recorded step reads the old one
    return type(value) is type(expected) and bool(value == expected)


def _short(value: Any) -> str:
    text = "another tensor" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:  # functions and comprehensions inside this one
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_foreign(item: Any) -> bool:
    """Whether this is the user's code rather than a library's."""
    module = item.__name__ if isinstance(item, types.ModuleType) else item.__module__
    top = str(module or "").split(".")[0]
    return top not in _LIBRARIES and top not in sys.stdlib_module_names


def step_guards(loss_fn: Callable[..., Any], model: nn.Module, augment: Any) -> Guards:
    """Guards for everything a step runs."""
    return Guards([loss_fn, model, *([augment] if augment is not None else [])])
