"""The training step. Trainers differ only in how a model is wrapped and its copies exchange.

One step, over all ranks and micro-batches, moves the weights along

    sum of w_i * grad l_i  /  sum of w_i

which is what one GPU computes on the whole global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import batch_count, share_of, to_device
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.data.order import Share, derive_seed, step_seed
from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.distributed.batchnorm import (
    Attendance,
    SyncBatchNorm,
    synchronise_batchnorm,
)
from multi_gpu_training.distributed.control import Boundary
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.progress_slot import (
    BACKWARD,
    HOOK,
    OPTIMIZER,
    OWN_CODE,
    note_count,
    note_phase,
    note_step,
)
from multi_gpu_training.distributed.replicas import check_replicas, check_same_model
from multi_gpu_training.errors import ModelError
from multi_gpu_training.training.callbacks import CallbackList
from multi_gpu_training.training.execution import StepExecution
from multi_gpu_training.training.finite import LOOK, FiniteGate
from multi_gpu_training.training.learning_rate import Rates, Schedule
from multi_gpu_training.training.loss import LossFn, Pairs
from multi_gpu_training.training.memory import MemoryRecovery, is_out_of_memory
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.precision import Precision
from multi_gpu_training.training.speed import choose_speed, fuse, lay_out_channels_last
from multi_gpu_training.training.step import MicroResult, StepModule, StepResult
from multi_gpu_training.training.weight_watch import WeightWatch

# Changes a training batch on the device: augment(batch, random) -> batch.
Augment = Callable[[Any, SampleRandom], Any]


class MultiGPUTrainer(ABC):
    """Accumulates micro-batches and moves the weights. Every rank must call `train_step` the
    same number of times."""

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self.precision = Precision(config, placement.device, bool(config.use_mixed_precision))
        self.metrics = MetricsCollector()
        self.attendance = Attendance()
        self.step = 0
        self.epoch = 0
        self.position = 0
        self.optimizer: Optimizer
        self.schedule: Schedule
        self.model: nn.Module
        self.wrapped: nn.Module
        self.loader: Loader | None = None
        self.augment: Augment | None = None
        self.boundary = Boundary()  # before each step, on every rank
        self.execution = StepExecution(self)
        self.memory = MemoryRecovery(self)
        self.finite = FiniteGate(self)
        self.weight_watch = WeightWatch(self)
        self._micro = 0
        self._given = 0  # micro-batches that this step was given, before any was cut
        self._counted: bool | None = None
        self._settled = False
        self._checked = False
        self._stepping = False
        self._computed: tuple[Tensor, Tensor | None, Pairs, Share]
        self._noise_base: int | None = None
        self._epoch_key = EpochKey(placement.device)
        self.callbacks = CallbackList()
        self.noise_stream = 0  # another one draws other noise for the same steps
        self.transform: Callable[[Any], Any] | None = None  # of a batch, right before the loss

    # What a kind of trainer must say

    @abstractmethod
    def wrap(self, module: StepModule) -> nn.Module:
        """The module that computes a micro-batch on all its copies."""

    @property
    def replicas(self) -> int:
        """Copies of the model that share a global batch."""
        return self.placement.dp_size

    def exchange(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a backward: ranks talk only on the last micro-batch of a step."""
        return nullcontext()

    def forward(self, batch: Any, count: int, window_count: int, ranks: int) -> MicroResult:
        """Compute a micro-batch on all copies."""
        return self.step_module.forward(batch, count, window_count, ranks)

    def settle(self, batch: Any, share: Share) -> None:
        """Called once, before the first step of this process."""
        return

    def unwrap(self) -> None:
        """Let go of the wrapper, whose group is about to be broken."""
        self.wrapped = self.step_module

    def rewrap(self) -> None:
        """Wrap anew, for a group that was made anew."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.wrapped = self.wrap(self.step_module)
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        self._settled = False

    # Building

    def build(self, model: nn.Module, loss_fn: LossFn) -> nn.Module:
        """Put the model onto the device, check it, and wrap it for training."""
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                f"{type(model).__name__} has no parameter with requires_grad=True; unfreeze some"
            )
        device = self.placement.device
        self.execution.enter_stream()
        model.to(device)
        check_same_model(model, self.placement)
        if self.config.sync_bn and self.placement.dp_size > 1:
            model = synchronise_batchnorm(model, self.placement, self.attendance)
        self.speed = choose_speed(self.config, model, device)
        if self.speed.channels_last:
            lay_out_channels_last(model)
        self.precision = Precision(self.config, device, self.speed.mixed_precision)
        self.model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.step_module = StepModule(model, loss_fn, self.precision)
        self.wrapped = self.wrap(self.step_module)
        if self.placement.breakable is not None:
            self.placement.on_broken = self.memory.join
        return model

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Train with this optimizer, made as fast as the config allows."""
        self.optimizer = optimizer
        if self.speed.fused_optimizer:
            fuse(optimizer)
        optimizer.register_step_pre_hook(self.guard)
        self.rates = Rates(optimizer, self.placement.device)
        self.gate_note = self.finite.attach(optimizer)

    # The step

    def train_step(self, batch: Any) -> StepResult:
        """Train on one micro-batch; the last one of a global batch moves the weights.

        Batches of the manager's loader know their place. For any other batch, the samples on
        all ranks are counted, and every `gradient_accumulation_steps` calls form a step.
        """
        note_step(self.step + 1, begun=True)
        share = share_of(batch)
        if self._given == 0 if share is None else share.first:
            self.boundary.passed += 1
            if self.boundary.held:
                self.boundary.halt()
            if not self.memory.retrying:  # a step that is computed again has begun before
                for call in self.callbacks.on_step_begin:
                    call(self.step + 1)
        else:
            note_count(self._micro)
        ours = share is not None
        memory = self.memory
        memory.busy = True  # an exchange that breaks is the step's to mend
        short: bool | None  # whether it was this rank's memory that ended an attempt
        try:
            given = batch
            if share is None:
                given = to_device(batch, self.placement.device)
                share = self._share_of_own_batch(given)
                if not share.last:
                    memory.remember(given)
            if not self._settled:
                self.settle(opened(given), share)
                self._settled = True
            samples = self._samples(given, share) if self.augment is not None else None
            if self.execution.active:
                result = self.execution.run(given, samples, share, ours)
            elif memory.parts > 1:
                result = memory.run_parts(given, samples, share)
            else:
                result = self.eager_step(given, samples, share)
            self._given = 0 if share.last else self._given + 1
            short = None
        except RuntimeError as error:
            if memory.retrying or not memory.concerns(error):
                raise
            short = is_out_of_memory(error)
        finally:
            memory.busy = False
        if short is not None:
            # Out here nothing holds the frames of the error any more, and what filled the memory.
            given = samples = None
            result = memory.retry(batch, short)
        if result.moved and self.callbacks.on_step_end and not memory.retrying:
            note_phase(HOOK)
            for call in self.callbacks.on_step_end:
                call(result)
            note_phase(OWN_CODE)
        return result

    def eager_step(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """One micro-batch, operation by operation."""
        if share.first:
            self.memory.begin_step()
        self.seed_noise()
        self.rates.send()
        result, norm = self.compute(batch, samples, share)
        if self.finite.skipped:
            self.finite.skipped = False
        else:
            self._note(result, share)
        return self.advance(result.mean, norm, share)

    def compute(
        self, batch: Any, samples: Tensor | None, share: Share
    ) -> tuple[MicroResult, Tensor | None]:
        """Everything that a micro-batch asks of the device, and nothing else: this is what a
        CUDA graph holds. The last micro-batch of a step moves the weights."""
        self.attendance.present = share.count > 0  # until backward is done: it may recompute
        finite, callbacks = self.finite, self.callbacks
        if share.first and finite.spares:
            finite.keep_buffers()
        try:
            with self.exchange(share.last):
                for call in callbacks.on_forward:
                    call(share)
                if share.count == 0:
                    result = self._absent(share)
                else:
                    ranks = self.placement.dp_size
                    batch = self._prepared(batch, samples)
                    result = self.forward(batch, share.count, share.window_count, ranks)
                self._computed = result.mean, result.weight, result.metrics, share
                if finite.mode == "read":
                    finite.losses.append((result.mean, share))
                scaled = self.precision.scaler.scale(result.scaled)
                for call in callbacks.on_backward:
                    call(scaled)
                if callbacks.on_exchange and scaled.requires_grad:
                    scaled.register_hook(self._announce_exchange)
                # The tally is added unscaled: it is a weight, not a gradient.
                note_phase(BACKWARD)
                (scaled if result.tally is None else scaled + result.tally).backward()
            norm = self._move_weights(share) if share.last else None
        finally:
            for call in callbacks.on_micro_batch_end:
                call()
        return finite.spare(result, share) if finite.spares else result, norm

    def _announce_exchange(self, grad: Tensor) -> None:
        """The first thing that runs in a backward: what it queues runs before DDP waits for the
        other ranks, once this rank's own gradients are computed."""
        engine: Any = torch.autograd.Variable._execution_engine
        for call in self.callbacks.on_exchange:
            engine.queue_callback(call)

    def advance(
        self, loss: Tensor, norm: Tensor | None, share: Share, shared: bool = False
    ) -> StepResult:
        """Count a micro-batch that was computed; after the last one of a step, the step.

        shared: the next micro-batch writes its loss to the same memory.
        """
        note_phase(OWN_CODE)
        self._micro += 1
        if not share.last:
            return StepResult(loss, self.step, False, None, shared)
        self._micro = 0
        self.step += 1
        self.epoch, self.position = share.epoch, share.position + 1
        self.schedule.after_step(self.step)
        if self.step % LOOK == 0:
            self.finite.look()
        return StepResult(loss, self.step, True, norm, shared)

    def finish_step(self) -> StepResult:
        """Count a step that the other ranks have finished: its weights were taken over."""
        mean, weight, metrics, share = self._computed
        self._note(MicroResult(mean, None, mean, weight, metrics), share)
        return self.advance(mean, None, share)

    def _move_weights(self, share: Share) -> Tensor | None:
        note_phase(OPTIMIZER)
        for call in self.callbacks.on_optimizer:
            call()
        if not self._checked:
            self._check_gradients()
            self._checked = True
        if self._counted is not False or self.config.compress_gradients:
            # Also where this rank saw no sample and cannot know: then it is 1, or the others'.
            total = self._total_weight()
            if total is not None:
                nominal = max(1, share.window_count)
                ones = torch.ones_like(total)
                self._scale_gradients(torch.where(total > 0, nominal / total, ones))
        finite, scaler = self.finite, self.precision.scaler
        if finite.mode == "read":
            if finite.finds():
                finite.refuse()
                return None
            finite.losses.clear()
        norm = None
        if self.config.max_grad_norm is not None:
            scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        if finite.mode == "gate":
            finite.close(norm)
        self._stepping = True
        with self.rates:
            scaler.step(self.optimizer)
        self._stepping = False
        scaler.update()
        self.drop_gradients()
        return norm

    def forget_step(self) -> None:
        """Give up the step under way, and everything that was measured since the last log."""
        self.drop_gradients()
        self._micro = self._given = 0
        self.metrics.reset()
        self.finite.reset()

    def pass_over(self, share: Share | None) -> None:
        """Go past a micro-batch without training on it; after the last one, past the step."""
        if share is not None and share.last:
            self.epoch, self.position = share.epoch, share.position + 1

    def at_step_boundary(self) -> bool:
        """Whether no step is under way."""
        return self._micro == 0

    def check_replicas(self) -> None:
        """Raise if a parameter differs in any bit between ranks. Collective."""
        check_replicas(self.model, self.placement, self.step)

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, where `broadcast_buffers` asks for it."""
        if self.config.broadcast_buffers:
            self.placement.broadcast_tensors(self.model.buffers())

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self.step_module.tally.grad = None

    def _prepared(self, batch: Any, samples: Tensor | None) -> Any:
        """The batch as the loss function gets it: gathered, and augmented on the device."""
        batch = opened(batch)
        if self.augment is not None and samples is not None:
            with torch.no_grad():
                batch = self.augment(batch, SampleRandom(samples, self._epoch_key.tensor))
        return batch if self.transform is None else self.transform(batch)

    def _samples(self, batch: Any, share: Share) -> Tensor:
        """The numbers of a batch's samples, from which their randomness comes."""
        if not share.sample_seed:  # a batch of the user's own: keyed by its place
            self._epoch_key.set(derive_seed(self.config.seed, self.step, self._micro))
            start = self.placement.dp_rank * share.count
            return torch.arange(start, start + share.count, device=self.placement.device)
        self._epoch_key.set(share.sample_seed)
        if isinstance(batch, ResidentBatch):
            return batch.index
        numbers = torch.tensor(share.indices, dtype=torch.int64)
        return numbers.to(self.placement.device, non_blocking=True)

    def _absent(self, share: Share) -> MicroResult:
        """This rank has no sample in this micro-batch, but the others need it to take part."""
        needs_forward = self.config.find_unused_parameters or any(
            isinstance(m, SyncBatchNorm) for m in self.model.modules()
        )
        if not needs_forward or self.loader is None:
            return self.forward(None, 0, share.window_count, 1)
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        stand_in = self.loader.stand_in(share)
        result = self.forward(stand_in, 0, share.window_count, 1)
        if not self.config.sync_bn:
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        return result._replace(scaled=nothing(result), tally=self.step_module.tally * 0.0)

    def read_metrics(self) -> MetricsCollector:
        """What was collected since the last reset, captured steps included."""
        self.execution.collect(self.metrics)
        return self.metrics

    def _note(self, result: MicroResult, share: Share) -> None:
        if share.count:
            self._counted = result.weight is not None
            weight = share.count if result.weight is None else result.weight
            self.metrics.add_mean(result.mean, weight, result.metrics)

    def seed_noise(self) -> None:
        """Dropout and other noise depend on (seed, step, micro-batch, rank), not on history."""
        if self._noise_base is None:
            rank = self.placement.dp_rank
            self._noise_base = derive_seed(self.config.seed, rank, self.noise_stream)
        seed = step_seed(self._noise_base, self.step, self._micro)
        torch.default_generator.manual_seed(seed)
        if self.placement.device.type == "cuda":
            torch.cuda.default_generators[self.placement.device.index or 0].manual_seed(seed)

    def _total_weight(self) -> Tensor | None:
        """Summed weight of the step over ranks, divided as the gradients are; None where every
        micro-batch was scaled by its count."""
        grad = self.step_module.tally.grad
        if grad is None:
            return None
        if self.config.compress_gradients:
            # Too large for the 16 bits that gradients are sent in: it goes by itself.
            grad = self.placement.sum(grad) / self.placement.dp_size
        return grad

    def _share_of_own_batch(self, batch: Any) -> Share:
        last = self._given + 1 >= self.config.gradient_accumulation_steps
        return Share(
            epoch=self.epoch,
            position=self.position,
            indices=(),
            count=batch_count(batch),
            window_count=0,  # unknown here: the ranks learn it with the gradients
            first=self._given == 0,
            last=last,
            key=self.step,
        )

    def _scale_gradients(self, factor: Tensor) -> None:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        for dtype in {grad.dtype for grad in grads}:
            dense = [grad for grad in grads if grad.dtype == dtype and not grad.is_sparse]
            if dense:
                torch._foreach_mul_(dense, factor.to(dtype))
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor.to(grad.dtype))

    def _check_gradients(self) -> None:
        if self.config.find_unused_parameters:
            return
        missing = [
            name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None
        ]
        if missing:
            raise ModelError(
                f"{len(missing)} parameters got no gradient from the loss: {', '.join(missing[:8])}"
                f"{' ...' if len(missing) > 8 else ''}; use them in the loss, freeze them with "
                "requires_grad_(False), or set find_unused_parameters=true"
            )

    def guard(self, optimizer: Optimizer, *_: Any) -> None:
        """Before every step of the optimizer: a step past the trainer would move this rank's
        weights along its own gradient alone."""
        if self.placement.dp_size > 1 and not self._stepping:
            raise ModelError(
                "optimizer.step() was called outside the trainer, where ranks do not exchange "
                "gradients; train with manager.trainer.train_step(batch)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "scaler": self.precision.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        note_step(self.step)
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.precision.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])
        if "memory" in state:
            self.memory.load_state_dict(state["memory"])


class EpochKey:
    """What an epoch's randomness comes from, on the device: captured steps read it anew."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.int64, device=device)
        self._value = 0

    def set(self, value: int) -> None:
        if value != self._value:
            self._value = value
            self.tensor.fill_(value)


def opened(batch: Any) -> Any:
    """The batch itself, gathered where that was not done yet."""
    return batch.gather(batch.index) if isinstance(batch, ResidentBatch) else batch


class SingleDeviceTrainer(MultiGPUTrainer):
    """One process, one device."""

    def wrap(self, module: StepModule) -> nn.Module:
        return module


def nothing(result: MicroResult) -> Tensor:
    """The result with every gradient zero. Selected, not multiplied: the loss may be NaN."""
    total = result.scaled if result.tally is None else result.scaled + result.tally
    never = torch.zeros((), dtype=torch.bool, device=total.device)
    return torch.where(never, total, torch.zeros_like(total))
