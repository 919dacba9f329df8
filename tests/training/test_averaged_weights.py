"""EMA and SWA: the average of the weights, in validation and in checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import HIDDEN, recording, set_hidden
from safetensors.torch import load_file
from tiny import FEATURES, line, manager_for, points, quiet, squares
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from multi_gpu_training import Callback, ConfigError, MultiGPUTrainingManager, TrainingMode

KEPT: dict[str, Any] = {
    "enable_fault_tolerance": True,
    "training_mode": TrainingMode.SINGLE,
    "global_batch_size": 4,
    "epochs": 3,
    "monitor": False,
    "keep_last": 20,
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()


class Weights(Callback):
    """The trained weights after each step, and what each validation gave."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.validated: list[tuple[int, float]] = []

    def on_step_end(self, run: Any, result: Any) -> None:
        self.steps.append({k: v.clone() for k, v in run.model.state_dict().items()})

    def on_validation(self, run: Any, metrics: Any) -> None:
        self.validated.append((run.step, metrics["loss"]))


def trained(
    folder: Path, model: Any = normed, **settings: Any
) -> tuple[MultiGPUTrainingManager, Weights]:
    manager, seen = manager_for(folder, **{**KEPT, **settings}), Weights()
    manager.fit(
        model(),
        points(14, torch.float64),
        points(9, torch.float64),
        loss_fn=squares,
        optimizer=adam,
        callbacks=[seen],
    )
    return manager, seen


def loss_with(state: dict[str, Tensor]) -> float:
    model = normed()
    model.load_state_dict(state)
    with torch.no_grad():
        return float(squares(model.eval(), list(points(9, torch.float64).tensors)))


def saved(manager: MultiGPUTrainingManager, step: int) -> dict[str, Tensor]:
    (found,) = manager.run.checkpoints.glob(f"step-*{step:04}/model.safetensors")
    return load_file(found)


def test_ema_is_that_of_a_loop_by_hand_and_is_what_is_validated_saved_and_left_in_the_model(
    tmp_path: Path,
) -> None:
    manager, seen = trained(tmp_path, ema_decay=0.8, validate_every=3, checkpoint_frequency=5)
    average = normed().state_dict()
    by_hand: dict[int, dict[str, Tensor]] = {}
    for step, weights in enumerate(seen.steps, 1):
        for name, value in weights.items():  # buffers are copied
            decays = name in dict(normed().named_parameters())
            average[name] = 0.8 * average[name] + 0.2 * value if decays else value.clone()
        by_hand[step] = dict(average)
    assert [step for step, _ in seen.validated] == [3, 4, 6, 8, 9, 12]
    for step, loss in seen.validated:
        assert math.isclose(loss, loss_with(by_hand[step]), rel_tol=1e-12)
    for step in (5, 10, 12):
        for name, value in saved(manager, step).items():
            assert torch.allclose(value, by_hand[step][name], rtol=1e-12, atol=1e-15)
    for name, value in manager.model.state_dict().items():
        assert torch.allclose(value, by_hand[12][name], rtol=1e-12, atol=1e-15)
    # Training itself knows nothing of it.
    _, plain = trained(tmp_path, validate_every=3)
    assert all(torch.equal(plain.steps[-1][k], v) for k, v in seen.steps[-1].items())


def test_swa_is_the_mean_of_the_weights_and_of_batchnorms_statistics(tmp_path: Path) -> None:
    manager, seen = trained(tmp_path, swa_start=5, swa_every=3, validate_every=4)
    assert seen.validated[0][1] == pytest.approx(loss_with(seen.steps[3]), rel=1e-12)  # not begun
    taken = [seen.steps[step - 1] for step in (5, 8, 11)]
    mean = {
        name: torch.stack([weights[name] for weights in taken]).mean(0)
        if value.is_floating_point()
        else seen.steps[-1][name]
        for name, value in taken[0].items()
    }
    assert seen.validated[-1][1] == pytest.approx(loss_with(mean), rel=1e-12)
    for name, value in saved(manager, 12).items():
        assert torch.allclose(value, mean[name], rtol=1e-12, atol=1e-15)
    by_epoch, seen = trained(tmp_path, swa_start=4)  # every 4 steps: an epoch
    last = torch.stack([seen.steps[step - 1]["2.weight"] for step in (4, 8, 12)])
    assert torch.allclose(by_epoch.model[2].weight, last.mean(0), rtol=1e-12)


@pytest.mark.parametrize("kind", [{"ema_decay": 0.7}, {"swa_start": 4, "swa_every": 2}])
def test_an_average_is_resumed_bit_for_bit(tmp_path: Path, kind: dict[str, Any]) -> None:
    whole, seen = trained(tmp_path, **kind, run_name="whole", validate_every=3)
    trained(tmp_path, **kind, run_name="parts", validate_every=3, max_steps=7)
    parts, rest = trained(tmp_path, **kind, run_name="parts", validate_every=3, resume="auto")
    assert [step for step, _ in rest.validated] == [8, 9, 12]
    assert rest.validated == seen.validated[-3:]
    for name, value in parts.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name
    theirs = saved(whole, 12)
    assert all(torch.equal(value, theirs[k]) for k, value in saved(parts, 12).items())


def test_weights_in_16_bits_are_averaged_in_32_and_resumed_so(tmp_path: Path) -> None:
    def short() -> nn.Module:
        return line().to(torch.bfloat16)

    def cast(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return squares(model, [part.bfloat16() for part in batch]).float()

    def fit(**settings: Any) -> dict[str, Tensor]:
        manager = manager_for(tmp_path, **{**KEPT, "epochs": 1, "ema_decay": 0.999, **settings})
        sgd = torch.optim.SGD
        manager.fit(short(), points(320), loss_fn=cast, optimizer=lambda p: sgd(p, lr=0.05))
        return dict(manager.model.state_dict())

    whole = fit(run_name="whole")
    fit(run_name="parts", max_steps=45)
    parts = fit(run_name="parts", resume="auto")
    start = short().state_dict()
    # In 16 bits, a thousandth of the way would be rounded away at every step.
    assert not torch.equal(whole["weight"], start["weight"])
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_a_run_can_begin_and_end_to_average_when_it_is_resumed(tmp_path: Path) -> None:
    _, plain = trained(tmp_path, run_name="plain")
    trained(tmp_path, run_name="a", ema_decay=0.7, max_steps=8)
    _, ended = trained(tmp_path, run_name="a", resume="auto")
    assert all(torch.equal(ended.steps[-1][k], v) for k, v in plain.steps[-1].items())
    trained(tmp_path, run_name="b", max_steps=8)
    begun, seen = trained(tmp_path, run_name="b", resume="auto", ema_decay=0.7)
    assert all(torch.equal(seen.steps[-1][k], v) for k, v in plain.steps[-1].items())
    average = plain.steps[7]["2.weight"]
    for weights in seen.steps:
        average = 0.7 * average + 0.3 * weights["2.weight"]
    assert torch.allclose(begun.model.state_dict()["2.weight"], average, rtol=1e-12)


def test_tied_weights_stay_tied_in_the_checkpoint(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
            self.b.weight = self.a.weight
            self.out = nn.Linear(FEATURES, 1)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.b(self.a(x).tanh()))

    whole, _ = trained(tmp_path, Tied, ema_decay=0.7, run_name="whole")
    trained(tmp_path, Tied, ema_decay=0.7, run_name="parts", max_steps=5)
    parts, _ = trained(tmp_path, Tied, ema_decay=0.7, run_name="parts", resume="auto")
    assert parts.model.a.weight is parts.model.b.weight
    for name, value in parts.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name


def test_the_average_can_be_used_by_hand_but_not_trained(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **KEPT, ema_decay=0.5)
    data = points(16, torch.float64)
    model, loader, _ = manager.setup_training(normed(), data, loss_fn=squares, optimizer=adam)
    batches = list(loader)
    manager.trainer.train_step(batches[0])
    own = model[2].weight.clone()
    with manager.averaged_weights() as averaged:
        mean = averaged[2].weight.clone()
        assert torch.allclose(mean, (own + normed()[2].weight) / 2, rtol=1e-12)
    assert torch.equal(model[2].weight, own)
    with manager.averaged_weights(), pytest.raises(Exception, match="train outside"):
        manager.trainer.train_step(batches[1])
    manager.finish()


def test_recorded_steps_and_those_taken_back_give_the_average_of_eager_ones(tmp_path: Path) -> None:
    def fit(execution: str, changes_at: int) -> tuple[dict[str, Tensor], Any]:
        """From the step `changes_at` on, steps read a value that no guard sees: those that were
        replayed since are taken back at the next comparison."""

        class Change(Callback):
            def on_step_end(self, run: Any, result: Any) -> None:
                set_hidden("3.0" if result.step + 1 >= changes_at else None)

        def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
            return squares(model, batch) * float(os.environ.get(HIDDEN, "1.0"))

        kept = {**KEPT, "enable_fault_tolerance": False, "epochs": 1}
        manager = manager_for(tmp_path, **kept, step_execution=execution, ema_decay=0.9)
        try:
            with recording():
                manager.fit(
                    normed(),
                    points(240, torch.float64),
                    loss_fn=loss,
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.02),
                    callbacks=[Change()],
                )
        finally:
            set_hidden(None)
        return dict(manager.model.state_dict()), manager.trainer.execution

    # Comparisons come after 16 and 64 replayed steps, inside a step: callbacks see it later.
    for changes_at in (1000, 19, 24, 41):
        eager, _ = fit("eager", changes_at)
        graph, execution = fit("graph", changes_at)
        if changes_at == 1000:
            assert execution.replayed > 30
        else:
            assert "computed again" in execution.reason, execution.reason
        assert all(torch.equal(graph[name], eager[name]) for name in eager), changes_at


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_average_follows_a_step_that_is_skipped_or_rolled_back(
    tmp_path: Path, policy: str
) -> None:
    class Spoil(Callback):
        spoilt = False

        def __init__(self) -> None:
            self.by_step: dict[int, Tensor] = {}

        def on_optimizer(self, run: Any) -> None:
            if run.step == 6 and not self.spoilt:
                self.spoilt = True
                next(run.model.parameters()).grad.fill_(math.nan)

        def on_step_end(self, run: Any, result: Any) -> None:
            self.by_step[result.step] = run.model[2].weight.detach().clone()

    seen = Spoil()
    manager = manager_for(
        tmp_path, **KEPT, ema_decay=0.9, checkpoint_frequency=5, on_nonfinite=policy
    )
    data = points(16, torch.float64)
    manager.fit(normed(), data, loss_fn=squares, optimizer=adam, callbacks=[seen])
    assert seen.spoilt and torch.equal(seen.by_step[7], seen.by_step[6]) == (policy == "skip")
    average = normed()[2].weight.detach()
    for _, weight in sorted(seen.by_step.items()):
        average = 0.9 * average + 0.1 * weight
    assert torch.allclose(manager.model[2].weight, average, rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ema_decay": 1.0}, r"ema_decay=1\.0: .*less than 1; 0\.999"),
        ({"ema_decay": 0.0}, r"ema_decay=0\.0: .*greater than 0; 0\.999"),
        ({"ema_decay": 0.9, "swa_start": 3}, "two ways to average the weights; give one"),
        ({"swa_every": 3}, "does nothing without swa_start"),
        ({"swa_start": -1}, "swa_start=-1: .*give the step of the first average"),
        ({"swa_start": 2, "swa_every": 0}, "swa_every=0: .*leave it out to average once per epoch"),
    ],
)
def test_a_wrong_average_is_one_sentence_with_the_remedy(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        quiet(tmp_path, **settings)


def test_swa_over_a_stream_asks_how_often(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(points(8))

    manager = manager_for(tmp_path, swa_start=2)
    with pytest.raises(ConfigError, match="length of this stream is not known; set swa_every"):
        manager.setup_training(line(), Stream(), loss_fn=squares)
