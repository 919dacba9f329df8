"""What only a GPU can show. Several ranks share the one GPU over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager, TrainingMode

pytestmark = pytest.mark.gpu


def data(samples: int = 1001) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 1, 12, 12, generator=generator)
    return TensorDataset(inputs, (inputs.mean((1, 2, 3)) * 40).long().clamp(-2, 2) + 2)


def cnn(batchnorm: bool, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    norm: list[nn.Module] = [nn.BatchNorm2d(8)] if batchnorm else []
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=not batchnorm),
        *norm,
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(200, 5),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Stop(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.step:
            raise Stop


def train(
    folder: Path,
    settings: dict[str, Any],
    net: dict[str, Any],
    optimizer: Any = sgd,
    stop: int | None = None,
) -> Any:
    settings = {
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "epochs": 3,
        "enable_fault_tolerance": False,
        "share_gpu": True,
        "device": "cuda",
        "fast_defaults": False,  # compared to the last digits of float32
        "step_execution": "eager",
        **settings,
    }
    manager = MultiGPUTrainingManager(MultiGPUConfig(**settings))
    assert manager.placement.device.type == "cuda"
    model = cnn(**net)
    hooks = [] if stop is None else [StopAfter(stop)]
    try:
        manager.fit(model, data(), optimizer=optimizer, callbacks=hooks)
    except Stop:
        return None
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def apart(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    return max(
        float((ours[name].double() - value.double()).norm() / value.double().norm())
        for name, value in reference.items()
        if value.is_floating_point()
    )


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_data_parallel_on_one_gpu_twice_is_what_one_rank_computes(
    tmp_path: Path, optimizer: Any, accumulation: int
) -> None:
    same = {"global_batch_size": 48, "gradient_accumulation_steps": accumulation}
    one = {**same, "training_mode": TrainingMode.SINGLE}
    two = {**same, "training_mode": TrainingMode.DATA_PARALLEL, "device_ids": [0, 0]}
    net = {"batchnorm": False}
    reference = run_ranks(1, train, tmp_path, one, net, optimizer)[0]
    assert apart(run_ranks(1, train, tmp_path, two, net, optimizer)[0], reference) <= 1e-5


@pytest.mark.parametrize("batchnorm", [False, True])
def test_ranks_on_the_gpu_learn_what_one_learns(tmp_path: Path, batchnorm: bool) -> None:
    settings = {"global_batch_size": 48, "sync_bn": batchnorm}
    net = {"batchnorm": batchnorm}
    reference = run_ranks(1, train, tmp_path, settings, net)[0]
    for world in (2, 3):
        for ours in run_ranks(world, train, tmp_path, settings, net):
            assert apart(ours, reference) <= 1e-5


@pytest.mark.parametrize("world", [1, 2, 3])
def test_resume_on_the_gpu_is_bit_for_bit_when_deterministic(tmp_path: Path, world: int) -> None:
    settings = {
        "global_batch_size": 48,
        "sync_bn": True,
        "deterministic": True,
        "epochs": 2,
        "enable_fault_tolerance": True,
        "checkpoint_frequency": 1,
        "use_mixed_precision": True,
    }
    net = {"batchnorm": True, "dropout": 0.3}
    whole = run_ranks(world, train, tmp_path, {**settings, "run_name": "whole"}, net, adamw)
    for stop in (5, 21, 30):
        name = {"run_name": f"stop-{stop}"}
        run_ranks(world, train, tmp_path, {**settings, **name}, net, adamw, stop)
        again = {**settings, **name, "resume": "auto"}
        for ours, reference in zip(
            run_ranks(world, train, tmp_path, again, net, adamw), whole, strict=True
        ):
            assert all(torch.equal(ours[key], reference[key]) for key in reference)


def precision(folder: Path, dtype: str) -> list[Any]:
    seen: list[Any] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        seen.append(str(output.dtype))
        return nn.functional.cross_entropy(output, batch[1])

    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            training_mode=TrainingMode.SINGLE,
            use_mixed_precision=True,
            epochs=1,
            mixed_precision_dtype=dtype,
            progress="off",
            tensorboard=False,
            save_dir=str(folder),
        )
    )
    result = manager.fit(cnn(True), data(), loss_fn=loss_fn)
    return [seen[0], manager.trainer.state.precision.describe(), result.metrics["loss"]]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", "torch.bfloat16"), ("bf16", "torch.bfloat16"), ("fp16", "torch.float16")],
)
def test_mixed_precision_on_the_gpu(tmp_path: Path, dtype: str, expected: str) -> None:
    found, described, loss = run_ranks(1, precision, tmp_path, dtype)[0]
    assert found == expected
    assert ("loss scaling" in described) == (dtype == "fp16")
    assert loss < 1.6


def pinned(folder: Path, pin: bool) -> bool:
    settings = MultiGPUConfig(
        training_mode=TrainingMode.SINGLE,
        pin_memory=pin,
        progress="off",
        tensorboard=False,
        save_dir=str(folder),
    )
    manager = MultiGPUTrainingManager(settings)
    _, loader, _ = manager.setup_training(cnn(False), data())
    _, batch = next(iter(loader._loader))  # type: ignore[union-attr]
    return bool(batch[0].is_pinned())


def test_pin_memory_pins_batches(tmp_path: Path) -> None:
    assert run_ranks(1, pinned, tmp_path, True)[0]
    assert not run_ranks(1, pinned, tmp_path, False)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"share_weights": [3, 1], "sync_bn": True},
        {"share_weights": [3, 1], "sync_bn": True, "fast_defaults": True, "data_on_gpu": True},
        {"balance": "measured", "sync_bn": True},
    ],
    ids=["given", "on-the-gpu", "measured"],
)
def test_unequal_shares_on_a_gpu_learn_what_one_rank_learns(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    exact = {"use_mixed_precision": False, "allow_tf32": False, "channels_last": False}
    same = {"global_batch_size": 48, **exact}
    net = {"batchnorm": True}
    reference = run_ranks(1, train, tmp_path, same, net)[0]
    for ours in run_ranks(2, train, tmp_path, {**same, **settings}, net):
        assert apart(ours, reference) <= 1e-5


def probed(folder: Path) -> Any:
    from multi_gpu_training.measure.rank_speed import Probe, first_batch

    settings = {"save_dir": str(folder), "progress": "off", "tensorboard": False}
    manager = MultiGPUTrainingManager(MultiGPUConfig(**settings, device="cuda", share_gpu=True))
    manager.setup_training(cnn(batchnorm=True), data(), optimizer=adamw)
    before = {name: value.clone() for name, value in manager.model.state_dict().items()}
    generator = torch.cuda.get_rng_state()
    probe = Probe(manager.trainer.state, first_batch(manager.train_loader))
    small, large = probe.measure(8), probe.measure(64)
    after = manager.model.state_dict()
    same = all(torch.equal(after[name], value) for name, value in before.items())
    same = same and torch.equal(generator, torch.cuda.get_rng_state())
    manager.finish()
    return small, large, same


def test_a_gpu_is_measured_with_its_memory_and_without_a_trace(tmp_path: Path) -> None:
    for small, large, same in run_ranks(2, probed, tmp_path):
        assert same and small.seconds > 0
        assert (small.count, large.count) == (8, 64)
        assert small.limit > 8 and large.limit > 64
