"""A NaN in recorded steps, which have no gate: found, taken back, and its step named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from ranks import run_ranks
from recorder import recording
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback
from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.training.runner import verified_graph

SAMPLES, BATCH = 480, 4
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3),
}


class OnTheGpu(Callback):
    """Looks for NaN as on a GPU, and copies the state after each step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_setup(self, manager: Any) -> None:
        gate, optimizer = manager.trainer.nan_guard, manager.trainer.optimizer
        if isinstance(optimizer, optim.RMSprop):
            gate.mode = "later"
        else:
            gate.use_gate(optimizer)
        gate.start()

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.after[step] = tiny.weights(manager.model)


def train(
    folder: Path, bad: tuple[int, ...], optimizer: str, recorded: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 4)
    inputs[list(bad)] = torch.nan
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    given = {"enable_fault_tolerance": True, "log_every": 1000, "step_execution": "graph"}
    manager = tiny.manager_for(folder, **{**given, "batch_size": BATCH, **settings})
    watch = OnTheGpu()
    error: MultiGPUError | None = None
    with recording((lambda rank: None) if recorded else (lambda rank: "not wanted")):
        try:
            manager.fit(
                model,
                TensorDataset(inputs, targets),
                loss_fn=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
                optimizer=OPTIMIZERS[optimizer],
                callbacks=[watch],
            )
        except MultiGPUError as caught:
            error = caught
    rank = manager.placement.identity.rank
    events = [json.loads(line) for line in manager.run.events(rank).read_text().splitlines()]
    places = [i for batch in manager.train_loader.source.batches(0, 0) for i in batch]
    return {
        "error": None if error is None else (type(error).__name__, str(error)),
        "faults": [(e["kind"], e["action"]) for e in events if e["event"] == "fault"],
        "weights": tiny.weights(model),
        "after": watch.after,
        "bad_steps": sorted(places.index(i) // manager.sizes.global_batch + 1 for i in bad),
        "mode": manager.trainer.execution.mode,
        "replayed": manager.trainer.execution.replayed,
        "steps": manager.trainer.step,
        "passed": sorted(manager.fault_tolerance.skipped_batches.places),
    }


def same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], value) for name, value in reference.items())


@pytest.mark.parametrize(
    ("world", "optimizer", "settings"),
    [
        (1, "adamw", {}),
        (2, "adamw", {"gradient_accumulation_steps": 2, "batch_size": 2}),
        (1, "sgd", {"max_grad_norm": 1.0}),
        (1, "rmsprop", {}),
        (1, "adamw", {"checkpoint_frequency": 7}),
        (2, "sgd", {"log_every": 5}),
    ],
)
def test_a_nan_in_recorded_steps_is_named_and_leaves_no_trace(
    tmp_path: Path, world: int, optimizer: str, settings: dict[str, Any]
) -> None:
    bad = 141
    for found in run_ranks(world, train, tmp_path, (bad,), optimizer, True, settings):
        (step,) = found["bad_steps"]
        name, text = found["error"]
        assert name == "NonFiniteLossError"
        assert f"step {step}:" in text
        assert str(bad) in text.split("samples ")[1].splitlines()[0].split(", ")
        assert found["mode"] == "graph"
        assert found["faults"] == [("nonfinite", "stop")]
        assert step > 12 and same(found["weights"], found["after"][step - 1])


def test_a_nan_is_seen_long_before_the_epoch_ends(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(verified_graph, "LOOK_RECORDED", 8)
    monkeypatch.setattr(verified_graph, "FIRST_WINDOW", 10_000)  # no comparison finds it before
    bad = 141
    found = train(tmp_path, (bad,), "adamw", True, {})
    (step,) = found["bad_steps"]
    assert f"step {step}:" in found["error"][1]
    assert step + 8 <= max(found["after"]) <= step + 16
    assert same(found["weights"], found["after"][step - 1])


def test_recorded_steps_roll_back_and_stay_recorded(tmp_path: Path) -> None:
    bad = (141, 300)
    settings = {"on_nonfinite": "rollback", "checkpoint_frequency": 5}
    expected = train(tmp_path / "eager", bad, "adamw", False, settings)
    found = train(tmp_path / "graph", bad, "adamw", True, settings)
    assert found["error"] is None and found["mode"] == "graph"
    assert found["faults"] == [("nonfinite", "rollback")] * 2
    assert found["passed"] == [(0, step - 1) for step in found["bad_steps"]]
    assert found["steps"] == expected["steps"] == SAMPLES // BATCH - 2
    assert found["replayed"] > 60
    assert same(found["weights"], expected["weights"])


def test_an_optimizer_without_a_gate_is_read_where_nothing_is_recorded(tmp_path: Path) -> None:
    bad = 141
    found = train(tmp_path, (bad,), "rmsprop", False, {})
    (step,) = found["bad_steps"]
    assert found["mode"] == "eager" and f"step {step}:" in found["error"][1]
    assert same(found["weights"], found["after"][step - 1])


def test_recorded_steps_skip_by_a_gate_of_their_own(tmp_path: Path) -> None:
    bad = 141
    found = train(tmp_path, (bad,), "adamw", True, {"on_nonfinite": "skip"})
    (step,) = found["bad_steps"]
    assert found["error"] is None and found["mode"] == "graph"
    assert same(found["after"][step], found["after"][step - 1])
    assert all(value.isfinite().all() for value in found["weights"].values())


def test_what_a_recorded_gate_writes_to_stays_where_it_is(tmp_path: Path) -> None:
    """A rollback for another reason opens the gate; the recordings live on."""
    manager = tiny.manager_for(tmp_path, on_nonfinite="skip", training_mode="single")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
    manager.setup_training(model, data, loss_fn=F.mse_loss, optimizer=OPTIMIZERS["adamw"])
    gate = manager.trainer.nan_guard
    gate.use_gate(manager.trainer.optimizer)
    gate.keep_buffers()
    kept = [buffer.data_ptr() for buffer in gate._good]
    gate.reset()
    gate.keep_buffers()
    assert kept and [buffer.data_ptr() for buffer in gate._good] == kept
    manager.finish()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_single_bad_weight_is_seen(tmp_path: Path, kind: torch.dtype, value: float) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.more = nn.Parameter(torch.ones(7, dtype=kind))
            self.none = nn.Parameter(torch.ones(0))

    manager = tiny.manager_for(tmp_path, training_mode="single")
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
    manager.setup_training(Odd(), data, loss_fn=F.mse_loss, optimizer=OPTIMIZERS["rmsprop"])
    guard = manager.trainer.nan_guard
    guard.mode = "later"
    guard.ask_about_weights()
    assert not guard.weights_are_spoilt()
    with torch.no_grad():
        manager.model.more[3] = value
    guard.ask_about_weights()
    assert guard.weights_are_spoilt()
    manager.finish()
