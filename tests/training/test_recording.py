"""What `mgt verify` writes down of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training.measure.recorder import Recorder
from multi_gpu_training.measure.request import MeasureRequest


def test_recorded_batches_are_those_the_loss_function_got(tmp_path: Path) -> None:
    def augment(batch: Any, random: Any) -> list[torch.Tensor]:
        return [batch[0] + random.uniform(1), batch[1]]

    got: list[torch.Tensor] = []

    def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        got.append(batch[0].clone())
        return squares(model, batch)

    manager = manager_for(tmp_path, batch_size=4, training_mode="single")
    _, loader, _ = manager.setup_training(
        line(), points(), loss_fn=loss_fn, optimizer=sgd, augment=augment
    )
    recorder = Recorder(manager, MeasureRequest("recorder", str(tmp_path), ranks=1, steps=100))
    manager.callbacks.add(recorder)
    manager.train_epoch(loader, 0)
    manager.finish()
    assert len(recorder.batches) == len(got) == 4
    for recorded, seen in zip(recorder.batches, got, strict=True):
        assert torch.equal(recorded[0], seen)
    assert [len(share["indices"]) for share in recorder.seen] == [4] * 4
