"""The step around a loss function that torch.compile has compiled.

Compiled steps run through the eager runner: only `step_module.compiled` changes. What is here
tries it out: alone first, then compared with the eager step, then timed.
"""

from __future__ import annotations

import torch

from multi_gpu_training.training.probe import untouched
from multi_gpu_training.training.runner.graph import resolve_kept
from multi_gpu_training.training.runner.step_comparison import StepComparison, max_rel_diff
from multi_gpu_training.training.step_state import StepState

SAME_LOSS = 0.02


def try_compiled(
    state: StepState, comparison: StepComparison, draws_noise: bool
) -> tuple[str | None, float]:
    """Let steps run compiled; why they must not, and how long one takes. Every rank must call it;
    the state stays as it was."""
    module, copies = state.step_module, comparison.copies
    problem, seconds = None, float("inf")
    copies.keep("before")
    expected = comparison.eager_step()
    copies.restore("before")
    try:
        module.compiled = torch.compile(module.loss_fn)
        problem = _fails_alone(state, comparison)
        if state.placement.all_min(int(problem is None)) == 1:
            off = max_rel_diff(expected, comparison.eager_step())
            # Compiled code draws other noise than eager code: then there is nothing to compare.
            if off > SAME_LOSS and not draws_noise:
                problem = f"compiled, the loss is {off:.1g} off"
            comparison.eager_step()
            seconds = comparison.seconds(comparison.eager_step)
        elif problem is None:
            problem = "it does not compile on another rank"
    except Exception as error:  # whatever the compiler raises, training goes on without it
        problem = _in_a_line(error)
    copies.restore("before")
    copies.drop()
    state.drop_gradients()
    return problem, seconds


def _fails_alone(state: StepState, comparison: StepComparison) -> str | None:
    """Compile and compute a micro-batch without the other ranks. In the exchange of gradients
    they would wait for a rank that cannot compile."""
    batch, samples, share = comparison.newest[1][0]
    if not share.count:
        return None
    parameters = [p for p in state.trained.parameters() if p.requires_grad]
    try:
        with untouched(state):
            given = state.prepare(resolve_kept(batch), samples)
            result = state.step_module.forward(given, share.count, share.window_count, 1)
            torch.autograd.grad(result.scaled, parameters, allow_unused=True)
    except torch.OutOfMemoryError:
        return "there is no memory to compile in"
    except Exception as error:
        return _in_a_line(error)
    return None


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"it does not compile: {lines[0][:160]}"
