"""One process per GPU, with DistributedDataParallel to exchange the gradients: the default."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from multi_gpu_training.distributed.replicas import (
    Replicas,
    bucket_bytes,
    ddp_settings,
    replicate,
    settle_buckets,
    watch_buckets,
)
from multi_gpu_training.errors import ModelError
from multi_gpu_training.torch_internals import (
    ddp_logging_data,
    inside_ddp_forward,
    remove_ddp_hooks,
    unexchanged_parameters,
)
from multi_gpu_training.training.step import StepModule, zero_loss
from multi_gpu_training.training.strategy import Forward, Strategy

_LOGGED = (
    "avg_forward_compute_time",
    "avg_backward_compute_time",
    "avg_backward_comm_time",
    "avg_backward_compute_comm_overlap_time",
)


class DDPStrategy(Strategy):
    """A copy of the model in every process. Without a process group it trains unwrapped."""

    ddp: Replicas | None = None
    _left: tuple[Any, Any] | None = None  # the user's communication hook and its group

    def make_wrapper(self, step_module: StepModule) -> nn.Module:
        if self.placement.group is None:
            return step_module
        step_module.replicated = True
        self.ddp = replicate(step_module, self.placement, self.config)
        if self._left is not None:
            self.ddp.take_comm_hook(*self._left)
        return self.ddp

    def unwrap(self) -> None:
        if self.ddp is not None:
            if self.ddp.comm_hook is not None:
                self._left = self.ddp.comm_hook, self.ddp.process_group
            remove_ddp_hooks(self.ddp)
            self.ddp = None
        super().unwrap()

    @property
    def forward(self) -> Forward:
        # Skip `__call__`: nobody has hooks on these modules, and each call costs time per step.
        return self.step_module.forward if self.ddp is None else self.ddp.forward

    def no_sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.ddp is None else self.ddp.no_sync()

    def check_exchanged(self) -> None:
        # Without this look, the rank would move its weights and wait for the others in another
        # collective, while they wait for its gradients.
        unused = [] if self.ddp is None else unexchanged_parameters(self.ddp)
        if unused:
            names = [name.removeprefix("model.") for name in unused]
            raise ModelError(
                f"{len(names)} parameters got no gradient from this rank's part of a batch: "
                f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}; if the loss does not "
                "use them in every batch, set find_unused_parameters=true; otherwise use them in "
                "the loss or freeze them with requires_grad_(False)",
                code="MGT402",
            )

    def explained(self, error: RuntimeError) -> Exception | None:
        if "mark a variable ready only once" not in str(error):
            return None
        return ModelError(
            "a parameter got its gradient twice in one backward, and ranks exchange it after the "
            "first time. Layers that are used more than once under torch.utils.checkpoint need "
            "use_reentrant=False, or static_graph=true",
            code="MGT403",
        )

    def settle(self, batch: Callable[[], Any]) -> None:
        self.settled = True
        ddp = self.ddp
        # DDP never rebuilds buckets if it looks for unused parameters in every step.
        if ddp is None or (self.config.find_unused_parameters and not self.config.static_graph):
            return
        if not self.config.static_graph:
            settle_buckets(ddp, lambda: self.forward(None, 0, 1, 1).scaled)
            return
        # A static graph remembers how often each parameter is used: it must see a real batch.
        model, seen = self.step_module.trained, batch()
        buffers = [buffer.clone() for buffer in model.buffers()]

        def loss() -> Tensor:
            scaled, tally, *_ = self.forward(seen, 1, 1, 1)
            return zero_loss(scaled if tally is None else scaled + tally)

        settle_buckets(ddp, loss)
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def weigh(self, window_count: int, weighted: bool, unweighted: int) -> None:
        grad = self.step_module.tally.grad
        if not self.config.compress_gradients or grad is None:
            super().weigh(window_count, weighted, unweighted)
            return
        # The weight does not fit the 16 bits that gradients are sent in: send it separately.
        # On every rank, even one without weighted losses: this is a collective.
        self._divide(self.placement.sum(grad) / self.placement.dp_size, window_count)

    def recording_obstacle(self) -> str | None:
        if self.placement.group is None:
            return None
        if self.placement.backend != "nccl":
            return f"the ranks talk over {self.placement.backend}"
        if self.config.find_unused_parameters:
            return "find_unused_parameters looks for them on the CPU"
        return None

    def compiling(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.ddp is None else inside_ddp_forward(self.ddp)

    def wrapper_settings(self) -> dict[str, Any] | None:
        return None if self.ddp is None else ddp_settings(self.config)

    @property
    def hook_s(self) -> float:
        return 0.0 if self.ddp is None else self.ddp.hook_s

    def watch_buckets(self, ready: Callable[[int], None]) -> None:
        if self.ddp is not None:
            watch_buckets(self.ddp, ready)

    def bucket_bytes(self) -> list[int]:
        return [] if self.ddp is None else bucket_bytes(self.ddp)

    def keep_gradients_local(self) -> None:
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = False  # `no_sync`, for good

    def logged_times(self) -> dict[str, float]:
        if self.ddp is None:
            return {}
        try:
            found = ddp_logging_data(self.ddp)
            return {key: float(found[key]) / 1e9 for key in _LOGGED if found.get(key)}
        except (RuntimeError, TypeError, ValueError):  # nothing logged yet
            return {}
