"""How long communication hooks that a user gives DDP keep the backward waiting."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel


class HookTime:
    """Seconds that hooks took on the host, so far. They run inside the backward, between the
    gradients of one bucket and the next, and would else look like computing."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same hook with a clock around it; DDP reads its signature through the wrapper."""

        @functools.wraps(hook)
        def with_clock(state: Any, bucket: Any) -> Any:
            begun = time.perf_counter()
            try:
                return hook(state, bucket)
            finally:
                self.seconds += time.perf_counter() - begun

        return with_clock


def watch_hooks(ddp: DistributedDataParallel) -> None:
    """Hooks that are registered from now on are timed: `ddp.hook_time`."""
    watch = HookTime()
    register = ddp.register_comm_hook

    def register_comm_hook(state: Any, hook: Callable[..., Any]) -> None:
        register(state, watch.timed(hook))

    ddp.__dict__["hook_time"] = watch
    ddp.__dict__["register_comm_hook"] = register_comm_hook
