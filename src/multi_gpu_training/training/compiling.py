"""The step compiled by `torch.compile`: tried alone, compared with the eager step, timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from multi_gpu_training.training.capture import found
from multi_gpu_training.training.recordings import Recordings, apart
from multi_gpu_training.training.rewind import StateCopies

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer

SAME_LOSS = 0.02


def try_compiled(
    trainer: MultiGPUTrainer,
    recordings: Recordings,
    copies: StateCopies,
    draws_noise: bool,
    timed: Callable[[], float],
) -> tuple[str | None, float]:
    """Let steps run compiled; why they must not, and how long one takes. Every rank must call it;
    the state stays as it was."""
    module = trainer.step_module
    problem, seconds = None, float("inf")
    copies.keep("before")
    expected = recordings.eager_step()
    copies.restore("before")
    try:
        module.compiled = torch.compile(module.loss_fn)
        problem = _fails_alone(trainer, recordings)
        if trainer.placement.all_min(int(problem is None)) == 1:
            off = apart(expected, recordings.eager_step())
            # Compiled code draws other noise than eager code: then there is nothing to compare.
            if off > SAME_LOSS and not draws_noise:
                problem = f"compiled, the loss is {off:.1g} off"
            recordings.eager_step()
            seconds = timed()
        elif problem is None:
            problem = "it does not compile on another rank"
    except Exception as error:  # whatever the compiler raises, training goes on without it
        problem = _in_a_line(error)
    copies.restore("before")
    copies.drop()
    trainer.drop_gradients()
    return problem, seconds


def _fails_alone(trainer: MultiGPUTrainer, recordings: Recordings) -> str | None:
    """Compile and compute a micro-batch without the other ranks: they would wait, in the exchange
    of gradients, for one that cannot compile."""
    from multi_gpu_training.training.probe import untouched

    batch, samples, share = recordings.newest[1][0]
    if not share.count:
        return None
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    try:
        with untouched(trainer):
            given = trainer._prepared(found(batch), samples)
            result = trainer.step_module.forward(given, share.count, share.window_count, 1)
            torch.autograd.grad(result.scaled, parameters, allow_unused=True)
    except torch.OutOfMemoryError:
        return "there is no memory to compile in"
    except Exception as error:
        return _in_a_line(error)
    return None


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"it does not compile: {lines[0][:160]}"
