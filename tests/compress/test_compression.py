"""Compressed models compute what the compressed weights say, and come back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multi_gpu_training.compress.compressed_model import restore, sparse_weights
from multi_gpu_training.compress.distillation import Teacher, with_teacher
from multi_gpu_training.compress.pruning import prune_channels, prune_two_of_four
from multi_gpu_training.compress.quantization import quantize
from multi_gpu_training.compress.tensor_packing import (
    pack_nibbles,
    pack_sparse,
    plain_tensors,
    unpack_nibbles,
    unpack_sparse,
)
from multi_gpu_training.errors import CheckpointError, ConfigError, ModelError
from multi_gpu_training.extras import installed
from multi_gpu_training.recipes.image.image_model import cnn
from multi_gpu_training.training.loss import Loss, SupervisedLoss

needs_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")


def image_net() -> nn.Module:
    return cnn((8, 8), 10, width=8).eval()


def size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_int4_numbers_and_sparse_groups_survive_packing() -> None:
    for count in (1, 2, 7, 64):
        numbers = torch.randint(-8, 8, (count,), dtype=torch.int8)
        packed = pack_nibbles(numbers)
        assert packed.nbytes == (count + 1) // 2
        assert torch.equal(unpack_nibbles(packed, numbers.shape), numbers)
    for groups in (1, 5, 64):  # with groups that have fewer than two numbers too
        weight = torch.randn(groups, 4)
        weight[weight.abs() < 0.4] = 0
        weight.scatter_(1, weight.abs().topk(2, largest=False).indices, 0.0)
        packed_parts = pack_sparse("w", weight)
        found = unpack_sparse(packed_parts["w:nonzero"], packed_parts["w:where"], weight.shape)
        assert torch.equal(found, weight)
    with pytest.raises(ValueError, match="more than two"):
        pack_sparse("w", torch.ones(1, 4))


def test_two_of_four_keeps_the_largest_and_halves_the_file() -> None:
    model, images = image_net(), torch.randn(3, 1, 8, 8)
    dense = size(plain_tensors(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = prune_two_of_four(model)
    parameters = dict(model.named_parameters())
    for name in names:
        old, new = before[name].reshape(-1, 4), parameters[name].detach().reshape(-1, 4)
        assert torch.all((new != 0).sum(1) <= 2)
        assert torch.equal(new.abs().sum(1), old.abs().topk(2).values.sum(1))
    steps = [{"method": "prune", "kind": "2:4", "weights": names}]
    tensors = plain_tensors(model, sparse_weights(steps))
    assert size(tensors) < 0.62 * dense  # half, the places, and layers that stay dense
    fresh = image_net()
    restore(fresh, steps, tensors)
    assert torch.equal(fresh(images), model(images))


def test_weights_of_another_model_are_refused_by_name() -> None:
    tensors = plain_tensors(image_net())
    with pytest.raises(CheckpointError, match=r"0\.weight is .*\(8, 1, 3, 3\), not .*\(4, 1"):
        restore(cnn((8, 8), 10, width=4), [], tensors)
    with pytest.raises(CheckpointError, match="belongs to nothing"):
        restore(image_net(), [], {**tensors, "extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="not understood"):
        restore(image_net(), [{"kind": "2:4"}], tensors)
    with pytest.raises(CheckpointError, match="fits no part"):
        step = {"method": "prune", "kind": "structured", "shapes": {"0.weight": [2**40, 1, 3, 3]}}
        restore(image_net(), [step], tensors)


@needs_torchao
@pytest.mark.engines
@pytest.mark.parametrize(
    ("scheme", "most", "share"),
    # 8-bit rounding is within 1/255 of a row's largest weight, 4-bit within 1/15.
    [("int8", 0.02, 0.3), ("int8-dynamic", 0.03, 0.3), ("int4", 0.2, 0.25)],
)
def test_quantised_models_are_small_near_and_come_back_bit_for_bit(
    scheme: str, most: float, share: float
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_layer=1,
        n_embd=64,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)  # untrained outputs nearly cancel with some seeds, and rounding then shows
    words = torch.randint(0, 64, (2, 16))
    cases: list[tuple[Callable[[], Any], Callable[[Any], Tensor]]] = [
        (
            lambda: cnn((16, 16), 10).eval(),
            lambda m: m(torch.linspace(-1, 1, 256).view(1, 1, 16, 16)),
        ),
        (lambda: nn.Conv1d(4, 8, 3), lambda m: m(torch.linspace(-1, 1, 36).view(1, 4, 9))),
        (lambda: nn.Conv3d(4, 8, 3), lambda m: m(torch.linspace(-1, 1, 500).view(1, 4, 5, 5, 5))),
        (lambda: transformers.GPT2LMHeadModel(config).eval(), lambda m: m(words).logits),
    ]
    for build, call in cases:
        model = build()
        wanted, dense = call(model), size(plain_tensors(model))
        kind = type(model).__name__
        result = quantize(model, scheme)
        tensors = plain_tensors(model)
        assert distance(call(model), wanted) < most, kind
        assert result.int4 + result.int8 > 0
        if dense > 100_000:
            assert size(tensors) < share * dense, kind
        fresh = build()
        restore(fresh, [{"method": "quantize", "scheme": scheme}], tensors)
        assert torch.equal(call(fresh), call(model)), kind
        if kind == "GPT2LMHeadModel":  # still one weight
            assert fresh.lm_head.weight is fresh.transformer.wte.weight


@needs_torchao
@pytest.mark.engines
def test_pruned_channels_and_int4_weights_combine() -> None:
    pytest.importorskip("torch_pruning")
    model, images = cnn((16, 16), 10).eval(), torch.randn(2, 1, 16, 16)
    dense = size(plain_tensors(model))
    shapes = prune_channels(model, model, (images,), 0.5)
    steps: list[dict[str, Any]] = [{"method": "prune", "kind": "structured", "shapes": shapes}]
    assert size(plain_tensors(model)) < 0.3 * dense
    names = prune_two_of_four(model)
    steps.append({"method": "prune", "kind": "2:4", "weights": names})
    quantize(model, "int4")
    steps.append({"method": "quantize", "scheme": "int4", "group": 32})
    tensors = plain_tensors(model, sparse_weights(steps))
    assert size(tensors) < 0.06 * dense
    fresh = cnn((16, 16), 10).eval()
    restore(fresh, steps, tensors)
    assert torch.equal(fresh(images), model(images))
    assert fresh(images).shape == (2, 10)


@pytest.mark.skipif(not installed("torch_pruning"), reason="torch-pruning is not installed")
@pytest.mark.engines
def test_a_model_that_pruning_cannot_follow_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.last(self.first(x).view(-1, 2, 3).transpose(1, 2).reshape(-1, 6))
            return mixed

    model = Odd()
    with pytest.raises(ModelError, match="structured pruning"):
        prune_channels(model, model, (torch.randn(2, 4),), 0.5)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        prune_channels(model, model, (torch.randn(2, 4),), 1.5)


def test_a_student_learns_the_teachers_scores() -> None:
    torch.manual_seed(0)
    teacher, student = nn.Linear(6, 4), nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 4))
    inputs, labels = torch.randn(32, 6), torch.randint(0, 4, (32,))
    loss_fn = with_teacher(SupervisedLoss(), Teacher(teacher, temperature=2.0, share=1.0))
    assert isinstance(loss_fn, SupervisedLoss)  # so that validation counts accuracy
    optimizer = torch.optim.Adam(student.parameters(), 0.05)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = loss_fn(student, (inputs, labels))
        loss.mean.backward()
        optimizer.step()
        losses.append(loss.mean.item())
    assert losses[-1] < 0.2 * losses[0]
    with torch.no_grad():  # a validation has the student's own loss
        own = SupervisedLoss()(student, (inputs, labels))
        assert torch.equal(loss_fn(student, (inputs, labels)).mean, own.mean)
    assert all(p.grad is None for p in teacher.parameters())


def test_padding_teaches_nothing_and_other_shapes_are_refused() -> None:
    class Frames(nn.Module):
        def __init__(self, classes: int = 3) -> None:
            super().__init__()
            self.layer = nn.Linear(2, classes)

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), lengths

    def own(model: nn.Module, batch: Any) -> Any:
        return model(*batch)[0].sum() * 0.0, torch.tensor(1.0)

    teacher, student = Frames(), Frames()
    x, lengths = torch.randn(2, 5, 2), torch.tensor([5, 2])
    loss_fn = with_teacher(own, Teacher(teacher, share=1.0))
    found = loss_fn(student, (x, lengths))
    x[1, 2:] = 100.0
    assert isinstance(found, Loss)
    assert torch.equal(loss_fn(student, (x, lengths)).mean, found.mean)
    with pytest.raises(ModelError, match="same classes"):
        with_teacher(own, Teacher(Frames(4)))(student, (x, lengths))
    with pytest.raises(ModelError, match="calls it 2 times"):
        twice = with_teacher(lambda m, b: own(m, b)[0] + own(m, b)[0], Teacher(teacher))
        twice(student, (x, lengths))
