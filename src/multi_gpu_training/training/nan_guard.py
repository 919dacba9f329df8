"""Find NaN and infinite gradients before the weights move, without waiting for the GPU.

Once the ranks have summed their gradients, one rank's NaN is on every rank: all see the same and do
the same.

    read     on the CPU, check the gradient before every step
    gate     on a GPU, tell the optimizer's own kernel to leave the weights alone from then on,
             until the host checks: every LOOK steps and before every checkpoint
    later    an optimizer without such a kernel: no check while its steps may still be recorded
    scaler   fp16 loss scaling skips such steps by itself and lowers its scale

Steps recorded as a CUDA graph have no gate, because its kernels would take a tenth of a small step.
Their weights are checked instead, every LOOK_RECORDED steps and before anyone uses them. If they
are not finite, the last verified state is restored and the steps since then are recomputed one by
one, with a gate or read, up to the faulty one. Only `on_nonfinite=skip` records its gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from multi_gpu_training.accelerator import widened
from multi_gpu_training.data.order import Share
from multi_gpu_training.errors import NonFiniteLossError
from multi_gpu_training.torch_internals import (
    flag_nonfinite_,
    foreach_norm,
    largest_elements,
    pop_found_inf,
    set_found_inf,
    sparse_values,
)
from multi_gpu_training.training.nonfinite_diagnosis import explain
from multi_gpu_training.training.optimizer import optimizer_obstacle
from multi_gpu_training.training.state_rollback import StepStart, copy_each
from multi_gpu_training.training.step import MicroResult
from multi_gpu_training.training.step_state import StepState

LOOK = 32
LOOK_RECORDED = 128
LARGE = 2**20  # mean elements per gradient above which reading its norm is faster than the check
LOOKED_AT = (torch.float32, torch.float16, torch.float64)  # types that torch's check takes
_WITH_GATE = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
_NO_GATE = "{} cannot skip NaN by itself: each step waits for the GPU to check for it"


class NanGuard:
    """Protects the weights from gradients that are not finite.

    mode: how, see above. found: on the device, 1 if something is not finite. skipped: the step
    just computed did not move the weights and does not count in the metrics. recorded: steps are
    being replayed. losses: of this step, if they can be read. told: called with
    (action, text, facts) for a skipped step.
    """

    def __init__(
        self, state: StepState, start: StepStart, told: Callable[[str, str, dict[str, Any]], None]
    ) -> None:
        device = state.placement.device
        self.state = state
        self.policy = state.config.on_nonfinite
        self.mode = "none"
        self.skipped = False
        self.recorded = False
        self.losses: list[tuple[Tensor, Share]] = []
        self._report = told
        # In float32 whatever the default is: torch's check accepts nothing else.
        kind = torch.float32
        self.found = torch.zeros((), dtype=kind, device=device)
        self._step_start = start
        self._one = torch.ones((), dtype=kind, device=device)
        # Number of steps for which the gate was closed.
        self._closed = torch.zeros((), dtype=kind, device=device)
        self._readback = Readback(device, 2)
        self._pending: int | None = None  # the step after which the gate was queried
        self._clear = (0, 0.0)  # a step before which no gate closed; its own count then
        self._counts = False
        self._alike: bool | None = None  # gradients are dense and share one type
        self._large = False
        self._buffers: list[Tensor] = []
        self._newer: list[Tensor] = []  # the buffers at the last check
        self._good: list[Tensor] = []  # the buffers when the state was last known to be good
        self._weights_asked = False
        self._spoilt = torch.zeros((), dtype=kind, device=device)
        self._weights_readback = Readback(device, 2)

    # Choosing how

    def attach(self, optimizer: optim.Optimizer) -> str | None:
        """Choose a mode; returns a message for the user if it costs something."""
        state = self.state
        self._buffers = [buffer.detach() for buffer in state.trained.buffers()]
        recordable = state.config.step_execution in ("auto", "graph")
        if state.precision.scaler.is_enabled():
            self.mode = "scaler"
        elif state.placement.device.type != "cuda":
            self.mode = "read"
        elif isinstance(optimizer, _WITH_GATE) and all(g["fused"] for g in optimizer.param_groups):
            self.use_gate(optimizer)
        elif recordable and not optimizer_obstacle(optimizer):
            self.mode = "later"
        else:
            self.mode = "read"
            return _NO_GATE.format(type(optimizer).__name__)
        return None

    def use_gate(self, optimizer: optim.Optimizer) -> None:
        """Let the optimizer's kernel read the gate."""
        self.mode = "gate"
        set_found_inf(optimizer, self.found)
        self.state.extra_tensors += [self.found, self._closed]
        # A closed gate also stops the optimizer's own step count, which tells since when, so
        # no extra counter is needed. SGD does not count.
        self._counts = self.policy == "skip" or isinstance(optimizer, optim.SGD)
        if self.policy == "skip":
            _begin_momentum(optimizer)

    def stay_eager(self) -> str | None:
        """No step will be recorded; returns a message for the user if that costs something."""
        if self.mode != "later":
            return None
        self.mode = "read"
        return _NO_GATE.format(type(self.state.optimizer).__name__)

    def start(self) -> None:
        """The current weights are known to be good: a run begins, or was rolled back."""
        self._clear = (self.state.step, float(self._own_step()) if self.mode == "gate" else 0.0)

    def _own_step(self) -> Tensor | float:
        """How many steps the optimizer has made, by its own count."""
        states = self.state.optimizer.state
        steps = (state["step"] for state in states.values() if "step" in state)
        return next(steps, 0.0)

    # In the step

    @torch.no_grad()
    def finds(self) -> bool:
        """Mode `read`: whether any gradient is not finite."""
        self.found.zero_()
        self._look_at_gradients()
        return bool(self.found)

    def update_gate(self, norm: Tensor | None) -> None:
        """Mode `gate`: make the optimizer skip its update if a gradient is not finite.

        Part of a recording. Every operation counts: an eager step of a small model waits for
        Python.
        """
        if self.policy == "skip":
            self.found.zero_()
        if norm is not None:
            flag_nonfinite([norm], self.found, self._one)  # not finite if any gradient is not
        else:
            self._look_at_gradients()
        if self._counts:
            self._closed.add_(self.found)

    def _look_at_gradients(self) -> None:
        strategy = self.state.strategy
        found = strategy.gradients()
        if self._alike:
            # Reading large gradients is cheaper than reading and writing them.
            flag_nonfinite_(
                largest_elements(found) if self._large else found, self.found, self._one
            )
            strategy.any_rank(self.found)
            return
        if self._alike is None:
            kinds = {grad.dtype for grad in found}
            dense = not any(grad.is_sparse for grad in found)
            self._alike = dense and len(kinds) == 1 and kinds <= set(LOOKED_AT)
            self._large = sum(grad.numel() for grad in found) >= LARGE * len(found)
        flag_nonfinite(found, self.found, self._one)
        strategy.any_rank(self.found)

    def take_new_parameters(self) -> None:
        """The set of trained parameters changed: their gradients may have other types."""
        self._alike = None

    def refuse(self, share: Share) -> None:
        """Mode `read`: the step's gradient is bad, on every rank. Raises, or skips the step."""
        state = self.state
        names = [
            name
            for name, grad in state.strategy.named_gradients()
            if not bool(plain_values(grad).isfinite().all())
        ]
        losses = list(self.losses)
        state.drop_gradients()
        self._step_start.put_back()  # the forward has already changed BatchNorm's averages
        self.losses.clear()
        error = NonFiniteLossError(state.step + 1, share.epoch, share.position)
        explain(state, error, names, losses)
        if self.policy != "skip":
            raise error
        self.skipped = True
        self._report("skip", str(error), {"step": state.step + 1})

    # Skipping without a trace

    @property
    def spares(self) -> bool:
        """Whether a skipped step must leave no trace on the device."""
        return self.mode == "gate" and self.policy == "skip"

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Save the buffers that a forward is about to change. If `spares`, part of a recording."""
        if not self._good:
            self._good = [buffer.clone() for buffer in self._buffers]
        if self._buffers:
            copy_each(self._good, self._buffers)

    @torch.no_grad()
    def spare(self, result: MicroResult, share: Share) -> MicroResult:
        """If `spares`: restore the buffers after a skipped step, and keep a non-finite loss out of
        the metrics. Part of a recording."""
        if share.last:
            bad = self.found > 0
            for buffer, before in zip(self._buffers, self._good, strict=True):
                buffer.copy_(torch.where(bad, before, buffer))
        fine = result.mean.isfinite()
        weight = float(share.count) if result.weight is None else result.weight
        weight = widened(torch.where(fine, weight, 0.0))
        mean = torch.where(fine, result.mean, torch.zeros_like(result.mean))
        return result._replace(mean=mean, weight=weight)

    # Recorded steps

    @property
    def leaves_recordings_alone(self) -> bool:
        """Whether recorded steps have no gate, so their weights must be checked."""
        return self.mode in ("gate", "later") and not self.spares

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Wraps a recording: no gate inside, unless the gate is recorded as well."""
        if not self.leaves_recordings_alone:
            yield
            return
        mode, gate = self.mode, pop_found_inf(self.state.optimizer)
        self.mode = "none"
        try:
            yield
        finally:
            self.mode = mode
            if gate is not None:
                set_found_inf(self.state.optimizer, gate)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Wraps recomputed steps: each is checked before the next one."""
        mode = self.mode
        self.mode = "read" if mode == "later" else mode
        self.reset()
        self.start()
        try:
            yield
        finally:
            self.mode = mode

    def check_before_recording(self) -> None:
        """Make sure that the state to verify against starts with good weights."""
        self.look(now=True)
        if self.mode == "later":
            self.ask_about_weights()
            if self.weights_are_spoilt():
                step = self.state.step
                text = (
                    f"a weight is not finite after {step} steps; lower the learning rate, set "
                    "max_grad_norm, or check the data"
                )
                raise NonFiniteLossError(step, text=text)

    def weights_were_spoilt(self) -> bool:
        """Whether recorded steps had corrupted the weights at the previous call."""
        if not (self.recorded and self.leaves_recordings_alone):
            return False
        spoilt = self.weights_are_spoilt()
        if not spoilt:
            self.ask_about_weights()
        return spoilt

    @torch.no_grad()
    def ask_about_weights(self) -> None:
        """Start a check of the weights on the device, without waiting for it."""
        self._weights_asked = self.leaves_recordings_alone
        if self._weights_asked:
            self._spoilt.zero_()
            largest = largest_elements(list[Tensor](self.state.parameters))
            flag_nonfinite(largest, self._spoilt, self._one)
            # A step whose shape is not recorded has a gate.
            self._weights_readback.ask(self._spoilt, self.found)

    def weights_are_spoilt(self) -> bool:
        """The result of that check, if one was started. Waits for the device if it was just now."""
        asked, self._weights_asked = self._weights_asked, False
        return asked and any(self._weights_readback.read())

    # Between steps

    def look(self, now: bool = False) -> None:
        """Mode `gate`: read whether the gate was closed, some steps after querying it. All ranks
        check at the same steps. `now`: wait for the device."""
        if self.mode != "gate" or (self.recorded and self.leaves_recordings_alone):
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            self._report_closed_gate(pending)
            self._good, self._newer = self._newer, self._good
        if self._counts:
            self._readback.ask(self._closed)
        else:
            self._readback.ask(self.found, torch.as_tensor(self._own_step()))
        if now:
            self._report_closed_gate(self.state.step)
            return
        self._pending = self.state.step
        if self._buffers and not self.spares:
            if not self._newer:
                self._newer = [buffer.clone() for buffer in self._buffers]
            copy_each(self._newer, self._buffers)

    def _report_closed_gate(self, step: int) -> None:
        closed = self._closed_up_to(step)
        if not closed:
            return
        state = self.state
        if self.policy == "skip":
            self._closed.sub_(closed)
            text = f"{closed} steps up to step {step} were skipped: their gradient was not finite"
            self._report("skip", text, {"step": step, "count": closed})
            return
        first = step - closed + 1
        position = state.position - 1 - (state.step - first)
        error = NonFiniteLossError(first, state.epoch, position)
        if self._good:
            copy_each(self._buffers, self._good)
        self.reset()
        explain(state, error, [], [])
        raise error

    def _closed_up_to(self, step: int) -> int:
        """For how many of the latest steps, up to this one, the gate was closed."""
        value, own_step = self._readback.read()
        if self._counts or not value:
            self._clear = (step, own_step)
            return int(value)
        since, then = self._clear
        return max(1, min(step - since, (step - since) - int(own_step - then)))

    def reset(self) -> None:
        """Open the gate again."""
        self._pending = None
        self._weights_asked = False
        if not self.spares:  # a recording writes to them
            self._good, self._newer = [], []
        self.skipped = False
        self.losses = []
        if self.mode == "gate":
            self.found.zero_()
            self._closed.zero_()


class Readback:
    """Copies numbers from the device to the host without waiting for them."""

    def __init__(self, device: torch.device, count: int) -> None:
        cuda = device.type == "cuda"
        self._host = torch.zeros(count, pin_memory=cuda)
        self._event = torch.cuda.Event() if cuda else None

    def ask(self, *numbers: Tensor) -> None:
        for place, number in zip(self._host.unbind(), numbers, strict=False):
            place.copy_(number, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self) -> list[float]:
        """The latest requested value; 0 if none was requested. Waits if that was just now."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._host.tolist()
        return found


def flag_nonfinite(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to one if any element of tensors of any type is not finite; else leave it."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        values = plain_values(tensor)
        by_type.setdefault(values.dtype, []).append(values)
    for kind, same in by_type.items():
        if kind not in LOOKED_AT:
            same = [torch.stack(foreach_norm(same)).float()]
        flag_nonfinite_(same, flag, one)


def plain_values(tensor: Tensor) -> Tensor:
    """The values of a sparse or complex tensor, as real numbers."""
    tensor = sparse_values(tensor) if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _begin_momentum(optimizer: optim.Optimizer) -> None:
    """Give SGD a zero momentum to start with: torch leaves it undefined if the very first step is
    skipped. Without dampening, the first step is the same."""
    for group in optimizer.param_groups if isinstance(optimizer, optim.SGD) else ():
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))
