"""NaN and infinite gradients: found before a weight moves, without waiting for the GPU.

After the ranks have added their gradients, a NaN of one is a NaN of all: every rank sees the
same, and does the same.

    read     on the CPU the gradient is looked at before every step
    gate     on a GPU the optimizer's own kernel is told to leave the weights alone from then on,
             until the host has seen it, which looks every LOOK steps and before every checkpoint
    later    an optimizer without such a kernel: as long as it may be recorded, nothing
    scaler   fp16 with loss scaling skips such steps by itself, and lowers its scale

Steps that are recorded as a CUDA graph go without a gate, whose kernels would take a tenth of a
small step: their weights are looked at instead (weight_watch.py). Only `skip` records its gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim

from multi_gpu_training.data.order import Share
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.training.buffers import copy_each
from multi_gpu_training.training.culprit import explain
from multi_gpu_training.training.nonfinite import (
    LOOKED_AT,
    Readback,
    flag_nonfinite,
    largest_elements,
    plain_values,
)
from multi_gpu_training.training.screening import optimizer_obstacle
from multi_gpu_training.training.step import MicroResult

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer

LOOK = 32
LARGE = 2**20  # elements of a gradient, from which its norm is faster than torch's look at it
_WITH_GATE = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)


class FiniteGate:
    """Keeps weights from a gradient that is not finite.

    mode: how, see above. found: on the device, 1 where something is not finite. skipped: the step
    just computed did not move the weights, and does not count in the metrics. told: called with
    (action, text, facts) for a step that was skipped.
    """

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self.trainer = trainer
        self.policy = trainer.config.on_nonfinite
        self.mode = "none"
        self.skipped = False
        self.told: Callable[[str, str, dict[str, Any]], None] = lambda *_: None
        self.losses: list[tuple[Tensor, Share]] = []  # of this step, where they can be read
        self._pending: int | None = None  # the step after which it was asked for
        self._clear = (0, 0.0)  # a step before which no gate was closed, and the optimizer's own
        self._alike: bool | None = None  # gradients are dense and of one type
        self._large = False  # to read them is cheaper than to read and write them
        self._buffers: list[Tensor] = []
        self._newer: list[Tensor] = []  # the buffers when it was looked at last
        self._good: list[Tensor] = []  # when all was well for sure

    def attach(self, optimizer: optim.Optimizer) -> str | None:
        """Choose how; a line for people where it costs something."""
        trainer = self.trainer
        device = trainer.placement.device
        self._buffers = [buffer.detach() for buffer in trainer.model.buffers()]
        self._one = torch.ones((), device=device)
        self.found = torch.zeros((), device=device)
        self._closed = torch.zeros((), device=device)  # steps that the gate was closed for
        self._readback = Readback(device, 2)
        kind = type(optimizer).__name__
        if trainer.precision.scaler.is_enabled():
            self.mode = "scaler"
        elif device.type != "cuda":
            self.mode = "read"
        elif isinstance(optimizer, _WITH_GATE) and all(g["fused"] for g in optimizer.param_groups):
            self.use_gate(optimizer)
        elif trainer.config.step_execution in ("auto", "graph") and not optimizer_obstacle(
            optimizer
        ):
            self.mode = "later"
        else:
            self.mode = "read"
            return _NO_GATE.format(kind)
        return None

    def use_gate(self, optimizer: optim.Optimizer) -> None:
        """Let the optimizer's kernel look at the gate."""
        self.mode = "gate"
        vars(optimizer)["found_inf"] = self.found
        # Where the gate stays closed, it holds back the optimizer's own count of steps, too: that
        # says since when, and nothing has to be added up beside it.
        self._counts = self.policy == "skip" or isinstance(optimizer, optim.SGD)
        if self.policy == "skip":
            _begin_momentum(optimizer)

    def stay_eager(self) -> str | None:
        """No step will be recorded; a line for people where that costs something."""
        if self.mode != "later":
            return None
        self.mode = "read"
        return _NO_GATE.format(type(self.trainer.optimizer).__name__)

    def start(self) -> None:
        """The state is that of a step whose weights are good: a run begins or went back."""
        self._clear = (self.trainer.step, float(self._own_step()) if self.mode == "gate" else 0.0)

    def _own_step(self) -> Tensor | float:
        """How many steps the optimizer has made, as it counts itself."""
        states = self.trainer.optimizer.state
        steps = (state["step"] for state in states.values() if "step" in state)
        return next(steps, 0.0)

    def tensors(self) -> list[Tensor]:
        """State of the gate, put back with the weights after a comparison."""
        return [self.found, self._closed] if self.mode == "gate" else []

    # In the step

    @torch.no_grad()
    def finds(self) -> bool:
        """Mode `read`: whether the gradient holds something that is not finite."""
        self.found.zero_()
        self._look_at_gradients()
        return bool(self.found)

    def close(self, norm: Tensor | None) -> None:
        """Mode `gate`: let the optimizer leave the weights where the gradient is not finite.
        Part of a recording. Every operation counts: an eager step of a small model waits for
        Python."""
        if self.policy == "skip":
            self.found.zero_()
        if norm is not None:
            flag_nonfinite([norm], self.found, self._one)  # not finite where any gradient is not
        else:
            self._look_at_gradients()
        if self._counts:
            self._closed.add_(self.found)

    def _look_at_gradients(self) -> None:
        parameters = self.trainer._parameters
        found = [grad for p in parameters if (grad := p.grad) is not None]
        if self._alike:
            if self._large:
                found = largest_elements(found)
            torch._amp_foreach_non_finite_check_and_unscale_(found, self.found, self._one)
            return
        if self._alike is None:
            kinds = {grad.dtype for grad in found}
            dense = not any(grad.is_sparse for grad in found)
            self._alike = dense and len(kinds) == 1 and kinds <= set(LOOKED_AT)
            self._large = sum(grad.numel() for grad in found) >= LARGE * len(found)
        flag_nonfinite(found, self.found, self._one)

    # Recorded steps

    @property
    def leaves_recordings_alone(self) -> bool:
        return self.mode in ("gate", "later") and not self.spares

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is recorded."""
        if not self.leaves_recordings_alone:
            yield
            return
        optimizer, mode = vars(self.trainer.optimizer), self.mode
        gate = optimizer.pop("found_inf", None)
        self.mode = "none"
        try:
            yield
        finally:
            self.mode = mode
            if gate is not None:
                optimizer["found_inf"] = gate

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Around steps that are computed again: each is looked at before the next."""
        mode = self.mode
        self.mode = "read" if mode == "later" else mode
        self.reset()
        self.start()
        try:
            yield
        finally:
            self.mode = mode

    @property
    def spares(self) -> bool:
        """Whether a skipped step must leave no trace on the device either."""
        return self.mode == "gate" and self.policy == "skip"

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """What a forward is about to change. Where `spares`, part of a recording."""
        if not self._good:
            self._good = [buffer.clone() for buffer in self._buffers]
        if self._buffers:
            copy_each(self._good, self._buffers)

    @torch.no_grad()
    def spare(self, result: MicroResult, share: Share) -> MicroResult:
        """Where `spares`: buffers as they were before a skipped step, and no part in the
        metrics for a loss that is not finite. Part of a recording."""
        if share.last:
            bad = self.found > 0
            for buffer, before in zip(self._buffers, self._good, strict=True):
                buffer.copy_(torch.where(bad, before, buffer))
        fine = result.mean.isfinite()
        weight = float(share.count) if result.weight is None else result.weight
        weight = torch.where(fine, weight, 0.0).double()
        mean = torch.where(fine, result.mean, torch.zeros_like(result.mean))
        return result._replace(mean=mean, weight=weight)

    def refuse(self) -> None:
        """Mode `read`: the step's gradient is bad, on every rank. Raises, or skips the step."""
        trainer = self.trainer
        names = [
            name
            for name, p in trainer.model.named_parameters()
            if p.grad is not None and not bool(plain_values(p.grad).isfinite().all())
        ]
        share, losses = trainer._computed[3], list(self.losses)
        trainer.drop_gradients()
        trainer.memory.rewind()  # the forward has changed BatchNorm's averages already
        error = NonFiniteLossError(trainer.step + 1, share.epoch, share.position)
        explain(trainer, error, names, losses)
        if self.policy != "skip":
            raise error
        self.skipped = True
        self.told("skip", str(error), {"step": trainer.step + 1})

    # Between steps

    def look(self, now: bool = False) -> None:
        """Mode `gate`: read, a while after it was asked for, whether the gate was closed. All
        ranks look at the same steps. `now`: wait for the device."""
        if self.mode != "gate" or self.trainer.weight_watch.on:
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            self._act(pending)
            self._good, self._newer = self._newer, self._good
        if self._counts:
            self._readback.ask(self._closed)
        else:
            self._readback.ask(self.found, torch.as_tensor(self._own_step()))
        if now:
            self._act(self.trainer.step)
            return
        self._pending = self.trainer.step
        if self._buffers and not self.spares:
            if not self._newer:
                self._newer = [buffer.clone() for buffer in self._buffers]
            copy_each(self._newer, self._buffers)

    def _act(self, step: int) -> None:
        closed = self._closed_up_to(step)
        if not closed:
            return
        trainer = self.trainer
        if self.policy == "skip":
            self._closed.sub_(closed)
            text = f"{closed} steps up to step {step} were skipped: their gradient was not finite"
            self.told("skip", text, {"step": step, "count": closed})
            return
        first = step - closed + 1
        position = trainer.position - 1 - (trainer.step - first)
        error = NonFiniteLossError(first, trainer.epoch, position)
        if self._good:
            copy_each(self._buffers, self._good)
        self.reset()
        explain(trainer, error, [], [])
        raise error

    def _closed_up_to(self, step: int) -> int:
        """For how many of the steps up to this one the gate was closed: the last ones."""
        value, own_step = self._readback.read()
        if self._counts or not value:
            self._clear = (step, own_step)
            return int(value)
        since, then = self._clear
        return max(1, min(step - since, (step - since) - int(own_step - then)))

    def reset(self) -> None:
        """Open the gate again."""
        self._pending = None
        self.trainer.weight_watch.reset()
        if not self.spares:  # there a recording writes to them
            self._good, self._newer = [], []
        self.skipped = False
        self.losses = []
        if self.mode == "gate":
            self.found.zero_()
            self._closed.zero_()


_NO_GATE = "{} has no gate for NaN: each step waits for the GPU to look for one"


def _begin_momentum(optimizer: optim.Optimizer) -> None:
    """Let SGD begin with a momentum of zero: torch leaves it undefined where the very first step
    is skipped. Without dampening, the first step is the same."""
    for group in optimizer.param_groups if isinstance(optimizer, optim.SGD) else ():
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))
