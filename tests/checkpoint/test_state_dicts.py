"""What goes into a checkpoint comes back as it was."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multi_gpu_training.state_dicts import from_text, pack, to_text, unpack

ALIKE: list[dict[Any, Any]] = [
    {"net": {"0.w": torch.ones(3)}, "net.0": {"w": torch.zeros(3)}},
    {1: torch.ones(1), "1": torch.zeros(1)},
    {"a": [torch.ones(1)], "a.0": torch.zeros(1), "a.0~2": torch.full((1,), 2.0)},
    {"a.0~2": torch.full((1,), 2.0), "a": [torch.ones(1)], "a.0": torch.zeros(1)},
    {"a": np.ones(2), "b": {"c": np.zeros(2)}, "b.c": torch.ones(2)},
    {("k", 1): torch.ones(1), str(("k", 1)): torch.zeros(1)},
]


def same(ours: Any, saved: Any) -> bool:
    if isinstance(saved, (Tensor, np.ndarray)):
        return type(ours) is type(saved) and ours.tolist() == saved.tolist()
    if isinstance(saved, dict):
        return list(ours) == list(saved) and all(same(ours[key], saved[key]) for key in saved)
    if isinstance(saved, list):
        return all(same(mine, its) for mine, its in zip(ours, saved, strict=True))
    return bool(ours == saved)


@pytest.mark.parametrize("state", ALIKE)
def test_keys_that_spell_the_same_path_keep_their_own_tensors(state: dict[Any, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    plain = json.loads(json.dumps(pack(state, tensors)))
    assert same(unpack(plain, tensors), state)
    assert same(from_text(json.loads(json.dumps(to_text(state)))), state)


def test_a_tensor_whose_path_is_its_own_lies_under_it() -> None:
    tensors: dict[str, Tensor] = {}
    pack({"net": {"0.w": torch.ones(3)}, "items": [torch.zeros(1)]}, tensors)
    assert list(tensors) == ["net.0.w", "items.0"]
