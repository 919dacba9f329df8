"""A run that is stopped after any step and resumed ends with the same bits."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

SAMPLES = 61
BATCH = 8  # eight steps an epoch, the last one of five samples


class Stop(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.step:
            raise Stop


class Augmented(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Draws from every generator a user's dataset may draw from."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.randn(6) + random.random() + float(np.random.rand())
        return self.inputs[index] + 0.1 * noise, index % 3


def build() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    folder: Path, name: str, workers: int, stop: int | None, resume: str | None, **more: Any
) -> Any:
    config = MultiGPUConfig(
        progress="off",
        tensorboard=False,
        save_dir=str(folder),
        run_name=name,
        epochs=2,
        global_batch_size=BATCH,
        num_workers=workers,
        sync_bn=True,
        checkpoint_frequency=1,
        schedule="cosine",
        warmup_steps=3,
        max_grad_norm=1.0,
        resume=resume,
        **more,
    )
    manager = MultiGPUTrainingManager(config)
    model = build()
    hooks = [] if stop is None else [StopAfter(stop)]
    try:
        result = manager.fit(model, Augmented(), Augmented(), optimizer=adamw, callbacks=hooks)
    except Stop:
        return None
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, result.history


def assert_same_bits(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    different = [name for name in reference if not torch.equal(ours[name], reference[name])]
    assert not different, f"differ in some bit: {different}"


def train_with(
    folder: Path,
    name: str,
    workers: int,
    stop: int | None,
    resume: str | None,
    more: dict[str, Any],
) -> Any:
    return train(folder, name, workers, stop, resume, **more)


@pytest.mark.parametrize(
    ("world", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0), (3, 2), (4, 0)]
)
def test_resume_after_any_step_is_bit_for_bit(tmp_path: Path, world: int, workers: int) -> None:
    whole = run_ranks(world, train_with, tmp_path, "whole", workers, None, None, {})
    stops: Sequence[int] = (5,) if world * workers > 4 else (5, 8)
    if workers == 0 and world in (1, 3):
        stops = range(1, 17) if world == 1 else (1, 2, 5, 8, 11, 14, 16)
    for stop in stops:
        name = f"stop-{stop}"
        run_ranks(world, train_with, tmp_path, name, workers, stop, None, {})
        resumed = run_ranks(world, train_with, tmp_path, name, workers, None, "auto", {})
        for (ours, history), (reference, expected) in zip(resumed, whole, strict=True):
            assert_same_bits(ours, reference)
            for epoch, (a, b) in enumerate(zip(history, expected, strict=True)):
                # Sums are rounded once at the checkpoint, hence not compared bit for bit.
                assert a["train"] == pytest.approx(b["train"], rel=1e-12), (stop, epoch)
                assert a["val"] == b["val"]


@pytest.mark.parametrize(
    "more",
    [{"gradient_accumulation_steps": 3}, {"static_graph": True}, {"use_mixed_precision": True}],
    ids=["accumulation", "static-graph", "bf16"],
)
def test_resume_is_bit_for_bit_in_other_modes(tmp_path: Path, more: dict[str, Any]) -> None:
    whole = run_ranks(3, train_with, tmp_path, "whole", 0, None, None, more)
    run_ranks(3, train_with, tmp_path, "stopped", 0, 6, None, more)
    resumed = run_ranks(3, train_with, tmp_path, "stopped", 0, None, "auto", more)
    for (ours, _), (reference, _) in zip(resumed, whole, strict=True):
        assert_same_bits(ours, reference)


def train_plain(folder: Path, name: str, stop: int | None, resume: str | None) -> Any:
    """Without noise that depends on the number of ranks; records which samples were seen."""
    seen: list[int] = []

    class Recorded(torch.utils.data.Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            seen.append(index)
            generator = torch.Generator().manual_seed(index)
            return torch.randn(6, generator=generator), index % 3

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    config = MultiGPUConfig(
        progress="off",
        tensorboard=False,
        save_dir=str(folder),
        run_name=name,
        epochs=1,
        global_batch_size=BATCH,
        checkpoint_frequency=1,
        resume=resume,
    )
    manager = MultiGPUTrainingManager(config)
    with contextlib.suppress(Stop):
        manager.fit(
            model, Recorded(), optimizer=adamw, callbacks=[] if stop is None else [StopAfter(stop)]
        )
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world", [1, 3, 4])
def test_going_on_with_another_number_of_ranks_keeps_the_order(tmp_path: Path, world: int) -> None:
    order, reference = run_ranks(1, train_plain, tmp_path, "whole", None, None)[0]
    run_ranks(2, train_plain, tmp_path, "moved", 3, None)
    parts = run_ranks(world, train_plain, tmp_path, "moved", None, "auto")
    # The stop came before the third step was saved.
    rest = order[2 * BATCH :]
    assert sorted(i for seen, _ in parts for i in seen) == sorted(rest)
    steps = [rest[i : i + BATCH] for i in range(0, len(rest), BATCH)]
    for number, step in enumerate(steps):
        together: list[int] = []
        for rank, (seen, _) in enumerate(parts):
            sizes = [len(s) // world + (rank < len(s) % world) for s in steps]
            start = sum(sizes[:number])
            together += seen[start : start + sizes[number]]
        assert together == step
    for _, ours in parts:
        for name, value in reference.items():
            assert float((ours[name] - value).norm() / value.norm()) <= 1e-5
