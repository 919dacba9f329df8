"""Corners of the training that need no hand-written loop beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tiny import FEATURES, flat, line, manager_for, points, sgd, squares
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import Callback
from multi_gpu_training.distributed.replicas import fingerprint
from multi_gpu_training.errors import DivergenceError, ModelError


def validate(folder: Path) -> float:
    """Whole-number labels of which the second half counts for nothing."""
    torch.manual_seed(1)
    labels = torch.arange(8) % 3
    labels[4:] = -100
    dataset = TensorDataset(torch.ones(8, FEATURES).cumsum(0), labels)
    manager = manager_for(folder, global_batch_size=8, shuffle=False)
    _, _, loader = manager.setup_training(
        nn.Linear(FEATURES, 3), dataset, dataset, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd
    )
    loss = manager.evaluate(loader)["loss"]
    manager.finish()
    return loss


def test_a_share_in_which_no_label_counts_adds_nothing_to_the_validation(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, validate, tmp_path)
    assert run_ranks(2, validate, tmp_path) == pytest.approx([expected] * 2, rel=1e-6)


# Learning rates


def rates(
    folder: Path, sets: dict[int, float], ends: int | None = None, **settings: Any
) -> list[float]:
    """The rate of each step, where `sets` says what the user sets after which."""
    seen: list[float] = []

    class Setting(Callback):
        def on_step_begin(self, run: Any, step: int) -> None:
            seen.append(float(run.optimizer.param_groups[0]["lr"]))

        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step == ends:
                raise ZeroDivisionError
            if result.step in sets:
                run.optimizer.param_groups[0]["lr"] = sets[result.step]

    manager = manager_for(folder, batch_size=2, training_mode="single", **settings)
    manager.fit(line(), points(16), loss_fn=squares, optimizer=sgd, callbacks=[Setting()])
    return seen


def test_a_rate_that_the_user_sets_stays(tmp_path: Path) -> None:
    assert rates(tmp_path, {2: 0.5}) == [0.1, 0.1] + [0.5] * 6


def test_a_schedule_goes_on_from_the_rate_that_the_user_sets(tmp_path: Path) -> None:
    usual = rates(tmp_path / "usual", {}, schedule="linear")
    found = rates(tmp_path / "set", {2: 0.3}, schedule="linear")
    assert found[:2] == usual[:2]
    assert found[2] == 0.3
    factor = 0.3 / usual[2]
    assert found[2:] == pytest.approx([factor * rate for rate in usual[2:]])


def test_a_rate_that_the_user_set_survives_a_resume(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"schedule": "linear", "epochs": 2, "run_name": "r"}
    kept |= {"enable_fault_tolerance": True, "checkpoint_frequency": 4}
    sets = {3: 0.3, 8: 0.2}  # step 8 is saved after it was set
    whole = rates(tmp_path / "whole", sets, **kept)
    with pytest.raises(ZeroDivisionError):
        rates(tmp_path / "parts", sets, ends=10, **kept)
    assert rates(tmp_path / "parts", sets, resume="auto", **kept) == whole[8:]


def combined(folder: Path, prebuilt: bool) -> list[float]:
    def schedule(optimizer: torch.optim.Optimizer) -> SequentialLR:
        warm = LinearLR(optimizer, 0.5, total_iters=2)
        parts = [warm, CosineAnnealingLR(optimizer, 6), ConstantLR(optimizer, 0.5, 2)]
        return SequentialLR(optimizer, parts, [2, 5])

    model = line()
    optimizer = sgd(model.parameters())
    scheduler: Any = schedule(optimizer) if prebuilt else schedule
    seen: list[float] = []

    class Watch(Callback):
        def on_step_begin(self, run: Any, step: int) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    manager = manager_for(
        folder,
        batch_size=2,
        training_mode="single",
        lr_scaling="linear",
        base_batch_size=1,
    )
    manager.fit(
        model,
        points(16),
        loss_fn=squares,
        optimizer=optimizer,
        scheduler=scheduler,
        callbacks=[Watch()],
    )
    return seen


def test_a_combined_scheduler_is_scaled_in_all_its_parts(tmp_path: Path) -> None:
    found = combined(tmp_path / "a", prebuilt=True)
    assert found == pytest.approx(combined(tmp_path / "b", prebuilt=False))
    assert max(found) == pytest.approx(0.2)  # twice 0.1, not 0.1, after the warm-up


def test_rates_are_scaled_from_the_batch_size_of_the_dataloader(tmp_path: Path) -> None:
    manager = manager_for(
        tmp_path, training_mode="single", lr_scaling="linear", gradient_accumulation_steps=2
    )
    data = DataLoader(points(16), batch_size=4)
    manager.setup_training(line(), data, loss_fn=squares, optimizer=sgd)
    manager.finish()
    assert manager.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


# Labels


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, **batch: Tensor) -> Any:
        return self.inside(**batch)


class Renamed(nn.Module):
    """A model of next tokens that is not called like one of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(9, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        from types import SimpleNamespace

        logits = self.words(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class ForCausalLM(Renamed):
    """Called like one, but it counts every label."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        from types import SimpleNamespace

        logits = self.words(input_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Labels that count from another place on in each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = (torch.arange(5) * (index + 1) + index) % 9
        labels = torch.where(torch.arange(5) < [0, 3, 1][index % 3], -100, words)
        return {"input_ids": words, "labels": labels}


def texts(folder: Path, kind: str) -> Tensor:
    model: nn.Module = ForCausalLM() if kind == "every" else Renamed()
    if kind == "wrapped":
        model = Wrapped(model)
    if kind == "compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    manager = manager_for(folder, global_batch_size=6, shuffle=False)
    manager.fit(model.double(), Texts(), optimizer=sgd)
    return flat(manager.model)


@pytest.mark.parametrize("kind", ["every", "renamed", "wrapped", "compiled"])
def test_labels_are_counted_as_the_model_counts_them(tmp_path: Path, kind: str) -> None:
    model = ForCausalLM().double() if kind == "every" else Renamed().double()
    optimizer = sgd(model.parameters())
    samples = [Texts()[i] for i in range(12)]
    for start in (0, 6):
        batch = {
            key: torch.stack([sample[key] for sample in samples[start : start + 6]])
            for key in samples[0]
        }
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    for found in run_ranks(3, texts, tmp_path, kind):
        assert torch.allclose(found, flat(model), rtol=1e-12, atol=1e-14)


# Replicas


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128]
    + [torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool],
)
def test_the_fingerprint_sees_every_changed_bit(dtype: torch.dtype) -> None:
    values = torch.randn(6, generator=torch.Generator().manual_seed(1)).abs() + 1
    tensor = values.to(dtype)
    raw = tensor.view(torch.uint8)
    seen = {int(fingerprint([tensor]))}
    for place in range(raw.numel()):
        for bit in range(8 if dtype != torch.bool else 1):
            raw[place] ^= 1 << bit
            seen.add(int(fingerprint([tensor])))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + raw.numel() * (8 if dtype != torch.bool else 1)
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert int(fingerprint([-tensor])) not in seen  # all signs at once
        assert int(fingerprint([tensor.flip(0)])) not in seen


def drift(folder: Path, ends: str) -> str:
    """An own loop on two ranks, one of which changes its weights."""
    manager = manager_for(folder, global_batch_size=8, enable_fault_tolerance=ends == "save")
    model, loader, _ = manager.setup_training(line(), points(16), loss_fn=squares, optimizer=sgd)
    try:
        for batch in loader:
            manager.trainer.train_step(batch)
        with torch.no_grad():
            model.weight[0, 1] += manager.placement.dp_rank
        if ends == "save":
            manager.save_checkpoint()
        if ends == "epoch":
            for batch in loader:
                manager.trainer.train_step(batch)
                break
        manager.finish()
    except DivergenceError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("ends", ["finish", "save", "epoch"])
def test_replicas_of_an_own_loop_are_compared(tmp_path: Path, ends: str) -> None:
    for found in run_ranks(2, drift, tmp_path, ends):
        assert "weight" in found


# Refused by name, before training


class ByItself(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, None, None, self.weight, self.bias, True)


def by_itself(folder: Path) -> str:
    model = nn.Sequential(nn.Linear(FEATURES, 3), ByItself(3), nn.Linear(3, 1))
    manager = manager_for(folder, global_batch_size=8, sync_bn=True)
    with pytest.raises(ModelError) as caught:
        manager.setup_training(model, points(16), loss_fn=squares, optimizer=sgd)
    return str(caught.value)


def test_a_batchnorm_that_normalises_by_itself_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(2, by_itself, tmp_path):
        assert "1 is a ByItself, whose forward normalises by itself" in found


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


class SharpnessAware(torch.optim.SGD):
    """As most implementations do, it asks for a closure in its first line."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "a closure is needed"
        return super().step(closure)


def sharpness_aware(parameters: Any) -> torch.optim.Optimizer:
    return SharpnessAware(parameters, lr=0.1)


def several(parameters: Any) -> Any:
    given = list(parameters)
    return [torch.optim.SGD(given[:1], lr=0.1), torch.optim.SGD(given[1:], lr=0.1)]


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (lbfgs, r"LBFGS computes the loss several times .* manager\.prepare\(model, optimizer\)"),
        (sharpness_aware, r"SharpnessAware computes the loss several times per step"),
        (several, r"optimizer is a list of 2; .* manager\.prepare\(model, \*optimizers\)"),
        (several(line().parameters()), "optimizer is a list of 2"),
    ],
)
def test_closures_and_several_optimizers_are_refused_with_the_way_to_train_them(
    tmp_path: Path, optimizer: Any, words: str
) -> None:
    manager = manager_for(tmp_path, training_mode="single")
    with pytest.raises(ModelError, match=words):
        manager.setup_training(line(), points(16), loss_fn=squares, optimizer=optimizer)


def test_lazy_modules_are_refused_by_name(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single")
    with pytest.raises(ModelError, match=r"0\.weight, 0\.bias have no shape yet"):
        manager.setup_training(
            nn.Sequential(nn.LazyLinear(1)), points(16), loss_fn=squares, optimizer=sgd
        )


def one_sided(folder: Path) -> str:
    """Only rank 1 freezes a layer."""
    model = nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, 1))
    manager = manager_for(folder, global_batch_size=4)
    _, loader, _ = manager.setup_training(model, points(16), loss_fn=squares, optimizer=sgd)
    model[0].weight.requires_grad_(False)
    if manager.placement.dp_rank == 1:
        model[0].bias.requires_grad_(False)
    with pytest.raises(ModelError) as caught:
        for batch in loader:
            manager.trainer.train_step(batch)
    return str(caught.value)


def test_ranks_that_freeze_differently_are_told(tmp_path: Path) -> None:
    assert all("0.bias" in found for found in run_ranks(2, one_sided, tmp_path))


def test_parameters_that_are_not_the_models_cannot_be_added(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single", batch_size=4)
    _, loader, _ = manager.setup_training(line(), points(16), loss_fn=squares, optimizer=sgd)
    manager.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ModelError, match="got 1 parameters that are not the model's"):
        for batch in loader:
            manager.trainer.train_step(batch)
    manager.finish()


# Number types


@pytest.fixture
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_double_as_the_default_type_trains(tmp_path: Path, doubles: None) -> None:
    manager = manager_for(tmp_path, training_mode="single", batch_size=4, max_grad_norm=1.0)
    before = flat(line())
    manager.fit(line(), points(16, torch.float64), loss_fn=squares, optimizer=sgd)
    assert not torch.equal(flat(manager.model), before)


class Coarse(nn.Module):
    """A weight in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES, dtype=torch.bfloat16))


def test_gradients_in_bf16_are_divided_by_the_weight_itself(tmp_path: Path) -> None:
    manager = manager_for(
        tmp_path, training_mode="single", batch_size=1, gradient_accumulation_steps=2
    )
    slopes = torch.tensor([1.0, -2.0, 1.5, 4.0])

    def loss_fn(model: Any, batch: Any) -> Any:
        return (model.weight.float() * slopes).sum(), batch[2]

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    model, _, _ = manager.setup_training(Coarse(), points(4), loss_fn=loss_fn, optimizer=plain)
    for weight in (1.0, 12.0):  # 1 / 13 is not a number of bf16: it would be off
        manager.trainer.train_step([torch.ones(1), torch.ones(1), torch.tensor(weight)])
    manager.finish()
    assert torch.equal(model.weight.detach(), -slopes.bfloat16())


def test_a_compiled_model_is_saved_and_resumed_under_its_plain_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    kept: dict[str, Any] = {"training_mode": "single", "batch_size": 4, "run_name": "c"}
    kept["enable_fault_tolerance"] = True
    model = nn.Sequential(nn.Linear(FEATURES, 1))
    manager = manager_for(tmp_path, **kept)
    compiled = torch.compile(model, backend="eager")
    manager.fit(compiled, points(16), loss_fn=squares, optimizer=torch.optim.AdamW)
    (path,) = sorted(manager.folder.glob("checkpoints/step-*/model.safetensors"))[-1:]
    fresh = nn.Sequential(nn.Linear(FEATURES, 1))
    fresh.load_state_dict(load_file(path))
    assert torch.equal(flat(fresh), flat(model))
    again = manager_for(tmp_path, **(kept | {"resume": "auto", "epochs": 1}))
    plain = nn.Sequential(nn.Linear(FEATURES, 1))
    again.fit(plain, points(16), loss_fn=squares, optimizer=torch.optim.AdamW)
    assert torch.equal(flat(plain), flat(model))


# Criteria, hooks and networks beside the model


def test_training_accuracy_leaves_out_ignored_labels(tmp_path: Path) -> None:
    labels = torch.arange(16) % 2
    labels[::4] = -100
    inputs = F.one_hot(labels.clamp(min=0), FEATURES).float()
    model = nn.Linear(FEATURES, FEATURES)
    with torch.no_grad():
        model.weight.copy_(torch.eye(FEATURES) * 9)  # every label that counts is predicted
    manager = manager_for(tmp_path, batch_size=4, training_mode="single")
    data = TensorDataset(inputs, labels)
    found = manager.fit(model, data, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd)
    assert found.metrics["accuracy"] == 1.0


def test_a_loss_function_of_torch_trains_as_its_module_does(tmp_path: Path) -> None:
    inputs, targets = points().tensors
    data = TensorDataset(inputs, targets)
    smooth = functools.partial(F.huber_loss, delta=0.3)

    def weights(loss_fn: Any, name: str) -> Tensor:
        manager = manager_for(tmp_path / name, batch_size=4, training_mode="single")
        manager.fit(line(), data, loss_fn=loss_fn, optimizer=sgd)
        return flat(manager.model)

    assert torch.equal(weights(F.mse_loss, "a"), weights(nn.MSELoss(), "b"))
    assert torch.equal(weights(smooth, "c"), weights(nn.HuberLoss(delta=0.3), "d"))

    def absolute(y_hat: Tensor, y_true: Tensor) -> Tensor:
        return (y_hat - y_true).abs().mean()

    # Names tell a function of output and target from one of model and batch.
    assert torch.equal(weights(absolute, "e"), weights(nn.L1Loss(), "g"))
    with pytest.raises(ModelError, match="MSELoss cannot stand for mse_loss"):
        weights(functools.partial(F.mse_loss, weight=torch.ones(1)), "f")


@pytest.mark.parametrize("kind", [nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.SoftMarginLoss])
def test_shapes_that_a_criterion_would_spread_over_each_other_are_refused(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    inputs, targets = points().tensors
    data = TensorDataset(inputs, targets.squeeze(1))
    manager = manager_for(tmp_path, batch_size=4, training_mode="single")
    with pytest.raises(ModelError, match=r"shape \(4, 1\) but the target \(4,\)"):
        manager.fit(line(), data, loss_fn=kind(), optimizer=sgd)


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_in_eval_mode_is_trained_in_train_mode_but_for_parts_that_the_user_left(
    tmp_path: Path, whole: bool
) -> None:
    model = nn.Sequential(nn.Dropout(0.1), line())
    model.eval()
    if not whole:
        model[1].train()
    manager = manager_for(tmp_path, batch_size=8, training_mode="single")
    data = points()
    _, loader, val = manager.setup_training(model, data, data, loss_fn=squares, optimizer=sgd)
    modes = []
    for epoch in range(2):
        manager.train_epoch(loader, epoch)
        modes.append([module.training for module in model.modules()])
        manager.evaluate(val)
        assert [module.training for module in model.modules()] == modes[-1]
        model.eval()  # as a loop of one's own does, to look at samples
    manager.finish()
    assert modes == [[True] * 3 if whole else [False, False, True]] * 2


def train_with_hooks(folder: Path) -> tuple[int, bool]:
    """Hooks that no zero must reach, and a communication hook that each step must call."""
    model = nn.Sequential(line(), nn.Linear(1, 1))
    model[1].requires_grad_(False)
    calls: list[int] = []

    def communicate(state: Any, bucket: Any) -> Any:
        calls.append(manager.step)
        return default_hooks.allreduce_hook(state, bucket)

    communicate.__annotations__.clear()  # DDP compares them with its classes, not with strings
    model[0].weight.register_hook(lambda grad: grad * (1 / float(grad.norm())))

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 1 / float(parameter.grad.norm())

    model[0].bias.register_post_accumulate_grad_hook(after)
    manager = manager_for(folder, global_batch_size=8)
    _, loader, _ = manager.setup_training(model, points(), loss_fn=squares, optimizer=sgd)
    manager.trainer.wrapped.register_comm_hook(manager.placement.group, communicate)
    for batch in loader:
        manager.trainer.train_step(batch)
        model[1].requires_grad_(True)  # DDP is built again
    manager.finish()
    return max(calls, default=-1), bool(flat(model).isfinite().all())


def test_gradient_hooks_see_no_zeros_and_communication_hooks_stay(tmp_path: Path) -> None:
    assert run_ranks(2, train_with_hooks, tmp_path) == [(1, True)] * 2


def train_with_teacher(folder: Path, training: bool) -> str:
    teacher = nn.Sequential(nn.Linear(FEATURES, 1), nn.BatchNorm1d(1)).train(training)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0]), wanted)

    manager = manager_for(folder, global_batch_size=8, sync_bn=True)
    try:
        manager.fit(line(), points(), loss_fn=loss_fn, optimizer=sgd)
    except ModelError as error:
        return str(error)
    return ""


def test_a_teacher_whose_batchnorm_would_be_each_ranks_own_is_refused(tmp_path: Path) -> None:
    for refusal in run_ranks(2, train_with_teacher, tmp_path, True):
        assert "BatchNorm1d of 1 features" in refusal and ".eval()" in refusal
    assert run_ranks(2, train_with_teacher, tmp_path, False) == ["", ""]
