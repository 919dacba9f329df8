"""One table: NaN, loss spikes, replicas that differ, and what `handle_error` does about each."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.data.order import ShuffledBatches
from multi_gpu_training.errors import (
    DivergenceError,
    LossSpikeError,
    MemoryShortError,
    ModelError,
    MultiGPUError,
    NonFiniteLossError,
)
from multi_gpu_training.faults.policies import judge
from multi_gpu_training.monitoring.spikes import LossSpikes, threshold
from multi_gpu_training.training.callbacks import TrainingFault

SAMPLES = 24
BAD = next(iter(ShuffledBatches(SAMPLES, SAMPLES).batches(0, 0)))[13]  # neither first nor last


class Copied(Callback):
    """The state after each step, to see what a run went back to."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.after[step] = tiny.weights(manager.model)


class Fault:
    """A loss whose sample BAD gives NaN, a gradient that is NaN, or a huge loss."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, numbers = batch
        here = bool((numbers == BAD).any())
        if here and self.kind == "loss":
            inputs = torch.where((numbers == BAD)[:, None], math.nan, inputs)
        output = model(inputs)
        loss = nn.functional.mse_loss(output, targets)
        if here and self.kind == "gradient":
            loss = loss + (output * 0).sum().abs().sqrt()  # 0, with a slope that is not finite
        return loss + 1e4 if here and self.kind == "spike" else loss


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randn(SAMPLES, 4, generator=random) for _ in range(2))
    return TensorDataset(inputs, targets, torch.arange(SAMPLES))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def train(
    folder: Path, kind: str, optimizer: Any, settings: dict[str, Any], hooks: Any = ()
) -> dict[str, Any]:
    given = {
        "batch_size": 2,
        "log_every": 1,
        "enable_fault_tolerance": True,
        "checkpoint_frequency": 2,
        **settings,
    }
    manager = tiny.manager_for(folder, **given)
    fault, copied, model = Fault(kind), Copied(), net()
    build = {
        "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
        "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    }.get(optimizer, optimizer)
    error: MultiGPUError | None = None
    try:
        manager.fit(model, data(), loss_fn=fault, optimizer=build, callbacks=[copied, *hooks])
    except MultiGPUError as caught:
        error = caught
    rank = manager.placement.identity.rank
    events = [json.loads(line) for line in manager.run.events(rank).read_text().splitlines()]
    places = [i for batch in manager.train_loader.source.batches(0, 0) for i in batch]
    size = manager.sizes.global_batch
    return {
        "error": None if error is None else (type(error).__name__, str(error)),
        "faults": [
            (e["kind"], e["action"], e["step"], e["rank"]) for e in events if e["event"] == "fault"
        ],
        "steps": manager.trainer.step,
        "weights": tiny.weights(model),
        "after": copied.after,
        "bad_step": places.index(BAD) // size + 1,
        "bad_rank": (places.index(BAD) % (2 * manager.placement.dp_size)) // 2,
        "losses": [epoch["train"]["loss"] for epoch in manager.progress.history],
        "passed": sorted(manager.fault_tolerance.skipped_batches.places),
    }


def same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], value) for name, value in reference.items())


@pytest.mark.parametrize(
    ("world", "kind", "optimizer", "more"),
    [
        (2, "loss", "sgd", {}),
        (3, "gradient", "adamw", {}),
        (2, "loss", "adamw", {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}),
        (1, "gradient", "sgd", {"training_mode": "single"}),
    ],
)
def test_on_nonfinite_stop_names_the_culprit_before_a_weight_is_poisoned(
    tmp_path: Path, world: int, kind: str, optimizer: str, more: dict[str, Any]
) -> None:
    for rank, found in enumerate(run_ranks(world, train, tmp_path, kind, optimizer, more)):
        name, text = found["error"]
        step = found["bad_step"]
        assert name == "NonFiniteLossError"
        assert f"step {step}:" in text
        said = "the loss is nan" if kind == "loss" else "the loss is finite"
        assert f"rank {found['bad_rank']}: {said}" in text
        samples = text.split("samples ")[1].splitlines()[0]
        assert str(BAD) in samples.split(", ")
        assert "parameters with a bad gradient" in text and "3.weight" in text
        assert found["faults"] == [("nonfinite", "stop", step, rank)]
        # Averages of BatchNorm, which the forward had changed already, as well.
        assert step > 1 and same(found["weights"], found["after"][step - 1])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_nonfinite_skip_leaves_the_step_out_on_every_rank(
    tmp_path: Path, optimizer: str
) -> None:
    ranks = run_ranks(2, train, tmp_path, "loss", optimizer, {"on_nonfinite": "skip"})
    for rank, found in enumerate(ranks):
        step = found["bad_step"]
        assert found["error"] is None
        assert found["faults"] == [("nonfinite", "skip", step, rank)]
        assert found["steps"] == SAMPLES // 4
        assert same(found["after"][step], found["after"][step - 1])
        assert math.isfinite(found["losses"][0])
        own = {k: v for k, v in ranks[0]["weights"].items() if "running" not in k}
        assert same(found["weights"], own)


class OnTheGpu(Callback):
    """Looks for NaN as on a GPU: the fused optimizers of the CPU have the same gate."""

    def on_setup(self, manager: Any) -> None:
        gate = manager.trainer.nan_guard
        gate.use_gate(manager.trainer.optimizer)
        gate.start()


def gated(folder: Path, kind: str, optimizer: str, settings: dict[str, Any]) -> dict[str, Any]:
    build: Any = {
        "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
        "adamw": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
        "adagrad": lambda p: optim.Adagrad(p, lr=1e-2, fused=True),
    }[optimizer]
    return train(folder, kind, build, settings, [OnTheGpu()])


@pytest.mark.parametrize(
    ("world", "kind", "optimizer", "more"),
    [
        (2, "loss", "adamw", {}),
        (1, "gradient", "sgd", {"max_grad_norm": 1.0}),
        (1, "gradient", "adagrad", {"checkpoint_frequency": 1000}),
    ],
)
def test_the_gate_holds_the_weights_until_the_host_looks(
    tmp_path: Path, world: int, kind: str, optimizer: str, more: dict[str, Any]
) -> None:
    for rank, found in enumerate(run_ranks(world, gated, tmp_path, kind, optimizer, more)):
        name, text = found["error"]
        step = found["bad_step"]
        assert name == "NonFiniteLossError" and f"step {step}:" in text
        assert f"rank {found['bad_rank']}: the loss is" in text
        assert str(BAD) in text.split("samples ")[1].splitlines()[0].split(", ")
        (fault,) = found["faults"]
        assert fault[:2] == ("nonfinite", "stop") and fault[3] == rank
        before = found["after"][step - 1]
        held = {k: v for k, v in before.items() if "running" not in k and "num" not in k}
        assert same(found["weights"], held)


def test_large_gradients_are_looked_at_as_well(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("multi_gpu_training.training.nan_guard.LARGE", 1)
    for kind in ("loss", "gradient"):
        found = gated(tmp_path / kind, kind, "adamw", {"training_mode": "single"})
        step = found["bad_step"]
        assert found["error"][0] == "NonFiniteLossError" and f"step {step}:" in found["error"][1]


def test_the_gate_skips_a_step_without_a_trace(tmp_path: Path) -> None:
    more = {"on_nonfinite": "skip", "training_mode": "single"}
    (found,) = run_ranks(1, gated, tmp_path, "loss", "adamw", more)
    step = found["bad_step"]
    assert found["error"] is None and found["steps"] == SAMPLES // 2
    assert found["faults"][0][:2] == ("nonfinite", "skip")
    assert same(found["after"][step], found["after"][step - 1])  # averages of BatchNorm too
    assert math.isfinite(found["losses"][0])


def test_the_gate_rolls_back_and_passes_the_batch_over(tmp_path: Path) -> None:
    more = {"on_nonfinite": "rollback"}
    for found in run_ranks(2, gated, tmp_path, "loss", "adamw", more):
        assert found["error"] is None
        assert found["passed"] == [(0, found["bad_step"] - 1)]
        assert found["steps"] == SAMPLES // 4 - 1
        assert all(value.isfinite().all() for value in found["weights"].values())


@pytest.mark.parametrize("frequency", [2, 1000])
def test_on_nonfinite_rollback_passes_the_batch_over(tmp_path: Path, frequency: int) -> None:
    more = {"on_nonfinite": "rollback", "checkpoint_frequency": frequency}
    for rank, found in enumerate(run_ranks(3, train, tmp_path, "loss", "adamw", more)):
        step = found["bad_step"]
        assert found["error"] is None
        assert found["faults"] == [("nonfinite", "rollback", step, rank)]
        assert found["passed"] == [(0, step - 1)]
        assert found["steps"] == SAMPLES // 6 - 1
        assert all(value.isfinite().all() for value in found["weights"].values())


def test_rollbacks_are_bounded_by_max_restarts(tmp_path: Path) -> None:
    more = {"on_nonfinite": "rollback", "max_restarts": 0, "training_mode": "single"}
    (found,) = run_ranks(1, train, tmp_path, "loss", "sgd", more)
    assert found["error"][0] == "NonFiniteLossError"
    assert found["faults"][0][1] == "stop"


def spiky(folder: Path, policy: str) -> dict[str, Any]:
    more = {"batch_size": 2, "on_loss_spike": policy, "epochs": 1}
    return train(folder, "spike", "sgd", more)


def test_on_loss_spike_says_what_happens(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("multi_gpu_training.monitoring.spikes.ENOUGH", 3)
    seen = {
        policy: spiky(tmp_path / policy, policy)
        for policy in ("ignore", "warn", "rollback", "stop")
    }
    step = seen["ignore"]["bad_step"]
    assert step > 4
    assert seen["ignore"]["faults"] == [] and seen["ignore"]["error"] is None
    assert seen["warn"]["faults"] == [("loss_spike", "warn", step, 0)]
    assert seen["warn"]["steps"] == SAMPLES // 2
    assert seen["rollback"]["passed"] == [(0, step - 1)]
    assert seen["rollback"]["steps"] == SAMPLES // 2 - 1 and seen["rollback"]["error"] is None
    assert seen["stop"]["error"][0] == "LossSpikeError"


def test_a_healthy_loss_near_zero_gives_few_warnings_and_never_stops_a_run() -> None:
    """177,000 logged losses that fall by factors of a million and jump by factors of a thousand on
    their way, as those of a small network on clean data do."""
    chance = random.Random(3)
    told: list[Any] = []
    warn, stop = LossSpikes("warn", lambda *fault: told.append(fault)), LossSpikes("stop")
    for step in range(177_000):
        level = 2.3 * max(1e-7, 0.9998**step)
        jump = 10 ** chance.uniform(0, 4) if chance.random() < 0.02 else 1.0
        loss = min(2.5, level * jump * chance.lognormvariate(0, 0.5))
        for spikes in (warn, stop):
            spikes.look(loss, step, 0, step, 1)
    assert len(told) <= 10
    with pytest.raises(LossSpikeError):  # a run that blows up is still stopped
        stop.look(1e3, 177_001, 0, 1, 1)


def test_spikes_are_told_ever_more_rarely_and_a_new_level_is_taken_as_such() -> None:
    told: list[Any] = []
    spikes = LossSpikes("warn", lambda *fault: told.append(fault))
    for step in range(4000):
        growing = 10.0 * 2.2 ** (step // 40) if step % 40 == 39 else 1.0
        spikes.look(growing, step, 0, step, 1)
    assert 2 <= len(told) <= 7 and "more since the last warning" in told[-1][2]
    level = LossSpikes("warn")
    for _ in range(20):
        level.is_spike(1.0)
    assert [level.is_spike(50.0) for _ in range(40)].count(True) == 16
    again = LossSpikes("warn")
    again.load_state_dict(json.loads(json.dumps(level.state_dict())))
    assert again.state_dict() == level.state_dict()


def test_a_spike_is_far_above_a_noisy_curve_and_a_flat_one() -> None:
    noisy = [1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 1.0, 0.7]
    assert 2.0 < threshold(noisy) < 4.0
    assert threshold([1.0] * 8) == 2.0
    assert threshold([*noisy, 1e6]) < 5.0  # one spike does not hide the next
    spikes = LossSpikes("warn")
    assert not any(spikes.is_spike(loss) for loss in noisy)
    assert spikes.is_spike(50.0) and spikes.is_spike(50.0)
    assert not spikes.is_spike(math.nan)  # another fault
    falling = LossSpikes("warn")
    assert not any(falling.is_spike(10 * 0.9**i) for i in range(60))


class Astray(Callback):
    """Changes a weight on one rank alone, once."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.done = False

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.at and not self.done:
            self.done = True
            if manager.placement.dp_rank == 1:
                with torch.no_grad():
                    next(manager.model.parameters()).add_(1e-3)


class Damaged(Astray):
    """And the checkpoints from step 4 on are damaged; the first epoch ends with it."""

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.at and not self.done and manager.placement.is_main:
            manager.fault_tolerance.wait()
            for path in manager.run.checkpoints.glob("step-*/model.safetensors"):
                if int(path.parent.name.removeprefix("step-")) >= 4:
                    path.write_bytes(path.read_bytes()[:-1])
        super().on_step_end(manager, result)


def diverge(
    folder: Path, policy: str, *hooks: Callback
) -> tuple[str | None, int, dict[str, Tensor]]:
    manager = tiny.manager_for(
        folder,
        batch_size=2,
        epochs=2,
        enable_fault_tolerance=True,
        checkpoint_frequency=2,
        consistency_check_every=1,
        on_divergence=policy,
    )
    model = tiny.line()
    try:
        manager.fit(model, tiny.points(), optimizer=tiny.sgd, callbacks=list(hooks))
    except DivergenceError as error:
        return str(error), manager.trainer.step, tiny.weights(model)
    return None, manager.trainer.step, tiny.weights(model)


def test_on_divergence_stops_or_goes_back_to_equal_replicas(tmp_path: Path) -> None:
    for text, step, _ in run_ranks(2, diverge, tmp_path / "stop", "stop", Astray(5)):
        assert step == 5 and text is not None and "ranks [1]" in text
    whole = run_ranks(2, diverge, tmp_path / "whole", "stop")
    for hook in (Astray(5), Damaged(7)):  # of the same epoch, and of the one before
        back = run_ranks(2, diverge, tmp_path / type(hook).__name__, "rollback", hook)
        for (text, step, ours), (_, steps, reference) in zip(back, whole, strict=True):
            assert text is None and step == steps == 8
            assert same(ours, reference)


@pytest.mark.parametrize(
    ("error", "settings", "expected"),
    [
        (NonFiniteLossError(1), {}, ("nonfinite", "stop")),
        (NonFiniteLossError(1), {"on_nonfinite": "rollback"}, ("nonfinite", "rollback")),
        (LossSpikeError("", 0, 0, 1), {"on_loss_spike": "rollback"}, ("loss_spike", "rollback")),
        (LossSpikeError("", 0, 0, 1), {"on_loss_spike": "stop"}, ("loss_spike", "stop")),
        (DivergenceError("x"), {}, ("divergence", "stop")),
        (DivergenceError("x"), {"on_divergence": "rollback"}, ("divergence", "rollback")),
        (torch.OutOfMemoryError("x"), {}, ("out_of_memory", "restart")),
        (MemoryShortError("x"), {}, ("out_of_memory", "restart")),
        (ModelError("x"), {}, ("config", "stop")),
        (ValueError("x"), {}, ("user_code", "restart")),
        (
            RuntimeError("Caught ValueError in DataLoader worker process 0."),
            {},
            ("loader", "restart"),
        ),
        (
            RuntimeError("[/p/gloo/transport/tcp/unbound_buffer.cc:79] Timed out waiting 500ms"),
            {},
            ("timeout", "restart"),
        ),
        (
            RuntimeError("[/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
            {},
            ("lost_rank", "restart"),
        ),
    ],
)
def test_every_fault_has_its_line_in_the_table(
    error: BaseException, settings: dict[str, Any], expected: tuple[str, str]
) -> None:
    policy = judge(error, MultiGPUConfig(**settings))
    assert (policy.kind, policy.action) == expected
    table = Path(__file__).parents[2].joinpath("docs/faults.md").read_text()
    assert f"| `{policy.kind}` |" in table


def test_handle_error_records_and_raises_what_it_cannot_mend(tmp_path: Path) -> None:
    manager: MultiGPUTrainingManager = tiny.manager_for(tmp_path, run_name="run")
    manager.setup_training(tiny.line(), tiny.points(), optimizer=tiny.sgd)
    with pytest.raises(ValueError, match="wrong"):
        try:
            raise ValueError("wrong")
        except ValueError as error:
            manager.fault_tolerance.handle_error(error)
    manager.finish()
    lines = manager.run.events(0).read_text().splitlines()
    (fault,) = [e for e in map(json.loads, lines) if e["event"] == "fault"]
    assert (fault["kind"], fault["action"], fault["step"]) == ("user_code", "restart", 1)


def test_handle_error_rolls_back_in_a_loop_of_ones_own(tmp_path: Path, capsys: Any) -> None:
    manager = tiny.manager_for(
        tmp_path, enable_fault_tolerance=True, on_nonfinite="rollback", batch_size=4
    )
    model, loader, _ = manager.setup_training(tiny.line(), tiny.points(), optimizer=tiny.sgd)
    batches = list(loader)
    manager.trainer.train_step(batches[0])
    manager.save_checkpoint()
    saved = tiny.weights(model)
    manager.trainer.train_step(batches[1])
    batches[2][0].fill_(math.nan)
    try:
        manager.trainer.train_step(batches[2])
    except NonFiniteLossError as error:
        manager.fault_tolerance.handle_error(error)
    assert manager.trainer.step == 1 and same(tiny.weights(model), saved)
    said = capsys.readouterr().err
    assert "back at step 1; your own loop continues with its next batch" in said
    assert "the 1 steps since" in said
    manager.trainer.train_step(batches[3])
    assert manager.trainer.step == 2
    manager.finish()


def test_fp16_loss_scaling_skips_are_no_faults(tmp_path: Path) -> None:
    settings = {"use_mixed_precision": True, "mixed_precision_dtype": "fp16"}
    manager = tiny.manager_for(tmp_path, **settings)
    manager.setup_training(tiny.line(), tiny.points(), optimizer=tiny.sgd)
    assert manager.trainer.nan_guard.mode == "scaler"
    manager.finish()


def test_every_fault_reaches_those_who_listen(tmp_path: Path) -> None:
    manager = tiny.manager_for(
        tmp_path, enable_fault_tolerance=True, on_nonfinite="rollback", batch_size=4
    )
    _, loader, _ = manager.setup_training(tiny.line(), tiny.points(), optimizer=tiny.sgd)
    heard: list[TrainingFault] = []
    manager.fault_tolerance.on_fault.append(heard.append)
    batches = list(loader)
    batches[0][0].fill_(math.nan)
    try:
        manager.trainer.train_step(batches[0])
    except NonFiniteLossError as error:
        manager.fault_tolerance.handle_error(error)
    manager.fault_tolerance.record_fault("loss_spike", "warn", "it jumped", {"step": 3, "by": 9})
    with pytest.raises(ValueError, match="wrong"):
        manager.fault_tolerance.handle_error(ValueError("wrong"))
    manager.finish()
    first, second, third = heard
    assert (first.kind, first.action, first.step) == ("nonfinite", "rollback", 1)
    assert second == TrainingFault("loss_spike", "warn", "it jumped", 3, {"by": 9})
    assert (third.kind, third.action, third.text) == ("user_code", "restart", "ValueError: wrong")
