"""Your own backward: several optimizers, closures, gradient penalties.

    trainer = manager.prepare(generator, discriminator, opt_g, opt_d)
    for batch in loader:
        with trainer.step(batch) as real:
            trainer.backward(loss_d(real), optimizer=opt_d)
            opt_d.step()
            trainer.backward(loss_g(real), optimizer=opt_g)

`backward` adds the gradients that one process would compute on the batches of all ranks together,
for the parameters of one optimizer and no others. Ranks exchange gradients inside that call, so
`p.grad` may be clipped, read or changed right after it, as in any loop. An optimizer that has not
stepped by the end of the block steps there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from multi_gpu_training.data.batch import mark, share_of, tensors_of, to_device
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.batchnorm import ATTENDANCE, SyncBatchNorm
from multi_gpu_training.distributed.control import Boundary
from multi_gpu_training.distributed.progress_slot import (
    BACKWARD,
    BETWEEN_STEPS,
    CALLBACK,
    OPTIMIZER,
    note_phase,
    note_step,
)
from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.torch_internals import RunningStatsBase, complete_optimizer
from multi_gpu_training.training.backward_arguments import (
    checked_loss,
    chosen_slots,
    is_sum,
    plain_weight,
)
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.delayed_hooks import DelayedHooks
from multi_gpu_training.training.gradient_exchange import (
    GradientExchange,
    OptimizerGradients,
    as_double,
    ratio,
)
from multi_gpu_training.training.learning_rate import Schedule
from multi_gpu_training.training.manual_nan_guard import ManualNanGuard
from multi_gpu_training.training.metrics import Number
from multi_gpu_training.training.nan_guard import LOOK
from multi_gpu_training.training.oom import advice, is_out_of_memory
from multi_gpu_training.training.optimizer import needs_closure
from multi_gpu_training.training.step import StepResult, no_gradient
from multi_gpu_training.training.step_state import StepState

_FOREIGN = (
    "loss.backward() was called inside trainer.step(): ranks would not exchange these gradients, "
    "and nothing would move along them; call trainer.backward(loss, optimizer=...)"
)
WATCHED_STEPS = 3  # blocks in which a plain loss.backward() is detected


class ManualTrainer:
    """Steps of a loop that calls backward itself. Every rank must make the same calls.

    optimizers: all that take part; each parameter belongs to exactly one.
    result: what the latest step did.
    """

    def __init__(
        self,
        state: StepState,
        optimizers: Sequence[Optimizer],
        boundary: Boundary,
        after_step: Callable[[], None],
        told: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self.optimizers = list(optimizers)
        self.result: StepResult | None = None
        self.schedules: list[Schedule] = []  # for the optimizers after the first
        self._state = state
        self._placement = state.placement
        self._boundary = boundary
        self._after_step = after_step
        self._exchange = GradientExchange(state.placement)
        self._slots = [
            OptimizerGradients(one, number) for number, one in enumerate(self.optimizers)
        ]
        held = sum(len(slot.find_parameters()) for slot in self._slots)
        # Otherwise a backward must not reach parameters that no optimizer here trains.
        self._holds_all = held == sum(p.requires_grad for p in state.model.parameters())
        self._inside = self._has_batch = self._moving = False
        ATTENDANCE.outside_steps = True
        self._share: Share
        self._place = 0  # tells steps apart, alike on all ranks
        self._weight: Number = 1.0
        self._sharded: Share | None = None
        self._stood_in = False  # whether the latest shard was a stand-in
        # Parts of batches in this block; those since the latest backward; losses that say theirs.
        self._parts: list[Share] = []
        self._fresh = self._told = 0
        # The losses of the step, logged when it ends: (optimizer, name, loss x weight, weight).
        self._noted: list[tuple[list[OptimizerGradients], str, Number, Number]] = []
        self._unit: Number | None = None  # for gradients not exchanged yet
        self._loss: Tensor | None = None
        self._norm: Tensor | None = None
        self._closure_loss: Tensor | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []
        device = state.placement.device
        self._nan_guard = ManualNanGuard(state, told)
        self._mixed_up = torch.zeros((), dtype=torch.int64, device=device)
        self._own = False  # whether the backward now running was started here
        self._watch: list[Any] = []
        # On several ranks, hooks on gradients wait for those of all ranks.
        self._hooks = DelayedHooks(at_once=True, but=self._refuse_foreign)
        state.callbacks.add(_LookBeforeSave(self.look))
        self._groups = self._group_lists()
        for slot in self._slots:
            complete_optimizer(slot.optimizer, calls_hooks=True)
            slot.optimizer.register_step_pre_hook(self._before_move)
            slot.optimizer.register_step_post_hook(self._after_move)
            if state.placement.dp_size > 1:
                for parameter in slot.parameters:
                    hook = parameter.register_post_accumulate_grad_hook(self._refuse_foreign)
                    self._watch.append(hook)

    @property
    def epoch(self) -> int:
        """Passes over the dataset so far; after a resume, the one to continue."""
        return self._state.epoch

    # The block

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Any]:
        """One step. Entering it gives the batch on the device. Leaving it steps every optimizer
        that has gradients, counts and logs the step, and saves if a checkpoint is due.

        With a batch, each loss is weighted by the number of samples this rank holds of it; for a
        batch from a loader or `manager.shard`, that is this rank's part of the global batch.
        Without a batch, all ranks weigh the same. A rank without samples gets a stand-in, whose
        losses have weight zero. With gradient_accumulation_steps, each micro-batch of a loader
        takes one block, and only the last block steps.
        """
        given = self._begin(batch)
        strangers = register_optimizer_step_pre_hook(self._refuse_stranger)
        try:
            with self._state.precision.autocast():
                yield given
            self._end()
        except BaseException as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                error.add_note(advice(self._state))
            self._abandon()
            raise
        finally:
            strangers.remove()
        self._after_block()

    def _begin(self, batch: Any) -> Any:
        state, placement = self._state, self._placement
        if self._inside:
            raise ModelError("trainer.step() inside of trainer.step(); end the first block before")
        note_step(state.step + 1, begun=True)
        if (groups := self._group_lists()) != self._groups:
            self._groups = groups
            state.strategy.take_layers()
        share = self._sharded if batch is None else self._share_of(batch)
        self._weight = 1.0 if share is None else float(share.count)
        self._share = share or Share(state.epoch, state.position, (), 1, 0, True, True, state.step)
        share = self._share
        # Of the batch, if the loader gave it as it is; otherwise steps are all there is to count.
        known = share_of(batch) is not None and not share.changed
        self._place = state.step + (7 * share.position + share.epoch if known else 0)
        if not share.last and len(self.optimizers) > 1:
            raise ConfigError(
                f"this batch is one of several micro-batches of a step, and {len(self.optimizers)} "
                "optimizers move in turn: a later one must see what an earlier one has moved. Set "
                "gradient_accumulation_steps=1, or accumulate inside the block with "
                "trainer.backward(loss, last=False)"
            )
        if share.first:
            for call in state.callbacks.on_step_begin:
                call(state.step + 1)
            state.drop_gradients()
            self._unit = self._loss = self._norm = None
            self._noted = []
            for slot in self._slots:
                slot.reset()
        given = batch
        if share.count == 0:
            _refuse_real_rows(batch)
        if share.count:
            given = to_device(batch, placement.device)
            if batch is not None:
                given = state.prepare(given, state.sample_numbers(given, share))
        elif not all(tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim):
            given = state.stand_in(share, batch)  # otherwise `shard` set it
        self._inside, self._has_batch = True, batch is not None
        ATTENDANCE.exchanged = ATTENDANCE.outside_steps = False
        self._parts = [share] if self._has_batch else []
        self._fresh = self._told = 0
        if share.count == 0 or state.augment is not None:
            mark(given, share)
        self._attend(share)
        return given

    def _group_lists(self) -> list[tuple[int, int]]:
        """Tells whether the user gave an optimizer further parameters, or others."""
        groups = [group["params"] for one in self.optimizers for group in one.param_groups]
        return [(id(group), len(group)) for group in groups]

    def _share_of(self, batch: Any) -> Share:
        state = self._state
        share = share_of(batch)
        if share is None and state.loader is not None:
            place = state.epoch, state.position
            share = state.loader.recognise(batch, place, state.count_samples)
        if share is not None:
            return share
        own = state.own_share(batch)  # this batch is the whole step, whatever the config says
        return Share(own.epoch, own.position, (), own.count, 0, True, True, own.key)

    def _attend(self, share: Share) -> None:
        """Let a rank without samples compute on a stand-in, which leaves statistics unchanged."""
        self._state.attendance.present = share.count > 0
        if share.count == 0 and not self._kept:
            for module in self._state.model.modules():
                if isinstance(module, RunningStatsBase) and not isinstance(module, SyncBatchNorm):
                    buffers = module.buffers(recurse=False)
                    self._kept += [(buffer, buffer.clone()) for buffer in buffers]

    def _refuse_mixture(self) -> None:
        """Raise if a loss seems to be the mean over one batch plus the mean over another, of which
        this rank has another share."""
        first, *others = self._parts or [self._share]
        others = [
            share
            for share in others
            if first.window_count
            and first.count * share.window_count != share.count * first.window_count
        ]
        if len(others) > self._told:
            raise ModelError(
                f"this block has parts of batches of {first.window_count} and "
                f"{others[0].window_count} samples, of which this rank holds {first.count} and "
                f"{others[0].count}: a loss of both has no weight that is right. Call "
                "trainer.backward for each, with the part that it is a mean over, "
                "trainer.backward(loss, weight=x), x being a tensor of that part; or make the "
                "batches of one size"
            )

    def _end(self) -> None:
        state, share = self._state, self._share
        if len(self._parts) > 1:
            self._refuse_mixture()
        for slot in self._slots if share.last else ():
            if not slot.used and any(p.grad is not None for p in slot.find_parameters()):
                raise ModelError(
                    f"parameters of {type(slot.optimizer).__name__} have gradients that did not "
                    "come from trainer.backward (loss.backward() or torch.autograd.grad?): ranks "
                    "have not exchanged them, and they would not be used; call "
                    "trainer.backward(loss, optimizer=...), and then change p.grad as you like"
                )
            if slot.due and all(p.grad is None for p in slot.parameters):
                slot.skipped = True  # the loop threw them away, as those of a NaN
            elif slot.due:
                if needs_closure(slot.optimizer):
                    raise ModelError(
                        f"{type(slot.optimizer).__name__} needs a closure: call its "
                        "step(closure) inside the block, and trainer.backward inside the closure"
                    )
                slot.optimizer.step()
        for slots, name, part, weight in self._noted if share.last else ():
            if not all(slot.skipped for slot in slots):
                state.metrics.add(name, part, weight)
        self._leave()
        loss = torch.zeros(()) if self._loss is None else self._loss
        if state.loader is not None and (share.window_count or share.changed):
            state.loader.trained = share
        self.result = state.advance(loss, self._norm, share)
        state.calls_in_step = 0 if share.last else state.calls_in_step + 1
        if share.last:
            state.drop_gradients()
            for schedule in self.schedules:
                schedule.after_step(state.step)

    def sharded(self, share: Share) -> None:
        """Called when `manager.shard` has split a batch: losses of this block are weighted by its
        samples, or those of the next block unless that block is given another batch."""
        self._sharded, self._stood_in = share, share.count == 0
        if self._inside:
            self._parts.append(share)
            self._fresh += 1
        if self._inside and not self._has_batch:
            self._weight = float(share.count)
            self._attend(share)

    def _leave(self) -> None:
        self._inside = self._own = self._moving = False
        self._sharded = None
        ATTENDANCE.present = ATTENDANCE.outside_steps = True
        for buffer, before in self._kept:  # a stand-in is no sample
            buffer.data.copy_(before)
        self._kept = []

    def _abandon(self) -> None:
        """Drop the unfinished step: whatever the caller does next begins another one."""
        self._leave()
        self._state.abandon_step()
        for slot in self._slots:
            slot.reset()

    def _after_block(self) -> None:
        """Between two steps the state is complete: save it if due, and stop if asked to."""
        result, state = self.result, self._state
        if result is None or not result.moved:
            return
        # Hooks on every gradient cost time; a loop that is wrong is wrong from its first step.
        if self._watch and state.step >= WATCHED_STEPS:
            for hook in self._watch:
                hook.remove()
            self._watch.clear()
        if state.step % LOOK == 0:
            self.look()
        note_phase(CALLBACK)
        for call in state.callbacks.on_step_end:
            call(result)
        self._after_step()
        note_phase(BETWEEN_STEPS)
        self._boundary.passed += 1
        if self._boundary.held:
            self._boundary.halt()

    # Gradients

    def backward(
        self,
        loss: Tensor,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        weight: Any = None,
        reduction: Literal["mean", "sum"] = "mean",
        last: bool = True,
        retain_graph: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Add the gradients of `loss` to the parameters of `optimizer`; without one, to those of
        all optimizers. Returns the loss over all ranks.

        `loss` is a mean over this rank's part; `weight` is what it was divided by (tokens, for
        example) if that is not the batch's sample count. In a block with parts of several batches,
        it may be a tensor of the part that the loss is a mean over. With reduction="sum" it is a
        sum over this rank's part, and the gradient is that of the sum over all ranks. With
        last=False, more micro-batches of the same mean or sum follow and nothing is exchanged yet;
        do not divide the losses by their number. `name` is the loss's name in the log.
        """
        if not self._inside:
            raise ModelError("trainer.backward(loss) belongs inside `with trainer.step():`")
        slots = chosen_slots(optimizer, self._slots)
        summed = is_sum(reduction, weight, slots)
        weight, samples = self._weights_of(weight, summed)
        # A mean over nothing may be a plain zero, unless other ranks wait in its backward.
        nothing = not isinstance(weight, Tensor) and not weight and not ATTENDANCE.exchanged
        loss = checked_loss(loss, needs_gradient=not nothing)
        last = last and self._share.last
        # One rank with one micro-batch: its gradient is the gradient, as in a loop without us.
        plain = self._placement.dp_size == 1 and last and not any(slot.open for slot in slots)
        plain = plain and (isinstance(weight, Tensor) or weight > 0)
        scaled, mean = (loss, loss.detach()) if plain else self._scaled(loss, weight)
        for slot in slots:
            slot.open_up(plain)
        if loss.requires_grad:
            self._run_backward(scaled, slots, retain_graph)
        if (
            scaled is not loss
            and self._share.count
            and not isinstance(weight, Tensor)
            and not weight
        ):
            _zero_gradients(loss, slots)
        part = mean.double() * weight
        if isinstance(weight, Tensor):
            part = torch.where(weight > 0, part, torch.zeros_like(part))
        if self._share.count:
            number = slots[0].number if len(slots) == 1 else 0
            name = name or ("loss" if number == 0 else f"loss_{number + 1}")
            self._noted.append((slots, name, part, samples))
        self._loss = mean if self._loss is None else self._loss
        over_ranks = mean
        for slot in slots:
            slot.due = slot.used = True
            if not plain:
                slot.open, slot.summed, slot.parts = True, summed, slot.parts + 1
                slot.weight, slot.loss = slot.weight + weight, slot.loss + part
                if last:
                    over_ranks = self._complete(slot).to(mean.dtype)
        if self._closure_loss is not None and last:
            self._closure_loss = self._closure_loss + over_ranks
        return over_ranks

    def _weights_of(self, given: Any, summed: bool) -> tuple[Number, Number]:
        """What a loss counts in the gradient, and what the log divides it by."""
        fresh, self._fresh = self._fresh, 0
        self._told += given is not None or summed or (fresh == 1 and not self._has_batch)
        part = None if given is None else next(map(share_of, (given, *tensors_of(given))), None)
        if part is not None:
            return (float(part.count > 0) if summed else float(part.count)), float(part.count)
        if self._stood_in and self._sharded is None and not self._has_batch:
            raise ModelError(
                "the newest manager.shard had no row for this rank and gave it a stand-in, which "
                "only that step knows; call it in every step, or share out at least as many rows "
                "as there are ranks"
            )
        weight: Number = self._weight if given is None else plain_weight(given)
        if given is not None and len({share.count > 0 for share in self._parts}) > 1:
            raise ModelError(
                "trainer.backward got a number as its weight, where this rank has rows of one "
                "batch and a stand-in for another: it may have counted the stand-in. Give the part "
                "that the loss is a mean over, trainer.backward(loss, weight=x), x being a tensor "
                "of it"
            )
        # A stand-in has weight zero, whatever the loop counts in it.
        weight = weight if self._weight else 0.0
        return (float(weight > 0) if summed else weight), weight

    def _scaled(self, loss: Tensor, weight: Number) -> tuple[Tensor, Tensor]:
        """The loss to differentiate, and its value. The weight of the whole step is not known
        before its last micro-batch, so gradients count in units of the first one's weight."""
        mean = loss.detach()
        if not isinstance(weight, Tensor) and not weight > 0:
            # Selected, not multiplied: a mean over nothing is NaN.
            return no_gradient(loss), torch.zeros_like(mean)
        if self._unit is None:
            # One unit on all ranks: where they exchange statistics (BatchNorm), the backward of
            # one rank's loss runs through the others, so losses must be in proportion by then.
            self._unit = weight if self._placement.dp_size == 1 else 1.0
        return loss if weight is self._unit else loss * ratio(weight, self._unit, loss), mean

    def _run_backward(
        self, scaled: Tensor, slots: list[OptimizerGradients], retain_graph: bool
    ) -> None:
        everything = self._holds_all and len(slots) == len(self._slots)
        inputs = None if everything else [p for slot in slots for p in slot.parameters]
        self._state.strategy.check_layers()
        note_phase(BACKWARD)
        if self._placement.dp_size > 1:
            self._hooks.take(p for slot in slots for p in slot.parameters)
        self._own, self._hooks.at_once = True, self._placement.dp_size == 1
        try:
            # As torch advises: gradients take the types that autocast chose in the forward.
            with torch.autocast(self._placement.device.type, enabled=False):
                torch.autograd.backward(scaled, retain_graph=retain_graph, inputs=inputs)
        finally:
            self._own, self._hooks.at_once = False, True
        note_phase(BETWEEN_STEPS)

    def _complete(self, slot: OptimizerGradients) -> Tensor:
        """Make this rank's sum of weighted gradients the mean, or the sum, over all ranks."""
        unit = 1.0 if self._unit is None else self._unit
        # Sent along: gradients of ranks that are in different steps, or exchange for different
        # optimizers, would add up in silence.
        tag = float(1 + slot.number + len(self._slots) * (self._place % 64))
        # A sum is not divided: the divisors of all ranks add up to 1.
        divisor = float(self._placement.dp_rank == 0) if slot.summed else slot.weight
        if self._placement.dp_size == 1:
            factor = ratio(unit, divisor, slot.parameters[0])
            for parameter in slot.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            sums = torch.stack([as_double(slot.loss, self._placement.device)])
        else:
            numbers = (slot.loss, tag)
            sums = self._exchange.mean(slot.parameters, unit, divisor, (*numbers, divisor))
            self._mixed_up += sums[1] != tag * self._placement.dp_size
            if not sums.is_cuda:
                self._check_order()
        weight = sums[2] if len(sums) > 2 else as_double(divisor, sums.device)
        loss = sums[0] / torch.where(weight > 0, weight, torch.ones_like(weight))
        self._hooks.change(slot.parameters, whole=slot.parts == 1)
        slot.close()
        self._hooks.announce(slot.parameters)
        return loss

    def _check_order(self) -> None:
        if bool(self._mixed_up):
            raise ModelError(
                f"up to step {self._state.step + 1} ranks called trainer.backward at the same "
                "time for different optimizers, steps or batches; every rank must make the same "
                "calls in the same order. A loop that leaves out, repeats or breaks off steps must "
                "decide by what all ranks see alike, such as the loss that trainer.backward "
                "returns",
                code="MGT606",
            )

    def _refuse_foreign(self, parameter: Tensor) -> None:
        if not self._own and self._inside:
            raise ModelError(_FOREIGN)

    # Moving the weights

    def _refuse_stranger(self, optimizer: Optimizer, *_: Any) -> None:
        """Called for every optimizer of the process that steps inside a block."""
        ours = [slot.optimizer for slot in self._slots]
        if self._moving or any(optimizer is one for one in ours):
            return
        # A wrapper, such as a SAM, shares its groups with the optimizer that it wraps.
        groups = {id(group) for one in ours for group in one.param_groups}
        held = {id(p) for slot in self._slots for p in slot.parameters}
        for group in optimizer.param_groups:
            if id(group) not in groups and any(id(p) in held for p in group["params"]):
                raise ModelError(
                    f"{type(optimizer).__name__}.step() would move parameters that belong to "
                    f"{' and '.join(type(one).__name__ for one in ours)} of manager.prepare, which "
                    "moves them too. Give prepare every optimizer, or change the one that it has: "
                    "its param_groups, its state.clear()"
                )

    def _before_move(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        (slot,) = chosen_slots(optimizer, self._slots)
        if not self._inside:
            raise ModelError(
                f"{type(optimizer).__name__}.step() was called outside `with trainer.step():`, "
                "where no step is counted, logged or saved; call it inside"
            )
        note_phase(OPTIMIZER)
        self._moving = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._finish(slot)
            return None

        def exchanged() -> Any:
            value = self._evaluate(closure, slot)
            self._finish(slot)
            return value

        return (args[0],), {**kwargs, "closure": exchanged}

    def _evaluate(self, closure: Callable[[], Any], slot: OptimizerGradients) -> Any:
        """Call a closure. Line searches on all ranks must see the same loss, that of all ranks."""
        self._closure_loss = torch.zeros((), device=self._placement.device)
        value = closure()
        found, self._closure_loss = self._closure_loss, None
        if not slot.due:
            raise ModelError(
                f"the closure of {type(slot.optimizer).__name__} did not call "
                "trainer.backward(loss, optimizer=...)"
            )
        return value if self._placement.dp_size == 1 else found

    def _finish(self, slot: OptimizerGradients) -> None:
        """Make gradients ready for the optimizer: complete, finite, clipped."""
        state, config = self._state, self._state.config
        if not slot.due:
            self._take_own_gradients(slot)
        if not self._share.last:
            raise ModelError(
                f"{type(slot.optimizer).__name__}.step() inside a micro-batch that is not the last "
                "of its step; leave it out (the last block moves), or set "
                "gradient_accumulation_steps=1"
            )
        if slot.open:
            self._complete(slot)
        for call in state.callbacks.on_optimizer:
            call()
        if self._nan_guard.skips(slot):
            slot.skipped = True
            for parameter in slot.parameters:
                parameter.grad = None  # every optimizer skips a parameter without a gradient
            return
        if config.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(slot.parameters, config.max_grad_norm)
            self._norm = norm if self._norm is None else self._norm
        if config.max_grad_value is not None:
            nn.utils.clip_grad_value_(slot.parameters, config.max_grad_value)

    def _take_own_gradients(self, slot: OptimizerGradients) -> None:
        """Let an optimizer move along gradients that the loop has set without a backward of ours,
        such as those of Reptile, if every rank has set the same."""
        grads = [p.grad for p in slot.find_parameters() if p.grad is not None]
        if not grads:
            raise ModelError(
                f"{type(slot.optimizer).__name__}.step() without trainer.backward(loss, "
                "optimizer=...) since its last step: there is nothing to move along"
            )
        sums = [value for grad in grads for value in (grad.sum(), grad.abs().sum())]
        found = self._placement.gather(torch.stack([value.abs().double() for value in sums]))
        if not bool((found == found[0]).all()):
            raise ModelError(
                f"{type(slot.optimizer).__name__}.step() without trainer.backward: p.grad was set "
                "by hand, and differs between ranks, which have not exchanged it. Call "
                "trainer.backward(loss, optimizer=...), or compute p.grad from what every rank has "
                "alike"
            )
        slot.used = True

    def _after_move(self, optimizer: Optimizer, *_: Any) -> None:
        (slot,) = chosen_slots(optimizer, self._slots)
        slot.due = self._moving = False
        note_phase(BETWEEN_STEPS)

    def look(self) -> None:
        """Raise if the latest steps were wrong on a GPU that nobody waited for."""
        self._check_order()
        self._nan_guard.look()


def _refuse_real_rows(batch: Any) -> None:
    """Raise if a batch of which this rank has no sample holds parts of another, of which it has
    some: the stand-in would replace all of it."""
    if any(one.count for one in map(share_of, tensors_of(batch)) if one is not None):
        raise ModelError(
            "trainer.step got parts of several batches, and one of them has fewer samples than "
            "there are ranks: this rank has none of it, and cannot tell which part to replace. "
            "Give trainer.step the loader's batch, and call manager.shard inside the block"
        )


def _zero_gradients(loss: Tensor, slots: Sequence[OptimizerGradients]) -> None:
    """Give the parameters that a loss of weight zero depends on a gradient of zero, as one process
    does that masks these samples: optimizers pass over what has none."""
    reached, waiting, seen = set(), [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))
            waiting += [following for following, _ in node.next_functions]
    for slot in slots:
        for parameter in slot.parameters:
            if parameter.grad is None and id(parameter) in reached:
                parameter.grad = torch.zeros_like(parameter)


class _LookBeforeSave(Callback):
    """Finds a NaN before it is saved."""

    watches_only = True

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def on_save_begin(self, run: Run) -> None:
        self._look()
