"""Settings that changed since a checkpoint was saved: applied, or refused, and always shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import flat, line, manager_for, points, squares
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from multi_gpu_training import Callback
from multi_gpu_training.checkpoint.changed_settings import (
    MAKE_ANOTHER_TRAINING,
    OF_THE_OPTIMIZER,
    TAKE_EFFECT,
)
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import ConfigError


class Watch(Callback):
    """The groups of the optimizer that each step was taken with."""

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []

    def on_step_begin(self, run: Any, step: int) -> None:
        group = run.optimizer.param_groups[0]
        self.groups.append({key: value for key, value in group.items() if key != "params"})


def train(folder: Path, steps: int, samples: int = 16, data: Any = None, **given: Any) -> Any:
    """One rank; 8 steps per epoch. Returns the weights and what each step was taken with."""
    arguments = {k: given.pop(k) for k in ("optimizer", "scheduler") if k in given}
    settings = {"training_mode": "single", "batch_size": 2, "epochs": 4, "run_name": "it"}
    settings |= {"enable_fault_tolerance": True, "resume": "auto", "progress": "lines", **given}
    manager, model, watch = manager_for(folder, **settings, max_steps=steps), line(), Watch()
    dataset = points(samples) if data is None else data
    manager.fit(model, dataset, loss_fn=squares, callbacks=[watch], **arguments)
    return flat(model), watch.groups


def test_a_new_learning_rate_and_weight_decay_are_what_it_trains_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 5, learning_rate=1e-3, schedule="cosine")
    capsys.readouterr()
    _, groups = train(tmp_path, 8, learning_rate=1e-2, weight_decay=0.5, schedule="cosine")
    said = capsys.readouterr().out
    assert "settings changed since step 5 was saved" in said
    assert "learning_rate  0.001  0.01  applied" in said
    assert "weight_decay   0.01   0.5   applied" in said
    assert "max_steps      5      8     applied" in said
    fresh, expected = train(
        tmp_path / "new", 8, learning_rate=1e-2, weight_decay=0.5, schedule="cosine"
    )
    del fresh
    assert [g["lr"] for g in groups] == [g["lr"] for g in expected[5:]]
    assert {g["weight_decay"] for g in groups} == {0.5}


def cosine(steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: CosineAnnealingLR(optimizer, steps)


def half(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def test_a_scheduler_that_was_brought_follows_the_new_rate(tmp_path: Path) -> None:
    adam = [lambda p, lr=lr: Adam(p, lr=lr) for lr in (1e-2, 2e-2)]
    train(tmp_path, 3, optimizer=adam[0], scheduler=half)
    _, groups = train(tmp_path, 6, optimizer=adam[1], scheduler=half)
    _, whole = train(tmp_path / "new", 6, optimizer=adam[1], scheduler=half)
    assert [g["lr"] for g in groups] == pytest.approx([g["lr"] for g in whole[3:]])


def test_a_longer_scheduler_ends_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 3, scheduler=cosine(4))
    train(tmp_path, 6, scheduler=cosine(100))
    assert "T_max" in capsys.readouterr().out
    _, groups = train(tmp_path, 12, scheduler=cosine(100))
    assert all(g["lr"] > 0 for g in groups)


def test_nothing_changed_says_nothing_and_trains_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = train(tmp_path / "whole", 9, schedule="cosine", warmup_steps=2)
    train(tmp_path, 9, schedule="cosine", warmup_steps=2)
    checkpoints = tmp_path / "custom" / "it" / "checkpoints"
    middle = str(checkpoints / "step-00000008")
    capsys.readouterr()
    again, _ = train(tmp_path, 9, schedule="cosine", warmup_steps=2, resume=middle)
    assert torch.equal(again, whole)
    assert "settings changed" not in capsys.readouterr().out


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 3}, r"seed +0 +3 +refused"),
    "order": ({"shuffle": False}, r"shuffle +True +False +refused"),
    "shorter data": ({"samples": 12}, r"samples +16 +12 +refused"),
    "other data": (
        {
            "data": lambda: torch.utils.data.TensorDataset(
                *(tensor + 1 for tensor in points().tensors)
            )
        },
        r"dataset .*refused: other data",
    ),
    "SGD": ({"optimizer": lambda p: SGD(p, lr=0.1)}, r"optimizer +AdamW +SGD +refused"),
    "Adam": ({"optimizer": lambda p: Adam(p, lr=0.1)}, r"optimizer +AdamW +Adam +refused"),
    "scheduler": ({"scheduler": lambda o: StepLR(o, 3)}, r"scheduler +RateCurve +StepLR +refused"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_it_another_training_is_refused_unless_told_otherwise(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, pattern = REFUSED[name]
    train(tmp_path, 5, optimizer=AdamW)
    changed = {"optimizer": AdamW, **given}
    if "data" in changed:
        changed["data"] = changed["data"]()
    with pytest.raises(ConfigError, match=pattern) as told:
        train(tmp_path, 8, **changed)
    assert "--resume-anyway" in str(told.value)
    _, groups = train(tmp_path, 7, **changed, resume_anyway=True)
    assert len(groups) in (1, 2)  # of 12 samples, one step is left of the epoch
    monkeypatch.setenv("MGT_RESUME_ANYWAY", "1")
    train(tmp_path, 8, optimizer=AdamW)


def test_fields_are_sorted_by_what_a_change_means() -> None:
    known = [*MAKE_ANOTHER_TRAINING, *OF_THE_OPTIMIZER, *TAKE_EFFECT]
    assert len(known) == len(set(known))
    assert set(known) <= set(MultiGPUConfig.model_fields)


def test_a_restarted_script_that_draws_other_data_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 5)
    again = Identity(attempt=1)
    monkeypatch.setattr("multi_gpu_training.distributed.placement.ALONE", again)
    capsys.readouterr()
    other = torch.utils.data.TensorDataset(*(tensor + 1 for tensor in points().tensors))
    train(tmp_path, 8, data=other)
    assert "other data of the same length" in capsys.readouterr().out


class SetsTheRate(Callback):
    """A schedule of the user's own, in a callback."""

    def on_step_end(self, run: Any, result: Any) -> None:
        run.optimizer.param_groups[0]["lr"] *= 0.5


def test_a_rate_set_after_the_last_step_stays_where_a_resumed_run_is_longer(
    tmp_path: Path,
) -> None:
    def lengths(folder: Path, *steps: int) -> list[float]:
        rates = []
        for most in steps:
            settings = {"enable_fault_tolerance": True, "run_name": "it", "resume": "auto"}
            manager = manager_for(folder, batch_size=2, max_steps=most, **settings)
            watch = Watch()
            manager.fit(
                line(),
                points(),
                loss_fn=squares,
                optimizer=lambda p: SGD(p, lr=0.1),
                callbacks=[watch, SetsTheRate()],
            )
            rates += [group["lr"] for group in watch.groups]
        return rates

    assert lengths(tmp_path / "resumed", 3, 6) == lengths(tmp_path / "whole", 6)


class Unfreezes(Callback):
    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
        self.layer.requires_grad_(True)


def test_what_was_unfrozen_in_mid_run_is_trained_after_a_resume(tmp_path: Path) -> None:
    def weights(folder: Path, *steps: int, frozen: bool = True) -> torch.Tensor:
        for number, most in enumerate(steps):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
            model[0].requires_grad_(not (frozen or number == 0))
            settings = {"enable_fault_tolerance": True, "run_name": "it", "resume": "auto"}
            how = {"batch_size": 2, "epochs": 3, "training_mode": "single", **settings}
            manager_for(folder, max_steps=most, **how).fit(
                model,
                points(),
                loss_fn=squares,
                optimizer=SGD(model.parameters(), lr=0.05),
                callbacks=[Unfreezes(model[0])] if frozen else [],
            )
        return flat(model)

    whole = weights(tmp_path / "whole", 14)
    assert torch.equal(weights(tmp_path / "resumed", 10, 14), whole)
    # Who gives the model otherwise in the resumed script has their way.
    stays = weights(tmp_path / "frozen", 10, frozen=False)
    assert not torch.equal(weights(tmp_path / "frozen", 14, frozen=False), stays)


class SetsToEval(Callback):
    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def on_epoch_end(self, run: Any, epoch: int, metrics: Any) -> None:
        self.norm.eval()


def test_what_a_callback_put_into_eval_mode_stays_so_after_a_resume(tmp_path: Path) -> None:
    def weights(folder: Path, *steps: int) -> torch.Tensor:
        for most in steps:
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
            settings = {"enable_fault_tolerance": True, "run_name": "it", "resume": "auto"}
            how = {"batch_size": 2, "epochs": 3, "training_mode": "single", **settings}
            manager_for(folder, max_steps=most, **how).fit(
                model, points(), points(), loss_fn=squares, callbacks=[SetsToEval(model[0])]
            )
        return flat(model)

    assert torch.equal(weights(tmp_path / "resumed", 8, 14), weights(tmp_path / "whole", 14))
    assert torch.equal(weights(tmp_path / "middle", 11, 14), weights(tmp_path / "whole again", 14))
