"""Model and loss as torch.compile makes them, and whether they still compute the same.

A compiled loss takes the place of the plain one inside the step, recorded or not: all else of a
step stays as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.probe import untouched
from multi_gpu_training.training.runner.graph import resolve_kept
from multi_gpu_training.training.runner.rollback_window import Fed
from multi_gpu_training.training.runner.step_comparison import StepComparison
from multi_gpu_training.training.step_state import StepState

# How far a compiled loss and its gradient may be from the plain ones: rounding, in another order.
SAME_16_BITS = 0.05
SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-3, torch.complex64: 2e-3}


def compile_loss(loss_fn: LossFn) -> LossFn:
    """The loss function and the model that it calls, compiled for the shapes of each call."""
    compiled: LossFn = torch.compile(loss_fn, dynamic=False)
    return compiled


def compiled_problem(
    state: StepState, compiled: LossFn, micro: Fed, draws_noise: bool
) -> str | None:
    """Compile by computing one micro-batch without the other ranks, which would wait in the
    exchange for a rank that cannot compile; why it cannot be used. The state stays as it was."""
    batch, samples, share = micro
    if not share.count:
        return None
    try:
        with untouched(state):
            given = state.prepare(resolve_kept(batch), samples)
            found = _loss_and_gradients(state, compiled, given)
            # Compiled code draws other noise than eager code: then there is nothing to compare.
            expected = None if draws_noise else _loss_and_gradients(state, None, given)
        return None if expected is None else _too_far(state, expected, found)
    except torch.OutOfMemoryError:
        return "there is no memory to compile in"
    except Exception as error:  # whatever the compiler raises, training goes on without it
        return in_a_line(error)


def _loss_and_gradients(state: StepState, compiled: LossFn | None, given: Any) -> list[Tensor]:
    module = state.step_module
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    with module.computing(compiled), state.strategy.compiling():
        result = module.forward(given, 1, 1, 1)
    grads = torch.autograd.grad(result.scaled, parameters, allow_unused=True)
    return [
        result.mean.detach(),
        *(g.coalesce().values() if g.is_sparse else g for g in grads if g is not None),
    ]


def _too_far(state: StepState, expected: list[Tensor], found: list[Tensor]) -> str | None:
    """Why the results of compiled code cannot be what the plain code computes."""
    if len(expected) != len(found):
        return "compiled, other parameters get a gradient"
    sizes = [float(e.norm()) for e in expected]
    off = [float((f.to(e.dtype) - e).norm()) for e, f in zip(expected, found, strict=True)]
    if not all(map(math.isfinite, (*sizes, *off))):
        return None  # the step itself is not finite: the NaN guard's business
    kinds = {p.dtype for p in state.parameters}
    half = state.precision.dtype is not None or not kinds <= SAME.keys()
    same = SAME_16_BITS if half else max(SAME[kind] for kind in kinds)
    if off[0] > same * max(sizes[0], 1e-12):
        return f"compiled, the loss is {off[0] / max(sizes[0], 1e-12):.1g} off"
    whole, apart = math.hypot(*sizes[1:]), math.hypot(*off[1:])
    if apart > same * whole:
        return f"compiled, the gradient is {apart / whole:.1g} off"
    return None


def try_compiled(
    state: StepState, comparison: StepComparison, compiled: LossFn, draws_noise: bool
) -> tuple[str | None, float]:
    """Whether steps can run compiled, without being recorded: why not, and how long one takes.
    Every rank must call it; the state stays as it was."""
    copies, seconds = comparison.copies, float("inf")
    problem = compiled_problem(state, compiled, comparison.newest[1][0], draws_noise)
    if state.placement.all_min(int(problem is None)) == 0:
        return problem or "it does not compile on another rank", seconds
    copies.keep("before")
    try:
        with state.step_module.computing(compiled):
            comparison.plain_step()
            seconds = comparison.seconds(comparison.plain_step)
    except Exception as error:
        problem = in_a_line(error)
    copies.restore("before")
    copies.drop()
    state.drop_gradients()
    return problem, seconds


def in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"it does not compile: {lines[0][:160]}"
