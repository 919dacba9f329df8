"""What a step asks of a device: operations, floating-point operations, and what is possible."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from multi_gpu_training.data.order import Share
from multi_gpu_training.torch_internals import DispatchMode, overload_packet
from multi_gpu_training.training.callbacks import Callback, CallbackList, Run
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

# Dense peak in 1e12 operations a second, from the vendors' data sheets: 16-bit tensor cores,
# TF32 (None: the chip has none), and plain float32.
PEAKS: dict[str, tuple[float, float | None, float]] = {
    "B200": (2250.0, 1100.0, 75.0),
    "H200": (989.0, 494.0, 67.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.0, 494.0, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "V100": (125.0, None, 15.7),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "A10": (125.0, 62.5, 31.2),
    "T4": (65.0, None, 8.1),
}


class WorkCount(DispatchMode):
    """Counts what runs inside: operations, and floating-point operations of matrix products.

    Whatever goes wrong in counting stays here; the operations themselves are not touched.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        try:
            self.operations += not _is_view(func)
            formula = flop_registry.get(overload_packet(func))
            if formula is not None:
                self.flops += int(formula(*args, **kwargs, out_val=result))
        except Exception:
            self.flops += 0  # an operation that cannot be counted is left out
        return result


class WorkCounter(Callback):
    """Counts the operations of one step, records them, and leaves."""

    watches_only = True

    def __init__(self, callbacks: CallbackList, record: Callable[..., None]) -> None:
        self._callbacks = callbacks
        self._record = record
        self._work = WorkCount()
        self._counting = False  # another callback may fail between the events

    def on_step_begin(self, run: Run, step: int) -> None:
        self._work = WorkCount()  # a step that failed does not count

    def on_forward(self, run: Run, share: Share) -> None:
        self._work.__enter__()  # type: ignore[no-untyped-call]
        self._counting = True

    def on_micro_batch_end(self, run: Run) -> None:
        if self._counting:
            self._counting = False
            self._work.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._callbacks.remove(self)
        work = self._work
        self._record("work", step=result.step, operations=work.operations, flops=work.flops)


def is_compiled(state: StepState) -> bool:
    """Whether the step cannot be looked into: code that the user compiled would be compiled anew,
    and the threads of DataParallel are not seen."""
    if state.strategy.copies_here > 1:
        return True
    modules = [state.step_module.loss_fn, *state.model.modules()]
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_torchdynamo_orig_callable")
        or type(module).__name__ == "OptimizedModule"
        for module in modules
    )


def _is_view(func: Any) -> bool:
    """Views and questions about tensors start no work."""
    return bool(getattr(func, "is_view", False))


def peak_flops(device_name: str, precision: str, tf32: bool) -> float | None:
    """What the device could do in a second; None where nobody told us."""
    for name, (half, with_tf32, single) in PEAKS.items():
        if name in device_name:
            if "16" in precision:
                return half * 1e12
            return (with_tf32 if tf32 and with_tf32 else single) * 1e12
    return None


@functools.cache
def measured_flops(threads: int) -> float:
    """What this process's CPU does in a second, by a matrix product that fits its caches."""
    size, best = 256, float("inf")
    matrix = torch.ones(size, size)
    # Of one thread its own time counts, whatever else the machine does.
    clock = time.thread_time if threads == 1 else time.perf_counter
    with torch.no_grad():
        for _ in range(4):
            begun = clock()
            torch.mm(matrix, matrix)
            best = min(best, clock() - begun)
    return 2.0 * size**3 / max(best, 1e-9)


def uses_tf32() -> bool:
    return torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
