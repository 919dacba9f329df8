"""The trainer of one process a GPU, the default."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.replicas import release, replicate, settle_buckets
from multi_gpu_training.training.step import StepModule
from multi_gpu_training.training.trainer import MultiGPUTrainer, nothing


class DistributedDataParallelTrainer(MultiGPUTrainer):
    """One process a GPU; DDP exchanges the gradients. Alone, it trains without a wrapper."""

    def wrap(self, module: StepModule) -> nn.Module:
        if self.placement.group is None:
            return module
        module.replicated = True
        ddp = replicate(module, self.placement, self.config)
        self.forward = ddp.forward  # type: ignore[method-assign]
        return ddp

    def unwrap(self) -> None:
        if isinstance(self.wrapped, DistributedDataParallel):
            release(self.wrapped)
            del self.forward
        super().unwrap()

    def exchange(self, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()

    def settle(self, batch: Any, share: Share) -> None:
        ddp = self.wrapped
        if not isinstance(ddp, DistributedDataParallel):
            return
        if not self.config.static_graph:
            if self.config.find_unused_parameters:
                return  # such buckets are never rebuilt
            settle_buckets(ddp, lambda: ddp.forward(None, 0, 1, 1).scaled)
            return
        # A static graph remembers how often each parameter is used: it must see a real batch.
        if share.count == 0 and self.loader is not None:
            batch = self.loader.stand_in(share)
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        settle_buckets(ddp, lambda: nothing(ddp.forward(batch, 1, 1, 1)))
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
