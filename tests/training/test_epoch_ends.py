"""Copies made while the device still computes the last steps of an epoch, and when they count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from recorder import recording
from safetensors.torch import load_file
from tiny import line, manager_for, points, squares
from torch import Tensor, nn

from multi_gpu_training import Callback
from multi_gpu_training.checkpoint.state_buffers import StateBuffers

EPOCHS, STEPS = 12, 4


class Change(Callback):
    """Changes a weight after each epoch, in a way that its tensor notices or not."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.watches_only = how == "noticed"  # not true, and found out

    def on_epoch_end(self, run: Any, epoch: int, metrics: Mapping[str, float]) -> None:
        weight = run.model.weight
        if self.how == "noticed":
            with torch.no_grad():
                weight.mul_(0.5)
        else:
            weight.data = weight.data.clone()
            weight.data.mul_(0.5)


def train(
    folder: Path, recorded: bool, how: str | None, **settings: Any
) -> tuple[dict[int, dict[str, Tensor]], dict[str, int]]:
    """The tensors of every checkpoint, and how many copies were made ahead and used."""
    counts = {"ahead": 0, "used": 0}

    class Counting(StateBuffers):
        def copy_ahead(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
            counts["ahead"] += 1
            super().copy_ahead(files)

        def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> Any:
            ahead = self._ahead
            copy = super().copy(files)
            counts["used"] += ahead is not None and copy is ahead.copy
            return copy

    settings = {"checkpoint_interval_s": 1e-6, "keep_last": 100, **settings}
    with (
        recording(lambda rank: None if recorded else "not wanted"),
        mock.patch("multi_gpu_training.checkpoint.saver.StateBuffers", Counting),
        # Otherwise the stand-in, which is as fast as an eager step, would be compared every time.
        mock.patch("multi_gpu_training.training.runner.selection.COMPARING", 1e-4),
        mock.patch("multi_gpu_training.training.runner.selection.CLEARLY_FASTER", 100.0),
    ):
        manager = manager_for(
            folder, batch_size=4, epochs=EPOCHS, enable_fault_tolerance=True, **settings
        )
        model: nn.Module = line()
        manager.fit(
            model,
            points(4 * STEPS),
            loss_fn=squares,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            callbacks=[] if how is None else [Change(how)],
        )
        assert manager.trainer.execution.replayed > 0 or not recorded
    found = {}
    for path in sorted(manager.folder.glob("checkpoints/step-*")):
        found[int(path.name.split("-")[1])] = {
            **load_file(path / "model.safetensors"),
            **load_file(path / "optimizer.safetensors"),
        }
    return found, counts


@pytest.mark.parametrize("how", [None, "noticed", "by data"])
def test_checkpoints_copied_ahead_hold_what_is_saved_without(
    how: str | None, tmp_path: Path
) -> None:
    plain, none = train(tmp_path / "plain", recorded=False, how=how)
    recorded, counts = train(tmp_path / "recorded", recorded=True, how=how)
    assert none == {"ahead": 0, "used": 0}
    both = plain.keys() & recorded.keys()
    assert len(both) >= 2
    for step in both:
        assert plain[step].keys() == recorded[step].keys()
        for name, tensor in plain[step].items():
            assert torch.equal(tensor, recorded[step][name]), (step, name)
    expected = {None: (True, True), "noticed": (True, False), "by data": (False, False)}[how]
    assert (counts["ahead"] > 0, counts["used"] > 0) == expected
