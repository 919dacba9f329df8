"""Steps as CUDA graphs, on a real GPU: the same bits as eager steps, or an honest fallback."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training.runner import compile_switch, selection

pytestmark = pytest.mark.gpu
HIDDEN = "MGT_TEST_GPU_WEIGHT"


class Net(nn.Module):
    """A small net that can do what recordings do not repeat."""

    def __init__(self, does: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4)
        )
        self.dropout = nn.Dropout(0.3)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        if self.does == "waits":
            x = x * (1 + 0 * x.sum().item())
        if self.does == "selects":
            x = x + 0 * x[x > 0].sum()
        if self.does == "draws on the CPU":
            x = x + 1e-3 * torch.rand(16).to(x.device)
        if self.does == "draws in Python":
            x = x * (1 + 0 * random.random())
        if self.does == "drops":
            x = self.dropout(x)
        return self.body(x)


def data(samples: int = 1600) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 16, generator=generator), torch.arange(samples) % 4)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    folder: Path, execution: str, does: str = "", dataset: Any = None, **given: Any
) -> tuple[dict[str, Tensor], Any]:
    fit = {name: given.pop(name) for name in ("optimizer", "loss_fn", "callbacks") if name in given}
    settings = {
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "enable_fault_tolerance": False,
        "epochs": 5,
        "batch_size": 32,
        "device": "cuda",
        "step_execution": execution,
        **given,
    }
    manager = MultiGPUTrainingManager(MultiGPUConfig(**settings))
    manager.fit(Net(does), dataset or data(), **{"loss_fn": cross_entropy, **fit})
    weights = {n: t.detach().double().cpu() for n, t in manager.model.state_dict().items()}
    return weights, manager


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-12)) for n in a)


def both(folder: Path, does: str = "", **given: Any) -> tuple[float, Any]:
    """How far a recorded training is from an eager one, and its execution."""
    expected, eager = train(folder, "eager", does, **given)
    weights, manager = train(folder, "graph", does, **given)
    for ours, theirs in zip(manager.progress.history, eager.progress.history, strict=True):
        assert ours["train"]["loss"] == pytest.approx(theirs["train"]["loss"], rel=1e-4)
    return apart(expected, weights), manager.trainer.execution


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"does": "drops"},
        {"schedule": "cosine", "max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
        {"dataset": data(1607)},  # a short last batch
        {"use_mixed_precision": True},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)},
        {"data_on_gpu": False},
        {"dataset": DataLoader(data(), batch_size=32, num_workers=2)},
    ],
    ids=["plain", "dropout", "everything", "short", "bf16", "sgd", "loaded", "workers"],
)
def test_graphs_learn_what_eager_steps_learn(tmp_path: Path, given: dict[str, Any]) -> None:
    difference, execution = both(tmp_path, **given)
    assert difference <= 1e-5
    assert execution.mode == "graph"
    assert execution.replayed >= 0.9 * execution.steps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"does": "waits"}, "waits for the GPU"),
        ({"does": "selects"}, "waits for the GPU"),
        ({"does": "draws on the CPU"}, "random numbers on the CPU"),
        ({"does": "draws in Python"}, "random numbers on the CPU"),
        ({"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.01)}, "Adagrad"),
        ({"use_mixed_precision": True, "mixed_precision_dtype": "fp16"}, "fp16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_recorded_runs_eagerly_and_is_named(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    difference, execution = both(tmp_path, **given)
    assert difference <= 1e-5
    assert execution.mode == "eager"
    assert said in execution.reason


class Curriculum(Callback):
    """A number that changes after a while, where guards see it or where they do not."""

    def __init__(self, knob: dict[str, float]) -> None:
        self.knob = knob

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        value = 1.0 if step < 120 else 2.0
        self.knob["weight"] = value
        os.environ[HIDDEN] = str(value)


@pytest.mark.parametrize("seen", [True, False])
def test_no_stale_number_ends_up_in_the_weights(tmp_path: Path, seen: bool) -> None:
    knob = {"weight": 1.0}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        weight = knob["weight"] if seen else float(os.environ.get(HIDDEN, "1"))
        return cross_entropy(model, batch) * weight

    try:
        results = []
        for execution in ("eager", "graph"):
            knob["weight"], os.environ[HIDDEN] = 1.0, "1"
            hooks = [Curriculum(knob)]
            results.append(train(tmp_path, execution, loss_fn=loss_fn, callbacks=hooks))
    finally:
        os.environ.pop(HIDDEN, None)
    (expected, _), (weights, manager) = results
    assert apart(expected, weights) <= 1e-5
    assert manager.trainer.execution.mode == "eager"
    said = "knob['weight'] changed from 1.0 to 2.0" if seen else "computed again"
    assert said in manager.trainer.execution.reason


def test_a_failed_recording_leaves_the_gpu_usable(tmp_path: Path) -> None:
    from multi_gpu_training.training.runner.graph import CaptureError, CudaGraphs

    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphs = CudaGraphs(device)
        with pytest.raises(CaptureError):
            graphs.capture(lambda: torch.ones(3, device=device).sum().item())
        assert torch.rand(5, device=device).shape == (5,)
        value = torch.zeros(1, device=device)
        graph, _ = graphs.capture(lambda: value.add_(1))
        graph.replay()
        assert float(value) == 1.0
    difference, execution = both(tmp_path)
    assert difference <= 1e-5
    assert execution.mode == "graph"


def test_losses_that_are_kept_stay_what_they_were(tmp_path: Path) -> None:
    found = []
    for execution in ("eager", "graph"):
        settings = {"progress": "off", "save_dir": str(tmp_path), "step_execution": execution}
        manager = MultiGPUTrainingManager(MultiGPUConfig(**settings, enable_fault_tolerance=False))
        manager.setup_training(Net(), data(32), loss_fn=cross_entropy)
        inputs = torch.empty(32, 16, device="cuda")
        target = torch.arange(32, device="cuda") % 4
        results = []
        for step in range(60):
            inputs.copy_(torch.randn(32, 16, generator=torch.Generator().manual_seed(step)))
            results.append(manager.trainer.train_step((inputs, target)))
        found.append([float(result.loss) for result in results])
        mode = manager.trainer.execution.mode
        manager.finish()
    assert mode == "graph"
    assert found[0] == pytest.approx(found[1], rel=1e-5)


class Copied(Callback):
    def __init__(self) -> None:
        self.manager: Any = None
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.manager = manager
        self.after[step] = {n: t.clone() for n, t in manager.model.state_dict().items()}


@pytest.mark.parametrize("execution", ["graph", "eager"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, capturable=True),
    ],
    ids=["adamw", "sgd", "rmsprop"],
)
def test_a_nan_is_named_and_leaves_no_trace(tmp_path: Path, execution: str, optimizer: Any) -> None:
    bad, dataset, copied = 1234, data(8000), Copied()
    dataset.tensors[0][bad] = torch.nan
    with pytest.raises(NonFiniteLossError) as caught:
        train(tmp_path, execution, dataset=dataset, optimizer=optimizer, callbacks=[copied])
    manager = copied.manager
    assert manager.trainer.execution.mode == execution, manager.trainer.execution.reason
    places = [i for batch in manager.train_loader.source.batches(0, 0) for i in batch]
    step = places.index(bad) // 32 + 1
    assert caught.value.step == step > 20
    assert f" {bad}," in str(caught.value) or f" {bad}\n" in str(caught.value)
    before = copied.after[step - 1]
    for name, value in manager.model.state_dict().items():
        # In eager steps averages of BatchNorm are put back to where the host looked last.
        if execution == "graph" or ("running" not in name and "num" not in name):
            assert torch.equal(value, before[name]), name


@pytest.mark.filterwarnings("default")  # a warning of torch's own compiler is not our error
def test_compiled_steps_learn_what_eager_steps_learn(tmp_path: Path) -> None:
    sgd = lambda p: torch.optim.SGD(p, lr=0.05)  # noqa: E731
    expected, _ = train(tmp_path, "eager", optimizer=sgd, allow_tf32=False)
    weights, manager = train(tmp_path, "compile", optimizer=sgd, allow_tf32=False)
    assert manager.trainer.execution.mode == "compile", manager.trainer.execution.reason
    # Fused kernels add in another order, and 250 steps let it grow.
    assert apart(expected, weights) <= 1e-3


class CompiledAtOnce:
    """Stands for the process that compiles beside the training: the compiler runs here."""

    problem: str | None = None
    done = True

    def __init__(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.filterwarnings("default")  # a warning of torch's own compiler is not our error
@pytest.mark.parametrize(("kind", "same"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_compiled_and_recorded_steps_learn_what_eager_steps_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, same: float
) -> None:
    monkeypatch.setattr(compile_switch, "PAYS_AFTER_S", 0.0)
    monkeypatch.setattr(compile_switch, "CompileAhead", CompiledAtOnce)
    monkeypatch.setattr(selection, "WORTH_IT", 1e9)
    monkeypatch.setattr(selection, "CLEARLY_FASTER", 1e9)
    inputs, labels = data().tensors
    ends, modes, since = [], [], []
    for how in ("eager", "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 32, bias=False),
            nn.BatchNorm1d(32),
            nn.GELU(),
            nn.Linear(32, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 4),
        ).to(kind)
        settings = {"batch_size": 32, "max_steps": 48, "epochs": 2, "progress": "off"}
        manager = MultiGPUTrainingManager(
            MultiGPUConfig(
                save_dir=str(tmp_path / how), step_execution=how, fast_defaults=False, **settings
            )
        )
        manager.fit(
            model,
            TensorDataset(inputs.to(kind), labels),
            loss_fn=cross_entropy,
            optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
        )
        ends.append({k: v.cpu().clone() for k, v in manager.model.state_dict().items()})
        modes.append(manager.trainer.execution.mode)
        reason = manager.trainer.execution.reason
        since.append(manager.trainer.execution.switch.since)
    assert modes == ["eager", "compiled graph"], reason
    assert since[1] <= 28  # at least 20 steps were compiled and recorded
    for name, tensor in ends[0].items():
        off = (tensor.double() - ends[1][name].double()).norm()
        assert off <= same * tensor.double().norm(), name


@pytest.mark.filterwarnings("default")  # a warning of torch's own compiler is not our error
def test_another_process_compiles_while_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_switch, "PAYS_AFTER_S", 0.0)
    monkeypatch.setattr(selection, "WORTH_IT", 1e9)
    monkeypatch.setattr(selection, "CLEARLY_FASTER", 1e9)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = MultiGPUConfig(
        save_dir=str(tmp_path), batch_size=32, epochs=100_000, progress="off", max_steps=1_000_000
    )
    manager = MultiGPUTrainingManager(config)

    class End(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            execution = manager.trainer.execution
            if execution.mode == "compiled graph" or (
                result.step > 100 and not execution.switch.waits
            ):
                manager.config.max_steps = min(manager.config.max_steps, result.step + 50)

    inputs, labels = data().tensors
    model = nn.Sequential(nn.Linear(inputs.shape[-1], 64), nn.GELU(), nn.Linear(64, 10))
    manager.fit(model, TensorDataset(inputs, labels), loss_fn=cross_entropy, callbacks=[End()])
    assert manager.trainer.execution.mode == "compiled graph"
    assert manager.trainer.execution.switch.since > 100
