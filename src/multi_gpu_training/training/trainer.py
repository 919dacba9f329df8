"""The training step. Trainers differ only in how a model is wrapped and its copies exchange.

One step, over all ranks and micro-batches, moves the weights along

    sum of w_i * grad l_i  /  sum of w_i

which is what one GPU computes on the whole global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import batch_count, share_of, to_device
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.data.order import Share, derive_seed
from multi_gpu_training.distributed.batchnorm import (
    Attendance,
    SyncBatchNorm,
    synchronise_batchnorm,
)
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.replicas import check_same_model
from multi_gpu_training.errors import ModelError
from multi_gpu_training.monitoring.metrics import MetricsCollector
from multi_gpu_training.training.learning_rate import Schedule
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.precision import Precision
from multi_gpu_training.training.step import MicroResult, StepModule
from multi_gpu_training.training.verification import Recorder


@dataclass(frozen=True)
class StepResult:
    """What a call of `train_step` did.

    loss: mean over this rank's micro-batch; stays on the device until you read it.
    moved: whether the weights moved, or the micro-batch was only accumulated.
    """

    loss: Tensor
    step: int
    moved: bool
    grad_norm: Tensor | None = None

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


class MultiGPUTrainer(ABC):
    """Accumulates micro-batches and moves the weights. Every rank must call `train_step` the
    same number of times."""

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self.precision = Precision(config, placement.device)
        self.metrics = MetricsCollector()
        self.attendance = Attendance()
        self.step = 0
        self.epoch = 0
        self.position = 0
        self.optimizer: Optimizer
        self.schedule: Schedule
        self.model: nn.Module
        self.loader: Loader | None = None
        self._micro = 0
        self._counted: bool | None = None
        self._settled = False
        self._checked = False
        self._stepping = False
        self.recorder: Recorder | None = None

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

    def micro_batch(self, batch: Any, share: Share) -> MicroResult:
        ranks = self.placement.dp_size
        return self.wrapped.forward(batch, share.count, share.window_count, ranks)  # type: ignore[no-any-return]

    def settle(self, batch: Any, share: Share) -> None:
        """Called once, before the first step of this process."""
        return

    # Building

    def build(self, model: nn.Module, loss_fn: LossFn) -> nn.Module:
        """Put the model onto the device, check it, and wrap it for training."""
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                f"{type(model).__name__} has no parameter with requires_grad=True; unfreeze some"
            )
        model.to(self.placement.device)
        check_same_model(model, self.placement)
        if self.config.sync_bn and self.placement.dp_size > 1:
            model = synchronise_batchnorm(model, self.placement, self.attendance)
        self.model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.step_module = StepModule(model, loss_fn, self.precision)
        self.wrapped = self.wrap(self.step_module)
        return model

    # The step

    def train_step(self, batch: Any) -> StepResult:
        """Train on one micro-batch; the last one of a global batch moves the weights.

        Batches of the manager's loader know their place. For any other batch, the samples on
        all ranks are counted, and every `gradient_accumulation_steps` calls form a step.
        """
        share = share_of(batch)
        if share is None:
            batch = to_device(batch, self.placement.device)
            share = self._share_of_own_batch(batch)
        if not self._settled:
            self.settle(batch, share)
            self._settled = True
        if self.recorder is not None:
            batch = self.recorder.batch(batch)
        self._seed_noise()
        self.attendance.present = share.count > 0  # until backward is done: it may recompute
        with self.exchange(share.last):
            result = self._absent(share) if share.count == 0 else self.micro_batch(batch, share)
            # The tally is added unscaled: it is a weight, not a gradient.
            (self.precision.scaler.scale(result.scaled) + result.tally).backward()
        self._note(result, share)
        self._micro += 1
        if not share.last:
            return StepResult(result.mean, self.step, moved=False)
        norm = self._move_weights(share)
        return StepResult(result.mean, self.step, moved=True, grad_norm=norm)

    def _move_weights(self, share: Share) -> Tensor | None:
        if not self._checked:
            self._check_gradients()
            self._checked = True
        if self._counted is not False or self.config.compress_gradients:
            # Also where this rank saw no sample and cannot know: then it is 1, or the others'.
            total = self._total_weight()
            nominal = max(1, share.window_count)
            self._scale_gradients(torch.where(total > 0, nominal / total, torch.ones_like(total)))
        scaler = self.precision.scaler
        norm = None
        if self.config.max_grad_norm is not None:
            scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        if self.recorder is not None:
            self.recorder.about_to_step(self.model, self.optimizer)
        self._stepping = True
        scaler.step(self.optimizer)
        self._stepping = False
        scaler.update()
        for parameter in self._parameters:
            parameter.grad = None
        self.step_module.tally.grad = None
        self._micro = 0
        self.step += 1
        self.epoch, self.position = share.epoch, share.position + 1
        self.schedule.after_step(self.step)
        if self.recorder is not None and self.step >= self.recorder.request.steps:
            self.recorder.on_done()
        return norm

    def _absent(self, share: Share) -> MicroResult:
        """This rank has no sample in this micro-batch, but the others need it to take part."""
        needs_forward = self.config.find_unused_parameters or any(
            isinstance(m, SyncBatchNorm) for m in self.model.modules()
        )
        if not needs_forward or self.loader is None:
            return self.wrapped.forward(None, 0, share.window_count, 1)  # type: ignore[no-any-return]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        stand_in = self.loader.stand_in(share)
        result: MicroResult = self.wrapped.forward(stand_in, 0, share.window_count, 1)
        if not self.config.sync_bn:
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        return result._replace(scaled=nothing(result), tally=self.step_module.tally * 0.0)

    def _note(self, result: MicroResult, share: Share) -> None:
        if share.count:
            self._counted = result.weight is not None
            weight = share.count if result.weight is None else result.weight
            self.metrics.add_mean(result.mean, weight, result.metrics)

    def _seed_noise(self) -> None:
        """Dropout and other noise depend on (seed, step, micro-batch, rank), not on history."""
        noise = self.recorder.request.noise if self.recorder is not None else 0
        seed = derive_seed(self.config.seed, self.step, self._micro, self.placement.dp_rank, noise)
        torch.default_generator.manual_seed(seed)
        if self.placement.device.type == "cuda":
            torch.cuda.default_generators[self.placement.device.index or 0].manual_seed(seed)

    def _total_weight(self) -> Tensor:
        """Summed weight of the step over ranks, divided as the gradients are."""
        grad = self.step_module.tally.grad
        assert grad is not None
        if self.config.compress_gradients:
            # Too large for the 16 bits that gradients are sent in: it goes by itself.
            grad = self.placement.sum(grad) / self.placement.dp_size
        return grad

    def _share_of_own_batch(self, batch: Any) -> Share:
        last = self._micro + 1 >= self.config.gradient_accumulation_steps
        return Share(
            epoch=self.epoch,
            position=self.position,
            indices=(),
            count=batch_count(batch),
            window_count=0,  # unknown here: the ranks learn it with the gradients
            first=self._micro == 0,
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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.precision.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])


class SingleDeviceTrainer(MultiGPUTrainer):
    """One process, one device."""

    def wrap(self, module: StepModule) -> nn.Module:
        return module


def nothing(result: MicroResult) -> Tensor:
    """The result with every gradient zero. Selected, not multiplied: the loss may be NaN."""
    total = result.scaled + result.tally
    never = torch.zeros((), dtype=torch.bool, device=total.device)
    return torch.where(never, total, torch.zeros_like(total))
