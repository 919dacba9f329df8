"""The Legendre Memory Unit: published values, and one result from every way to compute it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from multi_gpu_training.recipes.speech.lmu import LMU, DelayMemory, discrete_system


def test_system_of_order_4_has_the_known_values() -> None:
    a, b = discrete_system(4, 10.0)
    expected_b = [0.105775, -0.250976, 0.397881, -0.278532]
    expected_row = [0.894225, -0.083659, -0.079576, -0.039790]
    assert b.tolist() == pytest.approx(expected_b, abs=5e-7)  # six digits are given
    assert a[0].tolist() == pytest.approx(expected_row, abs=5e-7)
    assert a.dtype == b.dtype == torch.float64


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


@pytest.mark.parametrize("theta", [100.0, 1000.0])
def test_fft_in_float32_is_the_float64_recurrence_at_order_256(theta: float) -> None:
    memory = DelayMemory(256, theta)
    inputs = noise(1, 1000, 1)
    reference = memory.recurrent(inputs.double())
    # 8e-7 was seen, where the memory reaches 4.
    assert float((memory(inputs) - reference).abs().max()) <= 1e-5
    assert float((memory.final(inputs) - reference[:, -1]).abs().max()) <= 1e-5
    assert float((memory(inputs.double()) - reference).abs().max()) <= 1e-12


def test_memory_holds_the_last_theta_steps() -> None:
    """Legendre polynomials over the coefficients give back the input of some steps ago."""
    theta, steps = 50.0, 400
    time = torch.arange(steps, dtype=torch.float64)
    inputs = torch.sin(2 * math.pi * time / 70.0)
    state = DelayMemory(12, theta)(inputs.view(1, -1, 1))[0, -1, 0]
    for part in (0.0, 0.3, 0.5, 1.0):
        x = 2 * part - 1
        polynomials = [1.0, x]
        for n in range(1, 11):
            polynomials.append(
                ((2 * n + 1) * x * polynomials[n] - n * polynomials[n - 1]) / (n + 1)
            )
        found = float(state @ torch.tensor(polynomials, dtype=torch.float64))
        # Held constant, the input is on average half a step older than its index.
        past = math.sin(2 * math.pi * (steps - 1 + 0.5 - part * theta) / 70.0)
        assert found == pytest.approx(past, abs=0.02)


def layer(dtype: torch.dtype = torch.float64) -> LMU:
    torch.manual_seed(1)
    return LMU(5, 7, order=6, theta=9.0, channels=3).to(dtype)


def test_all_ways_to_run_a_layer_agree() -> None:
    lmu, inputs = layer(), noise(2, 40, 5, dtype=torch.float64)
    at_once, one_by_one = lmu(inputs), lmu.recurrent(inputs)
    assert at_once.shape == (2, 40, 7)
    assert torch.allclose(at_once, one_by_one, atol=1e-12)
    assert torch.allclose(lmu.final(inputs), at_once[:, -1], atol=1e-12)


def test_all_ways_have_the_same_gradient() -> None:
    lmu = layer()
    inputs = noise(2, 30, 5, dtype=torch.float64).requires_grad_()
    found = [
        torch.autograd.grad(way(inputs).square().sum(), [inputs, *lmu.parameters()])
        for way in (lmu, lmu.recurrent)
    ]
    for ours, reference in zip(*found, strict=True):
        assert torch.allclose(ours, reference, atol=1e-10)


def test_a_stream_can_be_cut_anywhere() -> None:
    lmu, inputs = layer(), noise(1, 20, 5, dtype=torch.float64)
    whole = lmu(inputs)
    memory = None
    for t in range(20):
        output, memory = lmu.step(inputs[:, t], memory)
        assert torch.allclose(output, whole[:, t], atol=1e-12)


def test_the_future_does_not_change_the_past() -> None:
    lmu, inputs = layer(), noise(1, 20, 5, dtype=torch.float64)
    changed = inputs.clone()
    changed[:, 12:] += 100.0
    assert torch.allclose(lmu(changed)[:, :12], lmu(inputs)[:, :12], atol=1e-10)


def test_channels_that_look_ahead_are_those_of_the_sequence_read_backwards() -> None:
    memory, inputs = DelayMemory(6, 9.0), noise(2, 30, 5, dtype=torch.float64)
    found = memory(inputs, ahead=2)
    assert torch.allclose(found[:, :, :3], memory(inputs[:, :, :3]), atol=1e-12)
    backwards = memory(inputs[:, :, 3:].flip(1)).flip(1)
    assert torch.allclose(found[:, :, 3:], backwards, atol=1e-12)
    both = LMU(5, 7, order=6, theta=9.0, channels=4, ahead=2)
    with pytest.raises(ValueError, match="2 channels look ahead; build it with ahead=0"):
        both.step(inputs[:, 0].float())


def test_memory_is_computed_in_float32_under_mixed_precision() -> None:
    memory, inputs = DelayMemory(32, 64.0), noise(2, 100, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(memory(inputs), memory(inputs))
        assert torch.allclose(memory.final(inputs), memory(inputs)[:, -1], atol=1e-6)
        assert memory(inputs.bfloat16()).dtype == torch.bfloat16


def test_it_saves_nothing_but_its_weights() -> None:
    lmu = layer(torch.float32)
    lmu(noise(1, 10, 5))
    assert set(lmu.state_dict()) == {
        "write.weight", "write.bias", "read.weight", "read.bias", "skip.weight"
    }  # fmt: skip


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"order=0, theta=10: use order >= 1 and theta > 0"):
        DelayMemory(0, 10)
