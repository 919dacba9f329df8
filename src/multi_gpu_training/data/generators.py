"""Generators that a sampler or a stream keeps for itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from multi_gpu_training.data.order import derive_seed

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def seed_own(owner: Any, seed: int) -> None:
    """Seed the generators in attributes of `owner`, and of samplers that it draws from."""
    for number, generator in enumerate(_found(owner)):
        _seed(generator, derive_seed(seed, number) if number else seed)


def _found(owner: Any) -> list[Any]:
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def look_at(one: Any) -> None:
        seen.add(id(one))
        own = getattr(one, "__dict__", {})
        for value in (getattr(one, "generator", None), *own.values()):
            if isinstance(value, _KINDS):
                found.setdefault(id(value), value)
        for name, value in own.items():
            within = isinstance(value, Sampler) or name in ("sampler", "batch_sampler")
            if within and id(value) not in seen:
                look_at(value)

    look_at(owner)
    return list(found.values())


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)
