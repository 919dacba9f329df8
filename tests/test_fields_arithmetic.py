"""What is computed and how exactly: precision, clipping, recomputation, BatchNorm, seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import FEATURES, flat, line, manager_for, points, sgd, squares, watching, weights
from torch import Tensor, nn

from multi_gpu_training.errors import ModelError


def train_precision(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Types that the forward gives, in training and validation, and what backward starts with."""
    types: list[torch.dtype] = []
    scales: list[float] = []
    model = line()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        output = model(batch[0])
        types.append(output.dtype)
        loss = 0.1 * (output.float() - batch[1]).square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda grad: scales.append(float(grad)))
        return loss

    manager = manager_for(folder, batch_size=8, **settings)
    manager.fit(model, points(), points(), loss_fn=loss_fn, optimizer=sgd)
    return {"types": set(types), "scales": scales, "weights": flat(model)}


def test_use_mixed_precision_computes_in_16_bits(tmp_path: Path) -> None:
    plain = run_ranks(1, train_precision, tmp_path, {})[0]
    mixed = run_ranks(1, train_precision, tmp_path, {"use_mixed_precision": True})[0]
    assert plain["types"] == {torch.float32}
    assert mixed["types"] == {torch.bfloat16}
    assert mixed["scales"] == plain["scales"] == [1.0, 1.0]
    # bf16 keeps 8 bits: the outputs are right to 2^-8.
    assert torch.allclose(mixed["weights"], plain["weights"], rtol=0, atol=2**-8)
    assert not torch.equal(mixed["weights"], plain["weights"])


def test_mixed_precision_dtype_fp16_scales_the_loss(tmp_path: Path) -> None:
    plain = run_ranks(1, train_precision, tmp_path, {})[0]
    settings = {"use_mixed_precision": True, "mixed_precision_dtype": "fp16"}
    half = run_ranks(1, train_precision, tmp_path, settings)[0]
    assert half["types"] == {torch.float16}
    assert half["scales"] == [2.0**16] * 2, "torch's GradScaler begins with 2^16"
    # Scaled back before the weights move; fp16 keeps 11 bits.
    assert torch.allclose(half["weights"], plain["weights"], rtol=0, atol=2**-11)
    settings["mixed_precision_dtype"] = "bf16"
    assert run_ranks(1, train_precision, tmp_path, settings)[0]["types"] == {torch.bfloat16}


def arithmetic(folder: Path, settings: dict[str, Any]) -> tuple[bool, bool]:
    manager_for(folder, **settings)
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_allow_tf32_sets_products_and_convolutions(tmp_path: Path) -> None:
    assert run_ranks(1, arithmetic, tmp_path, {"allow_tf32": True}) == [(True, True)]
    assert run_ranks(1, arithmetic, tmp_path, {"allow_tf32": False}) == [(False, False)]


def product_error(folder: Path, allowed: bool) -> float:
    """Relative error of a float32 product of matrices, inside a training on the GPU."""
    errors: list[float] = []

    def look(model: nn.Module, batch: list[Tensor]) -> float:
        a = torch.randn(512, 512, device=batch[0].device)
        exact = a.double() @ a.double()
        return float((a @ a - exact).norm() / exact.norm())

    manager = manager_for(folder, training_mode="single", device="cuda", allow_tf32=allowed)
    manager.fit(line(), points(), loss_fn=watching(look, errors), optimizer=sgd)
    return max(errors)


@pytest.mark.gpu
def test_allow_tf32_rounds_products_on_the_gpu(tmp_path: Path) -> None:
    # TF32 keeps 11 bits of each factor, float32 keeps 24.
    assert run_ranks(1, product_error, tmp_path, False)[0] < 1e-6
    assert run_ranks(1, product_error, tmp_path, True)[0] > 1e-5


def tenth(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Small enough that fp16 holds its gradients scaled by 2^16."""
    return 0.1 * squares(model, batch)


def train_one_step(folder: Path, settings: dict[str, Any]) -> Tensor:
    model = line()
    before = flat(model)
    manager = manager_for(folder, max_steps=1, **settings)
    manager.fit(model, points(), loss_fn=tenth, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    return flat(model) - before


HALF = {"use_mixed_precision": True, "mixed_precision_dtype": "fp16"}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", [{}, HALF], ids=["float32", "fp16"])
def test_max_grad_norm_bounds_a_step(tmp_path: Path, world: int, precision: dict[str, Any]) -> None:
    settings = {"global_batch_size": 8}
    free = run_ranks(world, train_one_step, tmp_path, settings)[0]
    assert free.norm() > 0.1
    for limit in (0.1, 0.01):
        clipped = {**settings, **precision, "max_grad_norm": limit}
        for moved in run_ranks(world, train_one_step, tmp_path, clipped):
            # torch divides by the norm plus 1e-6; fp16 keeps 11 bits of the direction.
            assert float(moved.norm()) == pytest.approx(limit, rel=1e-4)
            assert torch.allclose(moved / moved.norm(), free / free.norm(), atol=2**-10)


@pytest.mark.parametrize("precision", [{}, HALF], ids=["float32", "fp16"])
def test_max_grad_value_clamps_each_element_of_a_step(
    tmp_path: Path, precision: dict[str, Any]
) -> None:
    free = run_ranks(2, train_one_step, tmp_path, {"global_batch_size": 8})[0]
    limit = float(free.abs().median())  # some elements are beyond it, some are not
    settings = {"global_batch_size": 8, "max_grad_value": limit, **precision}
    for moved in run_ranks(2, train_one_step, tmp_path, settings):
        assert torch.allclose(moved, free.clamp(-limit, limit), rtol=2**-9)


class Blocks(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(FEATURES, 64),
                nn.BatchNorm1d(64) if norm else nn.Tanh(),
                nn.Dropout(0.3),
                nn.Linear(64, FEATURES),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def train_saved(folder: Path, recompute: bool, norm: bool) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a forward keeps for its backward, and the weights that come out."""
    kept: list[int] = []

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = squares(model, batch)
        kept.append(total)
        return loss

    model = Blocks(norm)
    manager = manager_for(folder, batch_size=8, use_gradient_checkpointing=recompute, epochs=2)
    manager.fit(model, points(), loss_fn=loss_fn, optimizer=sgd)
    return max(kept), weights(model)


def test_use_gradient_checkpointing_keeps_less_and_learns_the_same(tmp_path: Path) -> None:
    full, reference = run_ranks(1, train_saved, tmp_path, False, False)[0]
    less, ours = run_ranks(1, train_saved, tmp_path, True, False)[0]
    assert less < full / 4
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_use_gradient_checkpointing_counts_batchnorm_once(tmp_path: Path) -> None:
    _, reference = run_ranks(1, train_saved, tmp_path, False, True)[0]
    _, ours = run_ranks(1, train_saved, tmp_path, True, True)[0]
    assert int(reference["blocks.0.1.num_batches_tracked"]) == 4
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


class Uneven(nn.Module):
    """A block that uses one norm twice and another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.spare = line(), nn.BatchNorm1d(1), nn.BatchNorm1d(1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.twice(self.twice(self.first(inputs)))


def train_uneven(folder: Path, recompute: bool) -> dict[str, Tensor]:
    model = nn.Sequential(Uneven(), nn.Linear(1, 1))
    settings = {"use_gradient_checkpointing": recompute, "find_unused_parameters": True}
    manager_for(folder, batch_size=8, **settings).fit(model, points(), optimizer=sgd)
    return {name: value for name, value in weights(model).items() if "tracked" in name}


def test_use_gradient_checkpointing_counts_a_norm_as_often_as_it_is_used(tmp_path: Path) -> None:
    counted = {"0.twice.num_batches_tracked": 4, "0.spare.num_batches_tracked": 0}
    for recompute in (False, True):
        assert run_ranks(1, train_uneven, tmp_path, recompute)[0] == counted


class Maps(nn.Module):
    """BatchNorm over three values a sample: even one sample has statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        first = [nn.Linear(FEATURES, 6), nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Tanh()]
        self.body = nn.Sequential(nn.Sequential(*first, nn.Flatten()), nn.Linear(6, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


def train_maps(folder: Path) -> dict[str, Tensor]:
    """Nine samples in batches of eight: in the second step one of two ranks has none."""
    model = Maps().double()
    manager = manager_for(
        folder, global_batch_size=8, sync_bn=True, use_gradient_checkpointing=True
    )
    manager.fit(model, points(9, torch.float64), optimizer=sgd)
    return weights(model)


def test_use_gradient_checkpointing_leaves_an_absent_rank_out(tmp_path: Path) -> None:
    reference = run_ranks(1, train_maps, tmp_path)[0]
    for ours in run_ranks(2, train_maps, tmp_path):
        for name, value in reference.items():
            assert torch.allclose(ours[name], value, rtol=0, atol=1e-12), name


def refuse_recompute(folder: Path) -> str:
    try:
        manager = manager_for(folder, use_gradient_checkpointing=True)
        manager.setup_training(line(), points())
    except ModelError as error:
        return str(error)
    return ""


def test_use_gradient_checkpointing_says_when_there_is_nothing_to_recompute(tmp_path: Path) -> None:
    assert "no blocks in Linear" in run_ranks(1, refuse_recompute, tmp_path)[0]


def train_statistics(folder: Path, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The mean that BatchNorm kept of this one step, and the mean of the whole batch."""
    model = nn.Sequential(nn.BatchNorm1d(FEATURES, momentum=1.0), line())
    manager = manager_for(folder, batch_size=8, broadcast_buffers=False, **settings)
    manager.fit(model, points(16), optimizer=sgd)
    return model[0].running_mean, points(16).tensors[0].mean(0)


def test_sync_bn_counts_the_samples_of_all_ranks(tmp_path: Path) -> None:
    for kept, whole in run_ranks(2, train_statistics, tmp_path, {"sync_bn": True}):
        assert torch.allclose(kept, whole, rtol=0, atol=1e-6)
    (first, whole), (second, _) = run_ranks(2, train_statistics, tmp_path, {})
    assert not torch.allclose(first, second)
    assert torch.allclose((first + second) / 2, whole, rtol=0, atol=1e-6)


def train_noise(folder: Path, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The samples' order, and what dropout in the middle of a step leaves of ones."""
    order: list[float] = []
    noise: list[float] = []

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        order.extend(batch[0][:, 0].tolist())
        noise.extend(torch.dropout(torch.ones(20), 0.5, True).tolist())
        return squares(model, batch)

    manager = manager_for(folder, batch_size=4, **settings)
    manager.fit(line(), points(), loss_fn=loss_fn, optimizer=sgd)
    return order, noise


def test_seed_settles_the_order_and_the_noise(tmp_path: Path) -> None:
    order, noise = run_ranks(1, train_noise, tmp_path, {"seed": 3})[0]
    assert run_ranks(1, train_noise, tmp_path, {"seed": 3})[0] == (order, noise)
    other_order, other_noise = run_ranks(1, train_noise, tmp_path, {"seed": 4})[0]
    assert sorted(order) == sorted(other_order)
    assert order != other_order and noise != other_noise
    first, second = run_ranks(2, train_noise, tmp_path, {"seed": 3})
    assert first[1] != second[1], "two ranks must not draw the same noise"


def train_nondeterministic(folder: Path, deterministic: bool) -> str:
    """put_ writes in any order where indices repeat; torch has no ordered version of it."""
    place = torch.zeros(2, dtype=torch.int64)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).sum() + torch.zeros(3).put_(place, torch.ones(2)).sum()

    try:
        manager = manager_for(folder, deterministic=deterministic)
        manager.fit(line(), points(), loss_fn=loss_fn, optimizer=sgd)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    return "trained"


def test_deterministic_refuses_what_has_no_fixed_order(tmp_path: Path) -> None:
    assert run_ranks(1, train_nondeterministic, tmp_path, False) == ["trained"]
    said = run_ranks(1, train_nondeterministic, tmp_path, True)[0]
    assert "does not have a deterministic implementation" in said


def two_managers(folder: Path) -> list[bool]:
    found = []
    for deterministic in (True, False):
        manager_for(folder, deterministic=deterministic)
        found.append(torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(False)
    return found


def test_deterministic_ends_with_its_run(tmp_path: Path) -> None:
    assert run_ranks(1, two_managers, tmp_path) == [[True, False]]


def train_on_gpu(folder: Path) -> tuple[Tensor, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.Flatten(), nn.Linear(8, 1)
    )
    manager = manager_for(folder, training_mode="single", device="cuda", deterministic=True)
    manager.fit(model, points(64), optimizer=sgd, epochs=3)
    return flat(model).cpu(), torch.backends.cudnn.benchmark


@pytest.mark.gpu
def test_deterministic_trains_bit_for_bit_alike_on_the_gpu(tmp_path: Path) -> None:
    first, tuned = run_ranks(1, train_on_gpu, tmp_path)[0]
    again, _ = run_ranks(1, train_on_gpu, tmp_path)[0]
    assert torch.equal(first, again)
    assert not tuned, "the autotuner chooses kernels by their timing"
