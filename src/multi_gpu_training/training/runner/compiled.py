"""Compile model and loss with torch.compile, and check that they still compute the same.

A compiled loss replaces the plain one inside the step, recorded or not. Nothing else in the step
changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from multi_gpu_training.state_dicts import random_state
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.probe import untouched
from multi_gpu_training.training.runner.graph import resolve_kept
from multi_gpu_training.training.runner.rollback_window import Fed
from multi_gpu_training.training.runner.step_comparison import StepComparison
from multi_gpu_training.training.state_rollback import copy_each
from multi_gpu_training.training.step_state import StepState

# How far a compiled loss and its gradient may be from the plain ones: this fraction of their size,
# plus a multiple of what rounding the weights differently changes, which grows late in training.
ROUNDINGS = 8.0
SAME_16_BITS = 0.05
SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-3, torch.complex64: 2e-3}


def compiled_problem(state: StepState, compiled: LossFn, step: list[Fed]) -> str | None:
    """Why steps cannot be compiled, if so. Computes a micro-batch of every size without the other
    ranks, which would otherwise wait for one that cannot compile. The state stays unchanged."""
    if not state.strategy.computes_alone:
        return _problem_together(state, compiled, step)
    sizes = {micro[2].count: micro for micro in step if micro[2].count}
    problems = (_micro_problem(state, compiled, micro) for micro in sizes.values())
    return next((problem for problem in problems if problem is not None), None)


def _micro_problem(state: StepState, compiled: LossFn, micro: Fed) -> str | None:
    batch, samples, _ = micro
    device = state.placement.device
    try:
        with untouched(state):
            given = state.prepare(resolve_kept(batch), samples)
            found = _loss_and_gradients(state, compiled, given)
            before = random_state(device)
            expected = _loss_and_gradients(state, None, given)
            if random_state(device) != before:
                return None  # compiled code draws different noise: nothing to compare
            with _weights_rounded_again(state):
                rounded = _loss_and_gradients(state, None, given)
        return _too_far(state, expected, rounded, found)
    except torch.OutOfMemoryError:
        return "there is not enough memory to compile"
    except Exception as error:  # whatever the compiler raises, training continues without it
        return in_a_line(error)


def _problem_together(state: StepState, compiled: LossFn, step: list[Fed]) -> str | None:
    """The same where ranks need each other to compute: one micro-batch each, and in the same order
    what it gives plain, compiled and with rounded weights. Collective."""
    batch, samples, share = step[-1]
    device = state.placement.device
    if not state.placement.all_agree(share.count > 0):
        return "a rank has no samples in the step to compare with"
    with untouched(state):
        given = state.prepare(resolve_kept(batch), samples)
        before = random_state(device)
        expected = _exchanged_gradients(state, None, given)
        draws = random_state(device) != before
        try:
            found = _exchanged_gradients(state, compiled, given)
        except CheckpointError as error:  # the same on every rank, which all run the same blocks
            state.drop_gradients()
            state.strategy.forget_step()
            return in_a_line(error)
        failure = state.strategy.compile_failure
        if not state.placement.all_agree(failure is None):
            return "it does not compile on another rank" if failure is None else in_a_line(failure)
        if not state.placement.all_agree(not draws):
            return None  # compiled code draws different noise: nothing to compare
        with _weights_rounded_again(state):
            rounded = _exchanged_gradients(state, None, given)
    return _too_far(state, expected, rounded, found)


def _exchanged_gradients(state: StepState, compiled: LossFn | None, given: Any) -> list[Tensor]:
    """Loss and gradients of a micro-batch, computed and exchanged as in a step."""
    strategy = state.strategy
    state.drop_gradients()
    with state.step_module.computing(compiled), strategy.no_sync(True):
        result = strategy.forward(given, 1, 1, 1)
        result.scaled.backward()
    found = [result.mean.detach(), *(grad.clone() for grad in strategy.gradients())]
    state.drop_gradients()
    strategy.forget_step()
    return found


def _loss_and_gradients(state: StepState, compiled: LossFn | None, given: Any) -> list[Tensor]:
    module = state.step_module
    parameters = [p for p in state.trained.parameters() if p.requires_grad]
    with module.computing(compiled), state.strategy.compiling():
        result = module.forward(given, 1, 1, 1)
    grads = torch.autograd.grad(result.scaled, parameters, allow_unused=True)
    return [
        result.mean.detach(),
        *(g.coalesce().values() if g.is_sparse else g for g in grads if g is not None),
    ]


@contextmanager
def _weights_rounded_again(state: StepState) -> Iterator[None]:
    """Inside a `with` block, shift every weight by about one rounding error: the resulting change
    tells how far apart two correct results may be."""
    weights = [state.strategy.held(p.detach()) for p in state.parameters]
    kept = [weight.clone() for weight in weights]
    generator = torch.Generator(state.placement.device).manual_seed(0)
    try:
        for weight in weights:
            up = torch.rand(weight.shape, generator=generator, device=weight.device) < 0.5
            eps = _rounding(state, weight.dtype)
            weight.mul_(torch.where(up, 1 + eps, 1 - eps).to(weight.dtype))
        yield
    finally:
        copy_each(weights, kept)


def _rounding(state: StepState, kind: torch.dtype) -> float:
    """The relative error of one operation on weights of this type."""
    kind = state.precision.dtype or kind
    if kind == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-11  # TF32 has a ten-bit mantissa
    return torch.finfo(kind).eps / 2


def _too_far(
    state: StepState, expected: list[Tensor], rounded: list[Tensor], found: list[Tensor]
) -> str | None:
    """Why the results of compiled code differ too much from those of plain code, if they do."""
    if len(expected) != len(found):
        return "compiled, other parameters get a gradient"
    kinds = {p.dtype for p in state.parameters}
    half = state.precision.dtype is not None or not kinds <= SAME.keys()
    same = SAME_16_BITS if half else max(SAME[kind] for kind in kinds)
    for name, part in (("loss", slice(0, 1)), ("gradient", slice(1, None))):
        size = _distance(expected[part], None)
        off = _distance(expected[part], found[part])
        rounding = _distance(expected[part], rounded[part])
        # If the plain step is not finite either, the NaN guard deals with it.
        if math.isfinite(size) and not off <= same * size + ROUNDINGS * rounding:
            return f"compiled, the {name} is {off / max(size, 1e-30):.1g} off"
    return None


def _distance(ones: list[Tensor], others: list[Tensor] | None) -> float:
    parts = (
        ones if others is None else [a - b.to(a.dtype) for a, b in zip(ones, others, strict=True)]
    )
    return math.hypot(*(float(part.norm()) for part in parts))


def try_compiled(
    state: StepState, comparison: StepComparison, compiled: LossFn
) -> tuple[str | None, float]:
    """Try steps compiled but not recorded: returns why they cannot run, and how long one takes.
    Every rank must call it; the state stays unchanged."""
    copies, seconds = comparison.copies, float("inf")
    problem = compiled_problem(state, compiled, comparison.newest[1])
    if state.placement.all_min(int(problem is None)) == 0:
        return problem or "it does not compile on another rank", seconds
    if not state.strategy.computes_alone:  # the ranks have just computed together
        return None, seconds
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
