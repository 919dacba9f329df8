"""The learning rate: what every optimizer step really used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import flat, line, manager_for, points, sgd, squares
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from multi_gpu_training import ConfigError, MultiGPUConfig
from multi_gpu_training.recipes.recipe import find_recipe

RATE = 0.1  # of `sgd`


def train_rates(folder: Path, settings: dict[str, Any], cosine: int | None = None) -> list[float]:
    """The rate of each step, read while the step's loss is computed."""
    rates: list[float] = []
    manager = manager_for(folder, **{"global_batch_size": 4, **settings})

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        rates.append(manager.trainer.optimizer.param_groups[0]["lr"])
        return squares(model, batch)

    def scheduler(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, T_max=cosine or 1)

    given = {"scheduler": scheduler} if cosine else {}
    manager.fit(line(), points(), loss_fn=loss_fn, optimizer=sgd, **given)
    return rates


def rates(folder: Path, world: int = 1, cosine: int | None = None, **settings: Any) -> list[float]:
    """Four steps an epoch; every rank must have used the same rates."""
    first, *others = run_ranks(world, train_rates, folder, settings, cosine)
    assert all(other == first for other in others)
    return first


def train_default(folder: Path, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Weights before and after the first step of the optimizer that is used when none is given."""
    model = line()
    before = flat(model)
    manager_for(folder, max_steps=1, **settings).fit(model, points(), loss_fn=squares)
    return before, flat(model)


def test_learning_rate_is_that_of_the_default_optimizer(tmp_path: Path) -> None:
    for rate in (1e-3, 1e-2):
        settings = {"learning_rate": rate, "weight_decay": 0.0}
        before, after = run_ranks(1, train_default, tmp_path, settings)[0]
        # Adam's first step is the rate itself, whatever the gradient.
        assert torch.allclose((after - before).abs(), torch.full_like(before, rate), rtol=1e-3)


def test_weight_decay_shrinks_the_weights(tmp_path: Path) -> None:
    settings = {"learning_rate": 0.01, "weight_decay": 0.0}
    before, plain = run_ranks(1, train_default, tmp_path, settings)[0]
    _, decayed = run_ranks(1, train_default, tmp_path, {**settings, "weight_decay": 0.5})[0]
    assert torch.allclose(plain - decayed, before * 0.01 * 0.5, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("world", [1, 2])
def test_lr_scaling_follows_the_global_batch(
    tmp_path: Path, world: int, rule: str, factor: float
) -> None:
    used = rates(tmp_path, world, global_batch_size=8, base_batch_size=2, lr_scaling=rule)
    assert used == pytest.approx([RATE * factor] * 2)


def test_base_batch_size_is_what_the_rate_was_chosen_for(tmp_path: Path) -> None:
    scaled = {"global_batch_size": 8, "lr_scaling": "linear", "batch_size": 2}
    assert rates(tmp_path, **scaled)[-1] == pytest.approx(RATE * 8 / 2)
    assert rates(tmp_path, **scaled, base_batch_size=16)[-1] == pytest.approx(RATE * 8 / 16)


def test_warmup_steps_raise_the_rate_evenly(tmp_path: Path) -> None:
    used = rates(tmp_path, warmup_steps=3)
    assert used == pytest.approx([RATE * share for share in (0.25, 0.5, 0.75, 1.0)])


def test_warmup_epochs_count_in_epochs(tmp_path: Path) -> None:
    # An epoch has four steps: three quarters of it are three.
    assert rates(tmp_path, warmup_epochs=0.75) == rates(tmp_path, warmup_steps=3)
    assert rates(tmp_path, warmup_epochs=1.0, epochs=2) == pytest.approx(
        [RATE * share for share in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0)]
    )


def test_warmup_max_share_leaves_the_rest_of_a_short_run(tmp_path: Path) -> None:
    shortened = rates(tmp_path, warmup_steps=3, warmup_max_share=0.25)
    assert shortened == pytest.approx([RATE / 2, RATE, RATE, RATE])
    # The run is as long as max_steps says, not as its epochs do.
    assert rates(tmp_path, warmup_epochs=1.0, warmup_max_share=0.5, max_steps=2) == pytest.approx(
        [RATE / 2, RATE]
    )
    # A warm-up that fits is left alone.
    assert rates(tmp_path, warmup_steps=1, warmup_max_share=0.25) == shortened


def test_a_recipes_own_warm_up_takes_a_tenth_of_the_run_at_most_and_yours_stays() -> None:
    recipe = find_recipe("image")
    assert recipe.config({"epochs": 1}).warmup_max_share == 0.1
    assert recipe.config({"epochs": 1, "warmup_epochs": 1}).warmup_max_share == 1.0
    assert recipe.config({"epochs": 1, "warmup_steps": 9}).warmup_max_share == 1.0
    assert recipe.config({"warmup_max_share": 0.5}).warmup_max_share == 0.5


def test_schedule_shapes_the_rate(tmp_path: Path) -> None:
    assert rates(tmp_path, schedule="constant", epochs=2) == [RATE] * 8
    cosine = [RATE * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates(tmp_path, schedule="cosine", epochs=2) == pytest.approx(cosine)
    assert rates(tmp_path, schedule="cosine", epochs=9, max_steps=8) == pytest.approx(cosine)
    line = [RATE * (1 - step / 8) for step in range(8)]
    assert rates(tmp_path, schedule="linear", epochs=2) == pytest.approx(line)
    with pytest.raises(ConfigError, match="schedule='cosin': use one of constant, cosine, linear"):
        MultiGPUConfig(schedule="cosin")


def test_schedule_step_epochs_says_when_the_rate_drops(tmp_path: Path) -> None:
    drops = {"schedule": "step", "epochs": 4}
    every = [RATE * 0.1**epoch for epoch in range(4) for _ in range(4)]
    assert rates(tmp_path, **drops, schedule_step_epochs=1) == pytest.approx(every)
    second = [RATE * 0.1 ** (epoch // 2) for epoch in range(4) for _ in range(4)]
    assert rates(tmp_path, **drops, schedule_step_epochs=2) == pytest.approx(second)


def test_schedule_gamma_says_how_far_the_rate_drops(tmp_path: Path) -> None:
    used = rates(tmp_path, schedule="step", schedule_step_epochs=1, schedule_gamma=0.5, epochs=2)
    assert used == pytest.approx([RATE] * 4 + [RATE / 2] * 4)


def cosine_of(count: int, of: int) -> list[float]:
    """What plain torch gives: CosineAnnealingLR advanced `count` times."""
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    scheduler = CosineAnnealingLR(optimizer, T_max=of)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_scheduler_unit_says_what_a_scheduler_counts(tmp_path: Path) -> None:
    by_step = rates(tmp_path, cosine=12, epochs=3)
    assert by_step == pytest.approx(cosine_of(12, 12))
    by_epoch = rates(tmp_path, cosine=3, epochs=3, scheduler_unit="epoch")
    assert by_epoch == pytest.approx([rate for rate in cosine_of(3, 3) for _ in range(4)])


def test_scheduler_unit_step_counts_steps_not_micro_batches(tmp_path: Path) -> None:
    used = rates(tmp_path, cosine=4, gradient_accumulation_steps=2)
    assert used == pytest.approx([rate for rate in cosine_of(4, 4) for _ in range(2)])
