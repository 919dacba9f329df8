"""Trainers: they take micro-batches and move the weights. They differ only in their strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.optim import Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import share_of, to_device
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.batchnorm import synchronise_batchnorm
from multi_gpu_training.distributed.control import Boundary
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.progress_slot import (
    HOOK,
    OWN_CODE,
    note_count,
    note_phase,
    note_step,
)
from multi_gpu_training.distributed.replicas import check_same_model
from multi_gpu_training.errors import ModelError
from multi_gpu_training.training.callbacks import CallbackList
from multi_gpu_training.training.fast_defaults import (
    choose_fast_defaults,
    fuse,
    lay_out_channels_last,
)
from multi_gpu_training.training.learning_rate import Rates, Schedule
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.nan_guard import LOOK, NanGuard
from multi_gpu_training.training.oom import OomRecovery, is_out_of_memory
from multi_gpu_training.training.precision import Precision
from multi_gpu_training.training.runner import Runner
from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.runner.selection import StepExecution
from multi_gpu_training.training.state_rollback import StepStart
from multi_gpu_training.training.step import StepModule, StepResult
from multi_gpu_training.training.step_state import Augment, StepState, materialize
from multi_gpu_training.training.strategy import SingleDevice, Strategy
from multi_gpu_training.training.strategy.data_parallel_strategy import DataParallelStrategy
from multi_gpu_training.training.strategy.ddp_strategy import DDPStrategy


def _of_state(name: str) -> Any:
    """An attribute of the trainer that lies in its StepState."""

    def read(self: MultiGPUTrainer) -> Any:
        return getattr(self.state, name)

    def write(self: MultiGPUTrainer, value: Any) -> None:
        setattr(self.state, name, value)

    return property(read, write)


class MultiGPUTrainer(ABC):
    """Accumulates micro-batches and moves the weights. Every rank must call `train_step` the
    same number of times.

    state: where the training stands. strategy: how the model is replicated. execution: how steps
    run. nan_guard, oom: what happens to a step with a NaN, or without memory.
    """

    step: int = _of_state("step")
    epoch: int = _of_state("epoch")
    position: int = _of_state("position")
    model: nn.Module = _of_state("model")
    step_module: StepModule = _of_state("step_module")
    optimizer: Optimizer = _of_state("optimizer")
    schedule: Schedule = _of_state("schedule")
    rates: Rates = _of_state("rates")
    precision: Precision = _of_state("precision")
    metrics: MetricsCollector = _of_state("metrics")
    callbacks: CallbackList = _of_state("callbacks")
    loader: Loader | None = _of_state("loader")
    augment: Augment | None = _of_state("augment")
    transform: Any = _of_state("transform")  # of a batch, right before the loss
    noise_stream: int = _of_state("noise_stream")  # another number draws other noise

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self.strategy = self.make_strategy()
        self.state = StepState(config, placement, self.strategy)
        self.attendance = self.state.attendance
        start = StepStart(self.state)
        self.nan_guard = NanGuard(self.state, start)
        self.eager = EagerRunner(self.state, self.nan_guard, start)
        self.execution = StepExecution(self.state, self.eager, self.nan_guard)
        self.oom = OomRecovery(self.state, self.eager)
        self.oom.give_up_recording = self._give_up_recording
        self.boundary = Boundary()  # before each step, on every rank
        self.gate_note: str | None = None  # what looking for NaN costs, if anything

    @abstractmethod
    def make_strategy(self) -> Strategy:
        """How the model is replicated: all that kinds of trainers differ in."""

    @property
    def wrapped(self) -> nn.Module:
        """The module that computes a micro-batch on all copies of the model."""
        return self.strategy.wrapped

    @property
    def replicas(self) -> int:
        """Copies of the model that share a global batch."""
        return self.strategy.replicas

    # Building

    def build(self, model: nn.Module, loss_fn: LossFn) -> nn.Module:
        """Put the model onto the device, check it, and wrap it for training."""
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                f"{type(model).__name__} has no parameter with requires_grad=True; unfreeze some"
            )
        state, device = self.state, self.placement.device
        self.execution.enter_stream()
        model.to(device)
        check_same_model(model, self.placement)
        if self.config.sync_bn and self.placement.dp_size > 1:
            model = synchronise_batchnorm(model, self.placement, self.attendance)
        self.fast_defaults = choose_fast_defaults(self.config, model, device)
        if self.fast_defaults.channels_last:
            lay_out_channels_last(model)
        state.precision = Precision(self.config, device, self.fast_defaults.mixed_precision)
        state.model = model
        state.find_parameters()
        state.step_module = StepModule(model, loss_fn, state.precision)
        self.strategy.wrap(state.step_module)
        if self.placement.breakable is not None:
            self.placement.on_broken = self.oom.join
        return model

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Train with this optimizer, made as fast as the config allows."""
        self.state.optimizer = optimizer
        if self.fast_defaults.fused_optimizer:
            fuse(optimizer, sparse=bool(self.step_module.sparse))
        optimizer.register_step_pre_hook(self._refuse_foreign_step)
        self.state.find_parameters()
        self.state.rates = Rates(optimizer, self.placement.device)
        self.gate_note = self.nan_guard.attach(optimizer)

    def _refuse_foreign_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Before every step of the optimizer: a step past the trainer would move this rank's
        weights along its own gradient alone."""
        if self.placement.dp_size > 1 and not self.state.moving:
            raise ModelError(
                "optimizer.step() was called outside the trainer, where ranks do not exchange "
                "gradients; train with manager.trainer.train_step(batch)"
            )

    # The step

    def train_step(self, batch: Any) -> StepResult:
        """Train on one micro-batch; the last one of a global batch moves the weights.

        Batches of the manager's loader know their place. For any other batch, the samples on
        all ranks are counted, and every `gradient_accumulation_steps` calls form a step.
        """
        state, oom, execution = self.state, self.oom, self.execution
        note_step(state.step + 1, begun=True)
        share = share_of(batch)
        if state.given == 0 if share is None else share.first:
            self.boundary.passed += 1
            if self.boundary.held:
                self.boundary.halt()
            if not oom.retrying:  # a step that is computed again has begun before
                for call in state.callbacks.on_step_begin:
                    call(state.step + 1)
            if state.parameters_changed():
                execution.take_new_parameters()
        else:
            note_count(state.micro)
        oom.busy = True  # an exchange that breaks is the step's to mend
        short: bool | None  # whether it was this rank's memory that ended an attempt
        try:
            given = batch
            if share is None:
                given = to_device(batch, self.placement.device)
                share = state.own_share(given)
                if not share.last:
                    oom.remember(given)
            if not self.strategy.settled:
                self.strategy.settle(materialize(given), share, state.loader)
            samples = None if state.augment is None else state.sample_numbers(given, share)
            runner: Runner = execution if execution.active else oom if oom.parts > 1 else self.eager
            result = runner.run(given, samples, share)
            state.given = 0 if share.last else state.given + 1
            short = None
        except RuntimeError as error:
            if oom.retrying:
                raise
            if not oom.concerns(error):
                state.abandon_step()  # whatever the caller does next, it begins another one
                raise
            short = is_out_of_memory(error)
        except Exception:
            if not oom.retrying:
                state.abandon_step()
            raise
        finally:
            oom.busy = False
        if short is not None:
            # Out here, nothing holds the frames of the error and what filled the memory.
            given = samples = None
            result = oom.retry(batch, short, self.train_step)
        if result.moved and not oom.retrying:
            if state.step % LOOK == 0:
                self.nan_guard.look()
            if state.callbacks.on_step_end:
                note_phase(HOOK)
                for call in state.callbacks.on_step_end:
                    call(result)
                note_phase(OWN_CODE)
        return result

    def _give_up_recording(self, reason: str) -> None:
        if self.execution.active:
            self.execution.give_up(reason)

    def forget_step(self) -> None:
        """Give up the step under way, and everything that was measured since the last log."""
        self.state.abandon_step()
        self.metrics.reset()
        self.nan_guard.reset()

    def pass_over(self, share: Share | None) -> None:
        """Go past a micro-batch without training on it; after the last one, past the step."""
        if share is not None and share.last:
            self.state.epoch, self.state.position = share.epoch, share.position + 1

    def at_step_boundary(self) -> bool:
        """Whether no step is under way."""
        return self.state.micro == 0

    def check_replicas(self) -> None:
        """Raise if a parameter differs in any bit between ranks. Collective."""
        self.strategy.check_replicas(self.state.step)

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, where `broadcast_buffers` asks for it."""
        self.strategy.sync_buffers()

    def full_state(self) -> dict[str, Any]:
        """The state_dict of the whole model, on every rank. Every rank must call it."""
        return self.strategy.full_state()

    def read_metrics(self) -> MetricsCollector:
        """What was collected since the last reset, recorded steps included."""
        self.execution.collect(self.metrics)
        return self.metrics

    # Saved with a run

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "scaler": self.precision.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "memory": self.oom.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        note_step(self.step)
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.precision.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])
        if "memory" in state:
            self.oom.load_state_dict(state["memory"])


class SingleDeviceTrainer(MultiGPUTrainer):
    """One process, one device."""

    def make_strategy(self) -> Strategy:
        return SingleDevice(self.config, self.placement)


class DataParallelTrainer(MultiGPUTrainer):
    """One process, several GPUs."""

    def make_strategy(self) -> Strategy:
        return DataParallelStrategy(self.config, self.placement)


class DistributedDataParallelTrainer(MultiGPUTrainer):
    """One process per GPU."""

    def make_strategy(self) -> Strategy:
        return DDPStrategy(self.config, self.placement)
