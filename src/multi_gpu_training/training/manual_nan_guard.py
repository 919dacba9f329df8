"""Find gradients that are not finite in a loop that calls backward itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training.gradient_exchange import OptimizerGradients
from multi_gpu_training.training.nan_guard import LOOK, flag_nonfinite, plain_values
from multi_gpu_training.training.step_state import StepState


class ManualNanGuard:
    """Looks at the gradients of each optimizer before it moves. They are the same on every rank,
    so all ranks come to the same result.

    told: called with (action, text, facts) where a step is skipped.
    """

    def __init__(self, state: StepState, told: Callable[[str, str, dict[str, Any]], None]) -> None:
        self._state = state
        self._report = told
        device = state.placement.device
        # Raised on the device, where reading it would wait for all work that is queued.
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def skips(self, slot: OptimizerGradients) -> bool:
        """Whether to skip the step because a gradient is not finite; raises if the config says
        stop. A GPU is asked only occasionally, unless such steps must be skipped."""
        grads = [p.grad for p in slot.parameters if p.grad is not None]
        flag_nonfinite(grads, self._found, self._one)
        skips = self._state.config.on_nonfinite == "skip"
        if (self._found.is_cuda and not skips) or not bool(self._found):
            return False
        self._found.zero_()
        step, names = self._state.step + 1, self._names(slot)
        text = (
            f"step {step}: the gradient for {type(slot.optimizer).__name__} (optimizer "
            f"{slot.number + 1}) is not finite in {', '.join(names[:4])}"
            f"{' ...' if len(names) > 4 else ''}; lower the learning rate, set max_grad_norm, or "
            "check the data"
        )
        if not skips:
            raise NonFiniteLossError(step, text=text)
        self._report("skip", text, {"step": step})
        return True

    def look(self) -> None:
        """Raise if a gradient was not finite since the last check. Waits for the device."""
        if bool(self._found):
            self._found.zero_()
            step = self._state.step
            text = f"a gradient of the {LOOK} steps up to {step} was not finite"
            raise NonFiniteLossError(step, text=f"{text}; the last checkpoint is from before")

    def _names(self, slot: OptimizerGradients) -> list[str]:
        """The parameters whose gradients are not finite."""
        bad = {
            id(p)
            for p in slot.parameters
            if p.grad is not None and not plain_values(p.grad).isfinite().all()
        }
        return [name for name, p in self._state.model.named_parameters() if id(p) in bad]
