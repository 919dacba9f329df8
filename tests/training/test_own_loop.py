"""Loops of the user's own around `train_step`: what happens when a step fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import flat, line, manager_for, points, sgd, squares

from multi_gpu_training.errors import NonFiniteLossError


def test_a_nan_in_ones_own_batch_is_named_as_such(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, batch_size=4, training_mode="single")
    manager.setup_training(line(), points(16), loss_fn=squares, optimizer=sgd)
    inputs, targets = points(16).tensors
    with pytest.raises(NonFiniteLossError, match="the loss is nan"):
        manager.trainer.train_step([inputs[:4] * float("nan"), targets[:4]])
    manager.finish()


def train(folder: Path, fails: bool) -> torch.Tensor:
    """Two steps of two micro-batches, after one that fails in its second."""
    manager = manager_for(
        folder, batch_size=4, training_mode="single", gradient_accumulation_steps=2
    )

    def loss_fn(model: Any, batch: Any) -> Any:
        if batch[1].isinf().any():
            raise ValueError("no")
        return squares(model, batch)

    model, _, _ = manager.setup_training(line(), points(16), loss_fn=loss_fn, optimizer=sgd)
    inputs, targets = points(16).tensors
    batches = [[inputs[i : i + 4], targets[i : i + 4]] for i in range(0, 16, 4)]
    if fails:
        manager.trainer.train_step(batches[3])
        with pytest.raises(ValueError, match="no"):
            manager.trainer.train_step([inputs[:4], targets[:4] / 0])
    assert [manager.trainer.train_step(batch).moved for batch in batches] == [False, True] * 2
    manager.finish()
    return flat(model)


def test_a_step_that_failed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    assert torch.equal(train(tmp_path, fails=True), train(tmp_path, fails=False))
