"""How a model is replicated over devices: the only place that knows.

A strategy wraps the step module, computes a micro-batch on all copies, and does what depends on
where parameters and gradients live: dividing by the step's weight, clipping, comparing copies,
and saying what a checkpoint holds. A new way to train (sharded, say) is one new file here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.batchnorm import SyncBatchNorm
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.replicas import check_replicas
from multi_gpu_training.torch_internals import foreach_mul_
from multi_gpu_training.training.step import MicroResult, StepModule, zero_loss

# (batch, count, window_count, ranks) -> what this rank's part of the step gives
Forward = Callable[[Any, int, int, int], MicroResult]
# A sample as the loss gets it, for a share that has none
StandIn = Callable[[Share], Any]


class Strategy(ABC):
    """What a trainer asks of a way to replicate its model. Call `wrap` before anything else.

    settled: whether `settle` ran; until then the first step must call it.
    wrapped: the module that computes on all copies.
    """

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self.settled = False
        self.step_module: StepModule
        self.wrapped: nn.Module
        self.parameters: list[nn.Parameter]
        self.forward_exchanges = False  # ranks talk in each micro-batch's forward

    # Wrapping

    def wrap(self, step_module: StepModule) -> nn.Module:
        """Wrap a step module; its model is on the device already."""
        self.step_module = step_module
        model = step_module.model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.forward_exchanges = any(isinstance(m, SyncBatchNorm) for m in model.modules())
        self.wrapped = self.make_wrapper(step_module)
        return self.wrapped

    @abstractmethod
    def make_wrapper(self, step_module: StepModule) -> nn.Module:
        """The module around `step_module` that computes on all copies."""

    def unwrap(self) -> None:
        """Let go of the wrapper, whose process group is about to be broken."""
        self.wrapped = self.step_module

    def rewrap(self) -> None:
        """Wrap again, for a new process group. Wrapping sends rank 0's buffers to every rank;
        each rank keeps its own."""
        buffers = [buffer.clone() for buffer in self.step_module.model.buffers()]
        self.wrapped = self.make_wrapper(self.step_module)
        with torch.no_grad():
            for buffer, before in zip(self.step_module.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        self.settled = False

    def settle(self, batch: Callable[[], Any]) -> None:
        """Bring the wrapper into the form it keeps. Called once, before the first step. `batch`
        gives one as the loss gets it."""
        self.settled = True

    @property
    def replicas(self) -> int:
        """Copies of the model that share a global batch."""
        return self.placement.dp_size * self.copies_here

    @property
    def copies_here(self) -> int:
        """Copies of the model in this process."""
        return 1

    # The step

    @property
    @abstractmethod
    def forward(self) -> Forward:
        """Computes a micro-batch on all copies. A property and not a method: it gives the
        wrapper's own function, which saves a frame in every step."""

    def no_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a forward and backward: ranks talk only on the last micro-batch of a step,
        earlier exchanges would be wasted."""
        return nullcontext()

    def absent(self, share: Share, stand_in: StandIn | None) -> MicroResult:
        """Take part in a micro-batch of which this rank has no sample: the others wait for it."""
        needs_forward = self.config.find_unused_parameters or self.forward_exchanges
        if not needs_forward or stand_in is None:
            return self.forward(None, 0, share.window_count, 1)
        model = self.step_module.model
        buffers = [buffer.clone() for buffer in model.buffers()]
        result = self.forward(stand_in(share), 0, share.window_count, 1)
        if not self.config.sync_bn:
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        return result._replace(scaled=zero_loss(result), tally=self.step_module.tally * 0.0)

    def weigh(self, window_count: int, weighted: bool | None) -> None:
        """Divide the gradients by the weight of the whole step, over all ranks.

        weighted: whether losses come with weights other than sample counts; None: not known here.
        """
        # Where every micro-batch was scaled by its count there is nothing left to divide. A rank
        # that saw no sample cannot know: its total is then 0, or the other ranks'.
        if weighted is not False and self.step_module.tally.grad is not None:
            self._divide(self.step_module.tally.grad, window_count)

    def _divide(self, total: Tensor, window_count: int) -> None:
        nominal = max(1, window_count)
        factor = torch.where(total > 0, nominal / total, torch.ones_like(total))
        grads = [p.grad for p in self.parameters if p.grad is not None]
        for dtype in {grad.dtype for grad in grads}:
            dense = [grad for grad in grads if grad.dtype == dtype and not grad.is_sparse]
            if dense:
                foreach_mul_(dense, factor.to(dtype))
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor.to(grad.dtype))

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole model; returns their norm before."""
        return nn.utils.clip_grad_norm_(self.parameters, max_norm)

    # The model as a whole

    def full_state(self) -> dict[str, Tensor]:
        """The state_dict of the whole model, on every rank. Every rank must call it."""
        state: dict[str, Tensor] = self.step_module.model.state_dict()
        return state

    def check_replicas(self, step: int) -> None:
        """Raise if a parameter differs in any bit between ranks. Collective."""
        check_replicas(self.step_module.model, self.placement, step)

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0, where the config says so. Collective."""
        if self.config.broadcast_buffers:
            self.placement.broadcast_tensors(self.step_module.model.buffers())

    # What others ask about it

    def recording_obstacle(self) -> str | None:
        """Why a step cannot be recorded as a CUDA graph under this strategy."""
        return None

    def compile_obstacle(self) -> str | None:
        """Why a step cannot be compiled under this strategy."""
        return None

    @property
    def hook_s(self) -> float:
        """Seconds that the user's communication hooks took on the host so far."""
        return 0.0

    def watch_buckets(self, ready: Callable[[int], None]) -> None:
        """Call `ready(bytes)` whenever gradients are ready to be sent, and send nothing from now
        on. For `mgt estimate`, on one rank."""
        return

    def bucket_bytes(self) -> list[int]:
        """Sizes of the pieces in which gradients are exchanged."""
        return []

    def keep_gradients_local(self) -> None:
        """Exchange no gradients from now on, to measure what the exchange costs. Copies of the
        model drift apart."""
        return

    def logged_times(self) -> dict[str, float]:
        """Seconds per phase that the wrapper itself has logged; empty where it logs nothing."""
        return {}


class SingleDevice(Strategy):
    """One process, one device, no wrapper."""

    def make_wrapper(self, step_module: StepModule) -> nn.Module:
        return step_module

    @property
    def forward(self) -> Forward:
        return self.step_module.forward
