"""The plain step, operation by operation: the reference that every other way must equal.

One step, over all ranks and micro-batches, moves the weights along

    sum of w_i * grad l_i  /  sum of w_i

which is what one GPU computes on the whole global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.batchnorm import no_norm_alone
from multi_gpu_training.distributed.progress_slot import BACKWARD, OPTIMIZER, note_phase
from multi_gpu_training.errors import ModelError
from multi_gpu_training.state_dicts import plain_name
from multi_gpu_training.torch_internals import queue_after_backward
from multi_gpu_training.training.delayed_hooks import DelayedHooks
from multi_gpu_training.training.loss import Pairs
from multi_gpu_training.training.nan_guard import NanGuard
from multi_gpu_training.training.state_rollback import StepStart
from multi_gpu_training.training.step import MicroResult, StepResult
from multi_gpu_training.training.step_state import StepState

_NOTHING = nullcontext()


class EagerRunner:
    """Forward, backward, exchange, clipping, NaN guard, optimizer."""

    def __init__(self, state: StepState, guard: NanGuard, start: StepStart) -> None:
        self.state = state
        self.guard = guard
        self.start = start
        self.hooks = DelayedHooks()
        self._checked = False
        # The latest micro-batch, detached: mean, weight, metrics, share.
        self._computed: tuple[Tensor, Tensor | None, Pairs, Share]

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """Train on one micro-batch, and count it."""
        state = self.state
        if share.first:
            self.start.keep()  # the forward changes buffers: restored if the step fails
        state.seed_noise()
        state.rates.send()
        result, norm = self.compute(batch, samples, share)
        if self.guard.skipped:
            self.guard.skipped = False
        else:
            state.note(result, share)
        return state.advance(result.mean, norm, share)

    def compute(
        self, batch: Any, samples: Tensor | None, share: Share
    ) -> tuple[MicroResult, Tensor | None]:
        """All the device work of a micro-batch and nothing else: this is what a CUDA graph records.
        Returns the result, and the gradient norm if it was clipped."""
        state, guard = self.state, self.guard
        strategy, callbacks = state.strategy, state.callbacks
        state.attendance.present = share.count > 0  # until backward is done: it may recompute
        state.attendance.outside_steps = False
        if share.first:
            # A backward outside the trainer (in a callback, or in a second training that shares
            # this model) must not leak into this step.
            state.drop_gradients()
            self.hooks.begin(alone=state.placement.dp_size == 1, whole=share.last)
            if guard.spares:
                guard.keep_buffers()
        try:
            with strategy.no_sync(share.last), self._first_look():
                for call in callbacks.on_forward:
                    call(share)
                if share.count == 0:
                    # Replays run no Python: only ranks that talk in the forward need one there.
                    wanted = state.loader is not None and (
                        state.step_module.needs_graph or not _is_recording(state)
                    )
                    stand_in = partial(state.stand_in, given=batch) if wanted else None
                    result = strategy.absent(share, stand_in)
                else:
                    batch = state.prepare(batch, samples)
                    ranks = state.placement.dp_size
                    state.step_module.rows = share.count if share.left_out else None
                    result = strategy.forward(batch, share.planned, self._window(share), ranks)
                self._computed = result.mean, result.weight, result.metrics, share
                if share.first:
                    state.weighted, state.unweighted = False, 0
                if result.weight is None:
                    state.unweighted += share.count
                else:
                    state.weighted = True
                if guard.mode == "read":
                    guard.losses.append((result.mean, share))
                scaled = state.precision.scaler.scale(result.scaled)
                for call in callbacks.on_backward:
                    call(scaled)
                if callbacks.on_exchange and scaled.requires_grad:
                    scaled.register_hook(self._announce_exchange)
                strategy.check_layers()
                note_phase(BACKWARD)
                # The tally is added unscaled: it is a weight, not a gradient.
                (scaled if result.tally is None else scaled + result.tally).backward()
                if share.last:
                    strategy.check_exchanged()
            norm = self._move_weights(share) if share.last else None
        finally:
            state.attendance.present = True  # between steps, every batch counts
            for call in callbacks.on_micro_batch_end:
                call()
        return guard.spare(result, share) if guard.spares else result, norm

    def _window(self, share: Share) -> int:
        """Samples of the whole step, over all ranks; 0 if unknown until the step is over."""
        alone = share.first and share.last and self.state.placement.dp_size == 1
        return share.planned if alone else share.window_count

    def _announce_exchange(self, grad: Tensor) -> None:
        """Runs first in a backward. The callback it queues runs once this rank's own gradients are
        computed, before DDP waits for the other ranks."""
        for call in self.state.callbacks.on_exchange:
            queue_after_backward(call)

    def _move_weights(self, share: Share) -> Tensor | None:
        note_phase(OPTIMIZER)
        state, guard = self.state, self.guard
        config, scaler, optimizer = state.config, state.precision.scaler, state.optimizer
        if not self._checked:
            self._check_gradients()
            self._checked = True
        state.strategy.weigh(self._window(share), state.weighted, state.unweighted)
        self.hooks.run(whole=share.first)
        for call in state.callbacks.on_optimizer:  # gradients now cover the whole step
            call()
        if guard.mode == "read":
            if guard.finds():
                guard.refuse(share)
                return None
            guard.losses.clear()
        norm = None
        if config.max_grad_norm is not None:
            scaler.unscale_(optimizer)
            norm = state.strategy.clip(config.max_grad_norm)
        if guard.mode == "gate":
            guard.update_gate(norm)  # on the device: the host does not wait
        if config.max_grad_value is not None:  # after the guard: a clamped infinity looks finite
            if norm is None:
                scaler.unscale_(optimizer)
            clip_values(state.parameters, config.max_grad_value)
        state.moving = True
        with state.rates, state.strategy.stepping(optimizer):
            scaler.step(optimizer)
        state.moving = False
        scaler.update()
        state.drop_gradients()
        return norm

    def take_hooks(self) -> None:
        """Call the user's hooks on gradients once ranks have exchanged them."""
        if self.state.strategy.whole_gradients:
            self.hooks.take(self.state.parameters)

    def take_new_parameters(self) -> None:
        """The set of trained parameters changed: check their first gradients again."""
        self._checked = False
        self.take_hooks()
        self.guard.take_new_parameters()

    def _first_look(self) -> AbstractContextManager[None]:
        """Context of the first step's micro-batches; later ones do not pay for the check."""
        state = self.state
        if self._checked or not state.config.sync_bn or state.placement.dp_size == 1:
            return _NOTHING
        # torch warns about global module hooks if the user compiled some modules.
        compiled = any(plain_name(name) != name for name, _ in state.model.named_parameters())
        return _NOTHING if compiled else no_norm_alone()

    def _check_gradients(self) -> None:
        if self.state.config.find_unused_parameters:
            return
        named = self.state.trained.named_parameters()
        missing = [name for name, p in named if p.requires_grad and p.grad is None]
        if missing:
            raise ModelError(
                f"{len(missing)} parameters got no gradient from the loss: {', '.join(missing[:8])}"
                f"{' ...' if len(missing) > 8 else ''}; use them in the loss, freeze them with "
                "requires_grad_(False), or set find_unused_parameters=true",
                code="MGT402",
            )

    def finish_step(self) -> StepResult:
        """Count a step that the other ranks finished: this rank received their weights."""
        mean, weight, metrics, share = self._computed
        self.state.note(MicroResult(mean, None, mean, weight, metrics), share)
        return self.state.advance(mean, None, share)


def clip_values(parameters: Sequence[Tensor], most: float) -> None:
    """Clamp every gradient element to -most..most; sparse gradients row by row."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            parameter.grad.values().clamp_(-most, most)
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    torch.nn.utils.clip_grad_value_(dense, most)


def _is_recording(state: StepState) -> bool:
    """Whether a CUDA graph is currently being recorded."""
    cuda = state.placement.device.type == "cuda"
    return cuda and torch.cuda.is_current_stream_capturing()
