"""How a model is replicated over devices: the only place that knows.

A strategy wraps the step module, computes a micro-batch on all copies, and handles everything that
depends on where parameters and gradients live: dividing by the step's weight, clipping, comparing
copies, and building the state for a checkpoint. CONTRIBUTING lists what else a new one needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.batchnorm import (
    SyncBatchNorm,
    refuse_other_layers,
    synchronise_batchnorm,
)
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.replicas import check_replicas
from multi_gpu_training.errors import ModelError
from multi_gpu_training.state_dicts import plain_name
from multi_gpu_training.torch_internals import RunningStatsBase, foreach_mul_, sparse_values
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.step import MicroResult, StepModule
from multi_gpu_training.training.strategy.deferred_init import materialise

# (batch, count, window_count, ranks) -> result of this rank's part of the step
Forward = Callable[[Any, int, int, int], MicroResult]
# Returns a sample as the loss gets it, for a share without samples.
StandIn = Callable[[Share], Any]
_BESIDE_A_MODEL = (
    "the optimizer holds parameters of the loss, and training_mode={mode} trains those of the "
    "model alone: make the criterion a part of the model, which returns the loss from "
    "forward(input, target), or use training_mode=distributed_data_parallel"
)


class Strategy(ABC):
    """One way to replicate a model, as trainers use it. Call `wrap` before anything else.

    settled: whether `settle` has run; the first step must call it.
    wrapped: the module that computes on all copies.
    """

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        self.config = config
        self.placement = placement
        self.settled = False
        self.step_module: StepModule
        self.wrapped: nn.Module
        self.parameters: list[nn.Parameter]
        self.forward_exchanges = False  # ranks communicate in every forward
        self.computes_alone = True  # a rank can run model and loss on its own
        self.whole_gradients = True  # after the exchange, every rank has them
        self.builds_in_parts = False  # accepts models whose weights are on the meta device

    # Wrapping

    def place(self, model: nn.Module) -> None:
        """Move a model to the device, with all of its weights."""
        materialise(model)
        lost = [name for name, p in model.named_parameters() if p.is_meta]
        if lost:
            raise ModelError(
                f"{', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''} are on the meta device, "
                "and nothing says what their values are; give a function that builds the model "
                "(without torch.device('meta')), or stream_pretrained (docs/sharding.md)"
            )
        model.to(self.placement.device)

    def wrap(self, step_module: StepModule) -> nn.Module:
        """Wrap a step module whose model is already on the device."""
        self.step_module = step_module
        self._find_parameters()
        self._find_exchanges()
        self.wrapped = self.make_wrapper(step_module)
        return self.wrapped

    def train_beside(self, beside: nn.Module) -> None:
        """Train parameters of the loss as well as the model's. Collective."""
        self.step_module.beside = beside
        self._find_exchanges()
        self.take_parameters()

    @abstractmethod
    def make_wrapper(self, step_module: StepModule) -> nn.Module:
        """The module around `step_module` that computes on all copies."""

    def unwrap(self) -> None:
        """Release the wrapper, whose process group is about to be destroyed."""
        self.wrapped = self.step_module

    def rewrap(self) -> None:
        """Wrap again, for a new process group. Wrapping sends rank 0's buffers to every rank;
        each rank keeps its own."""
        buffers = [buffer.clone() for buffer in self.step_module.trained.buffers()]
        self.wrapped = self.make_wrapper(self.step_module)
        with torch.no_grad():
            for buffer, before in zip(self.step_module.trained.buffers(), buffers, strict=True):
                buffer.copy_(before)
        self.settled = False

    def refuse_beside(self, beside: nn.Module, mode: str) -> None:
        """Refuse trained parameters of the loss, for strategies that handle only the model. A
        criterion's statistics stay local to the rank."""
        if any(p.requires_grad for p in beside.parameters()):
            raise ModelError(_BESIDE_A_MODEL.format(mode=mode))

    def take_parameters(self) -> None:
        """The set of trained parameters changed. Collective."""
        self._find_parameters()
        self.unwrap()
        self.rewrap()

    def _find_parameters(self) -> None:
        self.parameters = [p for p in self.step_module.trained.parameters() if p.requires_grad]

    def take_layers(self) -> None:
        """The user may have added layers: a BatchNorm among them must be one over all ranks."""
        module = self.step_module
        if self.placement.dp_size > 1:
            for part in filter(None, (module.model, module.beside)):
                synchronise_batchnorm(part, self.placement, not self.config.sync_bn)
        if any(isinstance(one, SyncBatchNorm) for one in module.trained.modules()):
            self.forward_exchanges = module.needs_graph = True

    def _find_exchanges(self) -> None:
        module = self.step_module
        modules = module.trained.modules()
        self.forward_exchanges = any(isinstance(m, SyncBatchNorm) for m in modules)
        finds_unused = module.finds_unused = self.config.find_unused_parameters
        module.needs_graph = self.forward_exchanges or (finds_unused and self.config.static_graph)

    def adopt(self, optimizer: Any) -> None:
        """Make the user's own optimizer hold the parameters of the wrapped model."""
        return

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if this optimizer cannot move the parameters as they are held here."""
        return

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Wraps the optimizer's step."""
        return nullcontext()

    def settle(self, batch: Callable[[], Any]) -> None:
        """Bring the wrapper into its final form. Called once, before the first step. `batch`
        returns a batch as the loss gets it."""
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
        """Computes a micro-batch on all copies. A property rather than a method: it returns the
        wrapper's own function, which saves a call in every step."""

    def no_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a forward and backward. Ranks exchange gradients only on the last micro-batch
        of a step; earlier exchanges would be wasted."""
        return nullcontext()

    def check_layers(self) -> None:
        """Before a backward: raise if the samples of ranks have led them into other BatchNorms."""
        if self.forward_exchanges and self.placement.device.type == "cpu":
            refuse_other_layers(self.placement)

    def check_exchanged(self) -> None:
        """After the last backward of a step: raise if it ended before ranks had exchanged all
        gradients."""
        return

    def explained(self, error: RuntimeError) -> Exception | None:
        """What torch meant, where its error does not say what to do."""
        return None

    def absent(self, share: Share, stand_in: StandIn | None) -> MicroResult:
        """Take part in a micro-batch without samples here: the other ranks wait for this one."""
        module = self.step_module
        # A stand-in comes from the manager's loader and says nothing about the user's batches.
        ours = share.window_count > 0 or share.changed or module.needs_graph
        batch = None if stand_in is None or not ours else stand_in(share)
        kept = [(buffer, buffer.clone()) for buffer in self._sample_statistics()]
        result = self.forward(batch, 0, share.window_count, 1)
        for buffer, before in kept:
            # Bypass autograd: BatchNorm's backward would otherwise see a changed version.
            buffer.data.copy_(before)
        return result

    def _sample_statistics(self) -> Iterator[Tensor]:
        """Buffers that a stand-in must not change: this rank's own statistics of its samples.
        Other buffers (counters, spectral norms) follow from the steps and the weights."""
        for module in self.step_module.trained.modules():
            if isinstance(module, RunningStatsBase) and not isinstance(module, SyncBatchNorm):
                yield from module.buffers(recurse=False)

    def weigh(self, window_count: int, weighted: bool, unweighted: int) -> None:
        """Divide the gradients by the weight of the whole step, over all ranks.

        weighted: whether a loss of this rank came with a weight in this step. unweighted: samples
        of this rank whose loss came without.
        """
        # Scaled by sample counts, gradients are already right. With several ranks, one cannot
        # know whether another's loss had a weight: the sum tells.
        total = self.step_module.tally.grad
        if total is not None and (weighted or not window_count or self.placement.dp_size > 1):
            if not self.step_module.replicated:
                total = total + unweighted  # replicas have already put it into the tally
            self._divide(total, window_count)

    def _divide(self, total: Tensor, window_count: int) -> None:
        """total: the mean over ranks of their weights."""
        nominal = window_count / self.placement.dp_size if window_count else 1.0
        factor = torch.where(total != 0, nominal / total, torch.ones_like(total))
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for grad in self.gradients():
            by_type.setdefault(grad.dtype, []).append(
                sparse_values(grad) if grad.is_sparse else grad
            )
        for dtype, same in by_type.items():
            if dtype in (torch.float16, torch.bfloat16):
                # Rounded to 16 bits, the factor would be off by up to 0.4 %.
                for grad in same:
                    grad.copy_(grad.float() * factor)
            else:
                foreach_mul_(same, factor.to(dtype))

    def gradients(self) -> list[Tensor]:
        """This rank's part of the step's gradients."""
        return [grad for p in self.parameters if (grad := p.grad) is not None]

    def held(self, parameter: Tensor) -> Tensor:
        """What this rank holds of a parameter: its own memory, not a copy."""
        return parameter

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The same, by the names of the parameters."""
        for name, parameter in self.step_module.trained.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def any_rank(self, flag: Tensor) -> None:
        """Set `flag` here if any rank set it for its part of the gradients. Collective if ranks
        hold different parts."""
        return

    def forget_step(self) -> None:
        """Discard what the wrapper holds of an abandoned step."""
        return

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole model; returns their norm before clipping."""
        if not any(p.grad is not None and p.grad.is_sparse for p in self.parameters):
            return nn.utils.clip_grad_norm_(self.parameters, max_norm)
        # torch cannot clip sparse gradients. Their norm is that of their values, each row once.
        values: list[Tensor] = []
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                values.append(parameter.grad.values())
            elif parameter.grad is not None:
                values.append(parameter.grad)
        norm = nn.utils.get_total_norm(values)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch clips
        for value in values:
            value.mul_(factor)
        return norm

    # The model as a whole

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which every rank has the whole model and computes without the others.
        Collective."""
        return nullcontext()

    @contextmanager
    def in_step(self) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """Context in which all ranks call the model the same number of times, always through the
        function it yields. Nothing stays gathered longer than needed. Collective."""
        yield lambda function: function()

    def full_state(self) -> dict[str, Tensor]:
        """The state_dict of the whole model, on every rank. Every rank must call it."""
        state: dict[str, Tensor] = self.step_module.model.state_dict()
        # A model compiled by the user is saved like any other.
        return {plain_name(name): value for name, value in state.items()}

    def held_state(self) -> dict[str, Tensor]:
        """The state_dict as this rank holds it: parameters may be split. Not collective."""
        return self.full_state()

    def check_replicas(self, step: int) -> None:
        """Raise if a parameter differs in any bit between ranks. Collective."""
        check_replicas(self.step_module.trained, self.placement, step)

    @property
    def syncs_buffers(self) -> bool:
        """Whether `sync_buffers` may change anything."""
        several = self.placement.dp_size > 1 and self.config.broadcast_buffers
        return several and any(True for _ in self.step_module.trained.buffers())

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0 if the config says so. Collective."""
        if self.config.broadcast_buffers:
            self.placement.broadcast_tensors(self.step_module.trained.buffers())

    # Questions from other modules

    def recording_obstacle(self) -> str | None:
        """Why a step cannot be recorded as a CUDA graph under this strategy, if so."""
        return None

    def compile_obstacle(self) -> str | None:
        """Why a step cannot be compiled under this strategy, if so."""
        return None

    def compile(self, loss_fn: LossFn) -> LossFn:
        """The loss function with the model it calls, compiled for the shapes of each call."""
        compiled: LossFn = torch.compile(loss_fn, dynamic=False)
        return compiled

    @property
    def compile_failure(self) -> Exception | None:
        """Why a part of the compiled model ran uncompiled, if so."""
        return None

    def compiling(self) -> AbstractContextManager[Any]:
        """Wraps the first call of compiled code, outside the wrapper."""
        return nullcontext()

    def wrapper_settings(self) -> dict[str, Any] | None:
        """DDP's settings, which compiled code depends on; None if the model is not wrapped for
        DDP."""
        return None

    @property
    def hook_s(self) -> float:
        """Seconds the user's communication hooks have taken on the host so far."""
        return 0.0

    def watch_buckets(self, ready: Callable[[int], None]) -> None:
        """From now on, call `ready(bytes)` whenever gradients are ready to be sent, and send
        nothing. For `mgt estimate`, on one rank."""
        return

    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets in which gradients are exchanged."""
        return []

    def keep_gradients_local(self) -> None:
        """Exchange no gradients from now on, to measure what the exchange costs. Copies of the
        model drift apart."""
        return

    def logged_times(self) -> dict[str, float]:
        """Seconds per phase logged by the wrapper itself; empty if it logs nothing."""
        return {}


class SingleDevice(Strategy):
    """One process, one device, no wrapper."""

    def make_wrapper(self, step_module: StepModule) -> nn.Module:
        return step_module

    @property
    def forward(self) -> Forward:
        return self.step_module.forward
