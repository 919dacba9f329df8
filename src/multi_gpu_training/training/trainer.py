"""Trainers take micro-batches and move the weights. They differ only in their strategy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.accelerator import refuse_float64
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.batch import carry, share_of, to_device
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.batchnorm import synchronise_batchnorm
from multi_gpu_training.distributed.control import Boundary
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.progress_slot import (
    BETWEEN_STEPS,
    CALLBACK,
    note_count,
    note_phase,
    note_step,
)
from multi_gpu_training.distributed.replicas import (
    check_same_model,
    refuse_layers_of_one_batch,
)
from multi_gpu_training.errors import (
    NAN_OF_A_PART,
    ConfigError,
    ModelError,
    NonFiniteLossError,
)
from multi_gpu_training.torch_internals import complete_optimizer
from multi_gpu_training.training.callbacks import CallbackList
from multi_gpu_training.training.fast_defaults import (
    choose_fast_defaults,
    fuse,
    lay_out_channels_last,
)
from multi_gpu_training.training.learning_rate import Rates
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.manual_optimization import ManualTrainer
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.nan_guard import LOOK, NanGuard
from multi_gpu_training.training.oom import OomRecovery, is_out_of_memory
from multi_gpu_training.training.optimizer import check_several
from multi_gpu_training.training.precision import Precision
from multi_gpu_training.training.runner import Runner
from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.runner.selection import StepExecution
from multi_gpu_training.training.state_rollback import StepStart
from multi_gpu_training.training.step import StepModule, StepResult
from multi_gpu_training.training.step_state import StepState
from multi_gpu_training.training.strategy import SingleDevice, Strategy
from multi_gpu_training.training.strategy.choice import choose_mode
from multi_gpu_training.training.strategy.data_parallel_strategy import DataParallelStrategy
from multi_gpu_training.training.strategy.ddp_strategy import DDPStrategy
from multi_gpu_training.training.strategy.fsdp_strategy import FSDPStrategy


class MultiGPUTrainer(ABC):
    """Accumulates micro-batches and updates the weights. All ranks must call `train_step` the same
    number of times.

    state: how far training has come. strategy: how the model is replicated. execution: how steps
    run. nan_guard, oom: handle a step with a NaN, or one that runs out of memory.

    say: prints a line. told: called with (kind, action, text, facts) after the trainer has handled
    a fault itself. record: writes an event. snapshot_other_state: copies what steps change outside
    the trainer and returns a function that restores it; used to undo recorded steps. retract:
    called with the last good step if recorded steps after it were wrong and may have been saved.
    """

    def __init__(
        self,
        config: MultiGPUConfig,
        placement: Placement,
        *,
        callbacks: CallbackList | None = None,
        say: Callable[[str], None] = lambda _: None,
        told: Callable[[str, str, str, dict[str, Any]], None] = lambda *_: None,
        snapshot_other_state: Callable[[], Callable[[], None] | None] = lambda: None,
        record: Callable[..., None] = lambda *_, **__: None,
        retract: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.strategy = self.make_strategy()
        state = self.state = StepState(config, placement, self.strategy)
        if callbacks is not None:
            state.callbacks = callbacks
        start = StepStart(state)
        self._nonfinite = partial(told, "nonfinite")
        self.nan_guard = NanGuard(state, start, self._nonfinite)
        self.eager = EagerRunner(state, self.nan_guard, start)
        self.execution = StepExecution(
            state, self.eager, self.nan_guard, say, snapshot_other_state, record, retract
        )
        self.oom = OomRecovery(
            state, self.eager, partial(told, "out_of_memory"), self.give_up_recording
        )
        self._boundary = Boundary()
        self._say = say
        self._ahead: tuple[int, dict[str, Any]] | None = None  # a step, and the model's modes then

    @abstractmethod
    def make_strategy(self) -> Strategy:
        """How the model is replicated: the only difference between kinds of trainers."""

    @property
    def wrapped(self) -> nn.Module:
        """The module that computes a micro-batch on every copy of the model."""
        return self.strategy.wrapped

    # Progress, for your own loop

    @property
    def step(self) -> int:
        """Optimizer steps so far, including those before a resume."""
        return self.state.step

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def model(self) -> nn.Module:
        return self.state.model

    @property
    def optimizer(self) -> Optimizer:
        return self.state.optimizer

    # Building

    def build(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        boundary: Boundary | None = None,
        manual: bool = False,
    ) -> nn.Module:
        """Move the model to the device, check it, and wrap it for training. `boundary` decides
        before each step whether the run continues. manual: the user's loop calls backward, so
        the model stays unwrapped."""
        self._boundary = boundary or self._boundary
        if manual:
            self._expect_own_backward()
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                f"{type(model).__name__} has no parameter with requires_grad=True; unfreeze some"
            )
        if self.config.chooses_mode:
            self._choose_mode(model)
        state, device = self.state, self.placement.device
        refuse_float64(model, device)
        self.execution.enter_stream()
        # Before anything is compared or wrapped: replicas are made of what is on the device.
        self.strategy.place(model)
        check_same_model(model, self.placement)
        refuse_layers_of_one_batch(model, self.placement)
        if manual:
            self._start_from_rank_0(model)
        if self.placement.dp_size > 1:
            model = synchronise_batchnorm(model, self.placement, not self.config.sync_bn)
        self.fast_defaults = choose_fast_defaults(self.config, model, device)
        if self.fast_defaults.channels_last:
            lay_out_channels_last(model)
        state.precision = Precision(self.config, device, self.fast_defaults.mixed_precision)
        state.model = model
        state.step_module = StepModule(model, loss_fn, state.precision)
        state.find_parameters()
        state.modes.begin(model)
        self.strategy.wrap(state.step_module)
        if self.placement.breakable is not None and not manual:
            self.placement.on_broken = self.oom.join
        return model

    def train_beside(self, beside: nn.Module) -> None:
        """Train parameters of the loss like the model's. Call this before `take_optimizer`."""
        refuse_float64(beside, self.placement.device)
        beside.to(self.placement.device)
        check_same_model(beside, self.placement)
        self._start_from_rank_0(beside)
        if self.placement.dp_size > 1:
            synchronise_batchnorm(beside, self.placement, not self.config.sync_bn)
        self.strategy.train_beside(beside)

    def _choose_mode(self, model: nn.Module) -> None:
        """Resolve training_mode=auto now that the model is known. Collective."""
        mode, why = choose_mode(model, self.placement)
        self._say(why)
        self.config.training_mode = mode
        self.config.check()  # refuses what that mode cannot do
        kinds = {TrainingMode.SINGLE: SingleDevice, TrainingMode.FULLY_SHARDED: FSDPStrategy}
        chosen = kinds.get(mode, DDPStrategy)(self.config, self.placement)
        self.strategy = self.state.strategy = chosen

    def _start_from_rank_0(self, model: nn.Module) -> None:
        """Give every rank the weights of rank 0, as DDP would, so scripts need not seed."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                sent = tensor.detach().contiguous()
                self.placement.broadcast_tensors([sent])
                tensor.copy_(sent)

    def _expect_own_backward(self) -> None:
        """Leave the model unwrapped: `ManualTrainer` decides when ranks exchange gradients."""
        if self.config.chooses_mode:
            self.config.training_mode = TrainingMode.DISTRIBUTED_DATA_PARALLEL
        mode = self.config.training_mode
        if mode not in (TrainingMode.SINGLE, TrainingMode.DISTRIBUTED_DATA_PARALLEL):
            raise ConfigError(
                f"training_mode={mode.value} computes inside its own wrapper, and manager.prepare "
                "leaves forward and backward to your loop; use distributed_data_parallel"
            )
        asked = self.config.step_execution
        if asked in ("graph", "compile"):
            raise ConfigError(
                f"step_execution={asked}: steps with your own backward run operation by operation; "
                "leave it at auto, and compile your modules yourself (torch.compile)"
            )
        self.config.step_execution = "eager"
        self.strategy = self.state.strategy = SingleDevice(self.config, self.placement)
        # `train_step` exchanges gradients through the strategy, which has no wrapper here.
        self.eager = RefusingRunner(self.state, self.nan_guard, StepStart(self.state))

    def take_optimizers(
        self, optimizers: Sequence[Optimizer], after_step: Callable[[], None]
    ) -> ManualTrainer:
        """Train with these optimizers; the user calls backward. `after_step` runs between steps."""
        if self.state.precision.scaler.is_enabled():
            raise ConfigError(
                "fp16 needs its losses scaled, which your own backward does not do; use "
                "mixed_precision_dtype=bf16, or use_mixed_precision=false"
            )
        check_several(optimizers, self.config)
        self.state.optimizer = optimizers[0]
        self.state.find_parameters()
        self.state.rates = Rates(optimizers[0], self.placement.device)
        return ManualTrainer(self.state, optimizers, self._boundary, after_step, self._nonfinite)

    def take_optimizer(self, optimizer: Optimizer) -> str | None:
        """Train with this optimizer, made as fast as the config allows. Returns a line about what
        the NaN check costs with it, if anything."""
        self.strategy.check_optimizer(optimizer)
        self.state.optimizer = optimizer
        complete_optimizer(optimizer)
        if self.fast_defaults.fused_optimizer:
            fuse(optimizer, sparse=bool(self.state.step_module.sparse))
        # A user used to plain loops may still call optimizer.step().
        optimizer.register_step_pre_hook(self._refuse_foreign_step)
        self.state.find_parameters()
        self.eager.take_hooks()
        self.state.rates = Rates(optimizer, self.placement.device)
        return self.nan_guard.attach(optimizer)

    def _refuse_foreign_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Runs before every optimizer step: one that bypasses the trainer would move this rank's
        weights along its local gradient only."""
        if self.placement.dp_size > 1 and not self.state.moving:
            raise ModelError(
                "optimizer.step() was called outside the trainer, where ranks do not exchange "
                "gradients; train with manager.trainer.train_step(batch)"
            )

    # The step

    def train_step(self, batch: Any) -> StepResult:
        """Train on one micro-batch. The last one of a global batch updates the weights.

        Batches from the manager's loader know their place in the global batch, even if you unpack,
        move or change them. For any other batch, the samples on all ranks are counted, and
        `gradient_accumulation_steps` calls make a step.
        """
        state, oom, execution = self.state, self.oom, self.execution
        note_step(state.step + 1, begun=True)
        batch, share = self._with_share(batch)
        begins = state.calls_in_step == 0 if share is None else share.first
        if begins:
            self._begin_step()
        else:
            note_count(state.micro)
        oom.busy = True  # the step itself repairs a broken exchange
        # None: the attempt succeeded. True: this rank ran out of memory. False: another one did.
        short: bool | None
        try:
            placed = batch
            if share is None or share.changed:
                placed = to_device(batch, self.placement.device)
                share = state.own_share(placed) if share is None else share
                placed = carry(placed, share) if share.changed else placed
                state.expect_any_label()
                # The last one is still at hand when the step fails.
                if not share.last:
                    oom.remember(placed)
            if not self.strategy.settled:
                self.strategy.settle(partial(state.settling_batch, placed, share))
            samples = None if state.augment is None else state.sample_numbers(placed, share)
            runner: Runner = execution if execution.active else oom if oom.parts > 1 else self.eager
            result = runner.run(placed, samples, share)
            if state.loader is not None and (share.window_count or share.changed):
                state.loader.trained = share
            state.calls_in_step = 0 if share.last else state.calls_in_step + 1
            short = None
        except RuntimeError as error:
            if oom.retrying:
                raise
            if not oom.concerns(error):
                state.abandon_step()  # the next call begins another step, whatever the caller does
                told = self.strategy.explained(error)
                if told is None:
                    raise
                raise told from error
            short = is_out_of_memory(error)
        except Exception:
            if not oom.retrying:
                state.abandon_step()
            raise
        finally:
            oom.busy = False
        if short is not None:
            # Out here, nothing holds the error's frames and the tensors that filled the memory.
            placed = samples = None
            result = oom.retry(batch, short, self.train_step)
        if result.moved and not oom.retrying:
            if state.step % LOOK == 0:
                self.nan_guard.look()
            if state.callbacks.on_step_end:
                note_phase(CALLBACK)
                for call in state.callbacks.on_step_end:
                    call(result)
                note_phase(BETWEEN_STEPS)
        return result

    def _with_share(self, batch: Any) -> tuple[Any, Share | None]:
        """The batch, and which part of which step it is; None if the user's loop made it."""
        state, share = self.state, share_of(batch)
        if share is None and state.loader is not None:
            place = state.epoch, state.position
            share = state.loader.recognise(batch, place, state.count_samples)
            batch = batch if share is None else carry(batch, share)
        return batch, share

    def _begin_step(self) -> None:
        """Stop here if a signal asked for it; tell the callbacks; notice new parameters."""
        state = self.state
        self._boundary.passed += 1
        if self._boundary.held:
            self._boundary.halt()
        if not self.oom.retrying:  # a step that is recomputed has already begun
            for call in state.callbacks.on_step_begin:
                call(state.step + 1)
        if state.parameters_changed():
            self.execution.take_new_parameters()

    def give_up_recording(self, reason: str) -> None:
        """Run all later steps eagerly, and free the memory that recorded steps held."""
        if self.execution.active:
            self.execution.give_up(reason)

    @contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Wraps the loading of a checkpoint: drop the unfinished step and what was measured since
        the last log, then start afresh."""
        memory = self.oom.state_dict()
        self.state.abandon_step()
        self.state.metrics.reset()
        self.nan_guard.reset()
        yield
        self.oom.load_state_dict(memory)  # keep what was learned since the checkpoint
        self.execution.went_back()
        self.nan_guard.start()

    def pass_over(self, share: Share | None) -> None:
        """Skip a micro-batch without training on it; after the last one, skip the step."""
        if share is not None and share.last:
            self.state.epoch, self.state.position = share.epoch, share.position + 1

    def check_replicas(self) -> None:
        """Raise if a parameter differs in any bit between ranks. Collective."""
        self.strategy.check_replicas(self.state.step)

    def check_loss(self, metrics: dict[str, float], folder: Path) -> None:
        """Raise if the loss over some steps is NaN or infinite. folder: that of the run."""
        if math.isfinite(metrics.get("loss", 0.0)):
            return
        self.execution.verify()  # these two name the step and the samples where they can
        self.nan_guard.look(now=True)
        rate = float(self.optimizer.param_groups[0]["lr"])
        alone = self.placement.dp_size == 1 or not math.isnan(metrics["loss"])
        raise NonFiniteLossError(
            self.step,
            text=f"the loss is {metrics['loss']} over the steps up to {self.step}; lower the "
            f"learning rate (now {rate:g}), set max_grad_norm, or check the data. The checkpoints "
            f"in {folder / 'checkpoints'} are from before{'' if alone else '. ' + NAN_OF_A_PART}",
        )

    def full_state(self) -> dict[str, Any]:
        """The state_dict of the whole model, on every rank. Every rank must call it."""
        return self.strategy.full_state()

    def held_state(self) -> dict[str, Any]:
        """The state_dict of the model as this rank holds it: parameters may be split."""
        return self.strategy.held_state()

    def read_ahead(self) -> None:
        """Find now what takes long in the next `state_dict`, which is of the same step."""
        self._ahead = self.state.step, self.state.modes.state_dict()

    def collect_metrics(self) -> MetricsCollector:
        """Metrics collected since the last reset, including those of recorded steps."""
        self.execution.collect(self.state.metrics)
        return self.state.metrics

    # Saved with a run

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        ahead, self._ahead = self._ahead or (-1, {}), None
        modes = ahead[1] if ahead[0] == state.step else state.modes.state_dict()
        epoch, position = state.epoch, state.position
        most = self.config.max_steps
        # The loader knows if the user's loop left an epoch early. An epoch that max_steps cut
        # short does not count: given more steps, the run continues inside it.
        if state.loader is not None and (most is None or state.step < most):
            epoch, position = state.loader.place_after(epoch, position)
        return {
            "step": state.step,
            "epoch": epoch,
            "position": position,
            "scaler": state.precision.scaler.state_dict(),
            "schedule": state.schedule.state_dict(),
            "memory": self.oom.state_dict(),
            "compiled": self.execution.switch.state_dict(),
            **modes,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state, self._ahead = self.state, None
        state.step, state.epoch, state.position = (
            saved[name] for name in ("step", "epoch", "position")
        )
        note_step(state.step)
        state.precision.scaler.load_state_dict(saved["scaler"])
        state.schedule.load_state_dict(saved["schedule"])
        if "memory" in saved:
            self.oom.load_state_dict(saved["memory"])
        self.execution.switch.load_state_dict(saved.get("compiled"))
        state.modes.load_state_dict(saved)


class RefusingRunner(EagerRunner):
    """Takes the runner's place when the model is not wrapped, and refuses `train_step`."""

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        raise ModelError(
            "train_step, train_epoch and fit need setup_training; after manager.prepare, steps are "
            "`with trainer.step(batch):` and trainer.backward(loss)"
        )


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


class AutoTrainer(DistributedDataParallelTrainer):
    """Whichever fits the model: one device, a copy per process, or a shard per process."""

    def make_strategy(self) -> Strategy:
        strategy = super().make_strategy()
        strategy.builds_in_parts = self.placement.group is not None
        return strategy


class FullyShardedTrainer(MultiGPUTrainer):
    """One process per GPU, each with a shard of every parameter."""

    def make_strategy(self) -> Strategy:
        return FSDPStrategy(self.config, self.placement)


TRAINERS: dict[TrainingMode, type[MultiGPUTrainer]] = {
    TrainingMode.SINGLE: SingleDeviceTrainer,
    TrainingMode.DATA_PARALLEL: DataParallelTrainer,
    TrainingMode.DISTRIBUTED_DATA_PARALLEL: DistributedDataParallelTrainer,
    TrainingMode.FULLY_SHARDED: FullyShardedTrainer,
    TrainingMode.AUTO: AutoTrainer,
}
