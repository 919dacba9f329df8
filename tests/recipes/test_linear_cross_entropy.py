"""The last layer and its cross entropy in one piece give what the two give one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from multi_gpu_training.recipes.transformer.linear_cross_entropy import linear_cross_entropy

WORDS, WIDTH = 300, 16  # not a multiple of what matrices are filled up to
WHOLE, IN_PARTS = 1 << 30, 4000  # bytes of scores: all at once, or in about ten parts


def example(bias: bool, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 10, WIDTH), (WORDS, WIDTH), *([(WORDS,)] if bias else [])]
    given = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]
    labels = torch.randint(0, WORDS, (4, 10), generator=generator)
    labels[0, :7] = -100
    return given, labels


def ours(given: list[Tensor], labels: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    hidden, weight, *bias = given
    return linear_cross_entropy(hidden, weight, bias[0] if bias else None, labels, budget)


def reference(given: list[Tensor], labels: Tensor) -> Tensor:
    hidden, weight, *bias = given
    logits = F.linear(hidden, weight, bias[0] if bias else None)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def far(ours: Tensor, reference: Tensor) -> float:
    return float((ours.detach() - reference.detach()).norm() / reference.detach().norm())


# Float32 rounds at 6e-8, and 300 exponentials are added up; float64 at 1e-16.
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 2e-6)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("budget", [WHOLE, IN_PARTS], ids=["whole", "in-parts"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_loss_and_gradients_are_those_of_cross_entropy(
    bias: bool, budget: int, dtype: torch.dtype, limit: float
) -> None:
    given, labels = example(bias, dtype)
    expected = reference(given, labels)
    mean, count = ours(given, labels, budget)
    assert int(count) == 33
    assert far(mean, expected) <= limit
    # An uneven factor, as a step's weight is.
    wanted = torch.autograd.grad(expected * 0.7, given)
    for found, value in zip(torch.autograd.grad(mean * 0.7, given), wanted, strict=True):
        assert found.dtype == dtype
        assert far(found, value) <= limit
    with torch.no_grad():
        assert far(ours(given, labels, budget)[0], expected) <= limit


@pytest.mark.parametrize("budget", [WHOLE, IN_PARTS], ids=["whole", "in-parts"])
def test_mixed_precision_is_as_near_to_the_truth_as_linear_and_cross_entropy(budget: int) -> None:
    given, labels = example(True, torch.float32)
    exact = [value.detach().double().requires_grad_() for value in given]
    truth = torch.autograd.grad(reference(exact, labels), exact)
    with torch.autocast("cpu", torch.bfloat16):
        usual = torch.autograd.grad(reference(given, labels), given)
        mean, _ = ours(given, labels, budget)
        found = torch.autograd.grad(mean, given)
    assert mean.dtype == torch.float32
    for mine, other, true in zip(found, usual, truth, strict=True):
        assert mine.dtype == torch.float32
        assert far(mine.double(), true) <= 1.2 * far(other.double(), true)


def test_a_batch_in_which_nothing_counts_is_zero_with_zero_gradients() -> None:
    given, labels = example(False, torch.float32)
    mean, count = ours(given, torch.full_like(labels, -100), WHOLE)
    assert float(mean.detach()) == 0.0
    assert int(count) == 0
    assert all(not grad.any() for grad in torch.autograd.grad(mean, given))


def test_it_compiles_as_one_graph_and_gives_the_same() -> None:
    given, labels = example(True, torch.float32)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=False)
    found, expected = compiled(given, labels, IN_PARTS)[0], ours(given, labels, IN_PARTS)[0]
    assert far(found, expected) <= 2e-6
    gradients = [torch.autograd.grad(loss, given) for loss in (found, expected)]
    for mine, other in zip(*gradients, strict=True):
        assert far(mine, other) <= 2e-6
