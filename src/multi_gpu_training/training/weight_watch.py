"""Weights that recorded steps have moved: are they finite?

Steps that are recorded as a CUDA graph have no gate for NaN (finite.py). Their weights are looked
at every LOOK_RECORDED steps, and before anyone uses them. If they are not finite, the last verified
state is brought back and the steps since are computed one by one, with a gate or read, up to the
one that is to blame (execution.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training.nonfinite import Readback, flag_nonfinite, largest_elements

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer

LOOK_RECORDED = 128


class WeightWatch:
    """Asks the device about the weights, and reads the answer a while later."""

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        device = trainer.placement.device
        self.trainer = trainer
        self._asked = False
        self._one = torch.ones((), device=device)
        self._spoilt = torch.zeros((), device=device)
        self._readback = Readback(device, 2)

    @property
    def on(self) -> bool:
        """Whether this, and not the gate, looks for NaN now."""
        trainer = self.trainer
        return trainer.execution.mode == "graph" and trainer.finite.leaves_recordings_alone

    def check_before_recording(self) -> None:
        """What is verified from here on begins with good weights."""
        finite, step = self.trainer.finite, self.trainer.step
        finite.look(now=True)
        if finite.mode == "later":
            self.ask()
            if self.are_spoilt():
                text = (
                    f"a weight is not finite after {step} steps; lower the learning rate, set "
                    "max_grad_norm, or check the data"
                )
                raise NonFiniteLossError(step, text=text)

    def look(self) -> bool:
        """Whether recorded steps had spoilt the weights when this was called the last time."""
        if not self.on:
            return False
        spoilt = self.are_spoilt()
        if not spoilt:
            self.ask()
        return spoilt

    @torch.no_grad()
    def ask(self) -> None:
        """Let the device look at them, without waiting for it."""
        finite = self.trainer.finite
        self._asked = finite.leaves_recordings_alone
        if self._asked:
            self._spoilt.zero_()
            largest = largest_elements(list[Tensor](self.trainer._parameters))
            flag_nonfinite(largest, self._spoilt, self._one)
            # A step of a shape that is not recorded has a gate.
            self._readback.ask(self._spoilt, finite.found)

    def are_spoilt(self) -> bool:
        """What was found, if it was asked for. Waits for the device if that was just now."""
        asked, self._asked = self._asked, False
        return asked and any(self._readback.read())

    def reset(self) -> None:
        """Nobody needs the answer any more."""
        self._asked = False
