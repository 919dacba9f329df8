"""What `mgt verify` writes down of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training.measure.batch_rows import row_hashes, row_leaves
from multi_gpu_training.measure.recorder import Recorder
from multi_gpu_training.measure.request import MeasureRequest


def test_recorded_samples_are_those_the_loss_function_got(tmp_path: Path) -> None:
    def augment(batch: Any, random: Any) -> list[torch.Tensor]:
        return [batch[0] + random.uniform(1), batch[1]]

    got: list[tuple[list[str], float]] = []

    def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = squares(model, batch)
        got.append((row_hashes(row_leaves(batch, 4), 4), float(loss.detach())))
        return loss

    manager = manager_for(tmp_path, batch_size=4, training_mode="single")
    _, loader, _ = manager.setup_training(
        line(), points(), loss_fn=loss_fn, optimizer=sgd, augment=augment
    )
    recorder = Recorder(manager, MeasureRequest("recorder", str(tmp_path), ranks=1, steps=100))
    manager.callbacks.add(recorder)
    manager.train_epoch(loader, 0)
    seen = list(got)
    manager.finish()
    lines = [json.loads(text) for text in (tmp_path / "steps-0-0.jsonl").read_text().splitlines()]
    assert [found["kind"] for found in lines] == ["header", *["step"] * 4, "last"]
    micros = [micro for found in lines[1:-1] for micro in found["micros"]]
    assert [(micro["hashes"], micro["loss"]) for micro in micros] == seen
    assert [len(micro["indices"]) for micro in micros] == [4] * 4
    assert lines[-1]["by_hand"]["apart"] < 1e-6
