"""Build a model without its large weights, and compute those later, a few at a time.

`build_deferred` runs the user's function and intercepts every operation. Large tensors are created
on the meta device, where they take no memory; the operations on them are recorded, with the
generator's state at every random operation. Replaying the record gives the same bits as a plain
build, for any one tensor without the others.

A function that takes its weights out of torch (`.numpy()`) cannot be followed. It is then called
again and builds the whole model in the ordinary way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from multi_gpu_training.state_dicts import random_state, set_random_state
from multi_gpu_training.torch_internals import (
    DispatchMode,
    argument_writes,
    operation_name,
    storage_of,
    takes_device,
)

LARGE = 2**16  # bytes; smaller tensors are created at once
# Random operations that overwrite their tensor, so that its values do not matter to the generator.
_OVERWRITING = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_"}
_OVERWRITING |= {"cauchy_", "geometric_", "rand_like", "randn_like", "randint_like"}


class WeightSource(Protocol):
    """The source of the weights of a model on the meta device."""

    everywhere: bool  # whether each rank reads its own part; otherwise rank 0 sends them

    def values(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Whole tensors in host memory, by their names in the model."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of one tensor."""


_sources: weakref.WeakKeyDictionary[nn.Module, WeightSource] = weakref.WeakKeyDictionary()


def source_of(model: nn.Module) -> WeightSource | None:
    return _sources.get(model)


def set_source(model: nn.Module, source: WeightSource) -> nn.Module:
    """Attach the source of weights to a model on the meta device."""
    _sources[model] = source
    return model


def build_deferred(build: Callable[[], Any], draw: bool = True) -> Any:
    """The result of `build`, with large tensors on the meta device if that is possible.

    Without `draw`, large weights draw nothing from the generators: they will come from elsewhere.
    """
    before, notes = random_state(torch.device("cpu")), _Notes(draw)
    try:
        with notes, _Disguise(notes):
            model = build()
    except Exception:
        notes.problem = notes.problem or "the build failed"
    if notes.problem is None and isinstance(model, nn.Module):
        if source_of(model) is not None:
            return model
        named = dict(chain(model.named_parameters(), model.named_buffers()))
        deferred = {name: t for name, t in named.items() if t.is_meta}
        if not deferred:
            return model
        if notes.followed(model, deferred.values()):
            return set_source(model, RecordedInit(notes, deferred))
    # An error that a plain build also raises is shown as a plain build shows it.
    set_random_state(before, torch.device("cpu"))
    return build()


def materialise(model: nn.Module) -> None:
    """Give a model on the meta device all of its weights, in host memory."""
    source = source_of(model)
    if source is None:
        return
    real: dict[int, Tensor] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            # One at a time: intermediates of a tensor are freed before the next one.
            real[id(tensor)] = _like(tensor, source.values([name])[name].to(tensor.dtype))
    for module in model.modules():
        for name, tensor in [*_own(module)]:
            if id(tensor) in real:
                setattr(module, name, real[id(tensor)])
    del _sources[model]


def _own(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Tensors that a module itself holds, under all of their names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return value
    made = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))  # attributes that the user or a library set on it
    return made


@dataclass(frozen=True)
class _View:
    """A tensor as a view of memory number `key`."""

    key: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        key = storage_of(tensor)[0]
        return cls(key, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, memory: torch.UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory, self.offset, self.size, self.stride)


@dataclass
class _Operation:
    """One call: its arguments, and which of the omitted memory it reads and writes."""

    call: Any
    args: Any
    kwargs: dict[str, Any]
    made: list[_View | None]  # outputs in new memory
    reads: set[int]
    writes: set[int]
    generator: tuple[torch.Generator, Tensor] | None  # with the state before the call


class _CannotFollow(Exception):
    pass


class _Disguise(TorchFunctionMode):
    """Makes an omitted tensor look like a real one: torch's own initialisers, for example, do
    nothing to tensors on the meta device."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = getattr(func, "__self__", func)
        if asked in _TELLS and self.notes.is_left_out(args[0]):
            if asked is _TELLS[-1]:
                self.notes.give_up("data_ptr() asks where a weight lies")
            device = self.notes.device_of(args[0])
            kinds = {Tensor.device: device, Tensor.is_cpu: device.type == "cpu"}
            return kinds.get(asked, Tensor.is_cuda is asked and device.type == "cuda")
        leaves, before = tree_leaves((args, kwargs)), self.notes.inside
        self.notes.inside = before or any(map(self.notes.leaves_out, leaves))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.notes.inside = before


_TELLS: Any = (Tensor.device, Tensor.is_meta, Tensor.is_cpu, Tensor.is_cuda, Tensor.data_ptr)


class _Notes(DispatchMode):
    """Follows a build and omits large tensors."""

    def __init__(self, draw: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draw = draw
        self.operations: list[_Operation] = []
        self.problem: str | None = None
        # In a call with omitted tensors. Whatever torch then creates on the meta device belongs
        # to them; what the user puts there (as Hugging Face does) does not.
        self.inside = False
        # By number: the intended device, and the memory itself, which keeps the number alive.
        self._memory: dict[int, tuple[torch.device, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(self.is_left_out, tensors)):
            return self._follow(func, args, kwargs, tensors)
        if tensors or not takes_device(func):
            return func(*args, **kwargs)
        on_meta = kwargs.get("device") == torch.device("meta")
        if on_meta and not self.inside:
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
        if not isinstance(made, Tensor) or (made.nbytes < LARGE and not on_meta):
            return func(*args, **kwargs)
        device = _real(kwargs.get("device"))
        generator = self._advance(func, args, {**kwargs, "device": device}, device)
        self._note(func, args, {**kwargs, "device": device}, made, [], generator, device)
        return made

    def is_left_out(self, tensor: Tensor) -> bool:
        return storage_of(tensor)[0] in self._memory

    def device_of(self, tensor: Tensor) -> torch.device:
        return self._memory[storage_of(tensor)[0]][0]

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Handle an operation on omitted tensors: compute only its shapes, if possible."""
        written = [t for t in argument_writes(func, args, kwargs) if isinstance(t, Tensor)]
        device = self.device_of(next(filter(self.is_left_out, tensors)))
        if kwargs.get("device") is not None:
            device = _real(kwargs["device"])
            kwargs = {**kwargs, "device": device}
        generator, meta = None, torch.device("meta")
        if torch.Tag.nondeterministic_seeded in func.tags:
            if operation_name(func) not in _OVERWRITING or len(tensors) > 1:
                return self._compute(func, args, kwargs, written, device)
            (one,), place = tensors, device if self.draw else meta
            real = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=place)
            swap = lambda a: real if isinstance(a, Tensor) else a  # noqa: E731
            generator = self._advance(func, tree_map(swap, args), tree_map(swap, kwargs), device)
        if not all(map(self.is_left_out, written)):
            return self._compute(func, args, kwargs, written, device)
        swap = lambda a: a.to(meta) if isinstance(a, Tensor) else a  # noqa: E731
        at_meta, on_meta = tree_map(swap, (args, kwargs))
        if "device" in on_meta:
            on_meta["device"] = meta
        try:
            made = func(*at_meta, **on_meta)
        except (RuntimeError, NotImplementedError):  # it depends on values
            return self._compute(func, args, kwargs, written, device)
        self._note(func, args, kwargs, made, written, generator, device)
        return made

    def _compute(
        self, func: Any, args: Any, kwargs: Any, written: list[Tensor], device: torch.device
    ) -> Any:
        """Handle an operation that depends on weight values: compute those now, then discard
        them."""
        if any(map(self.is_left_out, written)):
            self.give_up(f"{func} overwrites a weight by what depends on weights")
        views = {_View.of(t) for t in tree_leaves((args, kwargs)) if self.leaves_out(t)}
        memory = _play(self.operations, {view.key for view in views})
        swap = lambda a: _View.of(a).on(memory[_View.of(a).key]) if self.leaves_out(a) else a  # noqa: E731
        generator = self._generator(func, kwargs, device)
        made = func(*tree_map(swap, args), **tree_map(swap, kwargs))
        large = [t for t in tree_leaves(made) if isinstance(t, Tensor) and t.nbytes >= LARGE]
        if written or not large:
            return made
        left_out = tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, made)
        self._note(func, args, kwargs, left_out, [], generator, device)
        return left_out

    def leaves_out(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.is_left_out(value)

    def _generator(
        self, func: Any, kwargs: Any, device: torch.device
    ) -> tuple[torch.Generator, Tensor] | None:
        """The generator a random operation draws from, and its state before."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = kwargs.get("generator")
        generator = _default_generator(device) if generator is None else generator
        return generator, generator.get_state()

    def _advance(
        self, func: Any, args: Any, kwargs: Any, device: torch.device
    ) -> tuple[torch.Generator, Tensor] | None:
        """Advance the generator as the operation would; the numbers are drawn again later."""
        drawn = self._generator(func, kwargs, device)
        if drawn is not None and self.draw:
            func(*args, **kwargs)
        return drawn

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        made: Any,
        written: list[Tensor],
        generator: Any,
        device: torch.device,
    ) -> None:
        fresh: list[_View | None] = []
        for leaf in tree_leaves(made):
            new = isinstance(leaf, Tensor) and not self.is_left_out(leaf)
            fresh.append(_View.of(leaf) if new else None)
        for view, leaf in zip(fresh, tree_leaves(made), strict=True):
            if view is not None:
                self._memory[view.key] = device, storage_of(leaf)[1]
        if not written and not any(fresh):
            return  # another view of the same memory
        reads: set[int] = set()

        def keep(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if self.is_left_out(value):
                reads.add(storage_of(value)[0])
                return _View.of(value)
            return value.detach().clone()  # it may change later

        args, kwargs = tree_map(keep, args), tree_map(keep, kwargs)
        writes = {storage_of(t)[0] for t in written} | {view.key for view in fresh if view}
        self.operations.append(_Operation(func, args, kwargs, fresh, reads, writes, generator))

    def give_up(self, why: str) -> None:
        self.problem = why
        raise _CannotFollow(why)

    def followed(self, model: nn.Module, deferred: Iterable[Tensor]) -> bool:
        """Whether every tensor on the meta device is known, and the model hides no others."""
        deferred = list(deferred)
        keys = [storage_of(tensor)[0] for tensor in deferred]
        known = all(key in self._memory for key in keys) and len(set(keys)) == len(keys)
        seen = {id(tensor) for tensor in deferred}
        hidden = [
            leaf
            for module in model.modules()
            for leaf in tree_leaves(dict(vars(module)))
            if isinstance(leaf, Tensor) and leaf.is_meta and id(leaf) not in seen
        ]
        return known and not hidden


def _real(device: Any) -> torch.device:
    found = torch.device("cpu" if device is None else device)
    return torch.device("cpu") if found.type == "meta" else found


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class RecordedInit:
    """The weights that a plain build would have produced."""

    everywhere = False

    def __init__(self, notes: _Notes, deferred: Mapping[str, Tensor]) -> None:
        self._operations = notes.operations
        self._views = {name: _View.of(tensor) for name, tensor in deferred.items()}

    def values(self, names: Sequence[str]) -> dict[str, Tensor]:
        views = {name: self._views[name] for name in names}
        memory = _play(self._operations, {view.key for view in views.values()})
        return {name: view.on(memory[view.key]) for name, view in views.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.values([name])[name][start:stop]


@torch.no_grad()
def _play(operations: Sequence[_Operation], wanted: set[int]) -> dict[int, torch.UntypedStorage]:
    """Compute memory number `wanted` and everything it depends on."""
    memory: dict[int, torch.UntypedStorage] = {}
    chosen = _behind(operations, set(wanted))
    last = {key: number for number, o in enumerate(chosen) for key in (*o.reads, *o.writes)}

    def real(value: Any) -> Any:
        return value.on(memory[value.key]) if isinstance(value, _View) else value

    for number, operation in enumerate(chosen):
        now = None
        if operation.generator is not None:
            generator, before = operation.generator
            now = generator.get_state()
            generator.set_state(before)
        args, kwargs = tree_map(real, (operation.args, operation.kwargs))
        made = tree_leaves(operation.call(*args, **kwargs))
        if now is not None:
            generator.set_state(now)
        for view, tensor in zip(operation.made, made, strict=True):
            if view is not None:
                assert tensor.stride() == view.stride, (operation.call, view)
                memory[view.key] = tensor.untyped_storage()
        del args, kwargs, made
        for key in (*operation.reads, *operation.writes):
            if last[key] == number and key not in wanted:
                memory.pop(key, None)
    return memory


def _behind(operations: Sequence[_Operation], needed: set[int]) -> list[_Operation]:
    """The operations that memory `needed` depends on."""
    chosen = []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.writes):
            chosen.append(operation)
            needed |= operation.reads
    return chosen[::-1]
