"""Generators that a sampler, a dataset or a stream keeps for itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from multi_gpu_training.data.order import derive_seed

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Where wrappers and datasets keep what draws for them.
_INSIDE = ("sampler", "batch_sampler", "dataset", "datasets")
_MOST = 1000  # objects to look at: a dataset may hold as many others as it has samples


def seed_own(owner: Any, seed: int) -> None:
    """Seed the generators in attributes of `owner`, and of samplers that it draws from."""
    seed_all(own_generators(owner), seed)


def has_seeded_generator(loader: DataLoader[Any]) -> bool:
    """Whether the user gave the order of a loader a seed of its own."""
    own = [loader.generator, *own_generators(loader.sampler), *own_generators(loader.batch_sampler)]
    unseeded = torch.Generator().initial_seed()
    return any(isinstance(one, torch.Generator) and one.initial_seed() != unseeded for one in own)


def seed_all(generators: list[Any], seed: int) -> None:
    for number, generator in enumerate(generators):
        _seed(generator, derive_seed(seed, number) if number else seed)


def own_generators(owner: Any) -> list[Any]:
    """Generators in attributes of `owner`, of the datasets and samplers that it is made of, and
    of its transforms."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def look_at(one: Any) -> None:
        if id(one) in seen or len(seen) > _MOST:
            return
        seen.add(id(one))
        own = dict(getattr(one, "__dict__", {}))
        with suppress(Exception):  # an object may answer for any name, or fail to
            own.setdefault("generator", one.generator)
        for value in own.values():
            if isinstance(value, _KINDS):
                found.setdefault(id(value), value)
        for name, value in own.items():
            named = name in _INSIDE or "transform" in name or "augment" in name
            for part in value if isinstance(value, (list, tuple)) and named else (value,):
                if named or isinstance(part, (Sampler, Dataset)):
                    look_at(part)

    look_at(owner)
    return list(found.values())


@contextmanager
def global_generators_kept(owned: list[Any] | None = None) -> Iterator[None]:
    """Put torch's, numpy's and Python's global CPU generators back at the end, and those given:
    reading data in this process must not change what the training or the user draws."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    before = states_of(owned or [])
    try:
        yield
    finally:
        set_states(owned or [], before)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def states_of(generators: list[Any]) -> list[Any]:
    """Where generators stand, for `set_states`."""
    return [_state(generator) for generator in generators]


def set_states(generators: list[Any], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)
