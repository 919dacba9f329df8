"""A micro-batch recorded as a CUDA graph, and what must be copied in and out of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.monitoring.metrics import MetricsCollector, Number
from multi_gpu_training.training.step import MicroResult

T = TypeVar("T")
Compute = Callable[[Any, Tensor | None, Share], tuple[MicroResult, Tensor | None]]


class CaptureError(Exception):
    """A step could not be recorded; the message says why in a few words."""


class Replayable(Protocol):
    def replay(self) -> None: ...


class Graphs(Protocol):
    """Something that records work instead of doing it."""

    def capture(self, work: Callable[[], T]) -> tuple[Replayable, T]: ...


class CudaGraphs:
    """Records on the current stream. All graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> tuple[Replayable, T]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        collecting = gc.isenabled()
        gc.disable()  # what it frees may call into CUDA, which a recording does not allow
        try:
            # Only this thread's calls are restricted: pinning threads and NCCL's watchdog go on.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            finally:
                graph.capture_end()
        except Exception as error:
            self._clean_up(graph)
            raise CaptureError(_first_line(error)) from error
        finally:
            if collecting:
                gc.enable()
        return graph, outputs

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """A failed recording leaves the allocator and the generator in recording mode."""
        with contextlib.suppress(Exception):
            graph.capture_end()
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.device.index or 0, self.pool)
        torch.cuda.synchronize(self.device)
        # The random generator believes that a recording goes on: give it a fresh state.
        fresh = torch.Generator(device=self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        self.pool = torch.cuda.graph_pool_handle()


class CapturedMicro:
    """One micro-batch as a graph: inputs copied in, sums of its loss and metrics kept inside.

    grads: what the parameters' gradients are while the step is not complete yet.
    """

    def __init__(
        self,
        graphs: Graphs,
        compute: Compute,
        batch: Any,
        samples: Tensor | None,
        share: Share,
        parameters: list[Tensor],
    ) -> None:
        self.share = share
        self.replays = 0
        self._inputs: list[Tensor] = []
        self._batch = self._fixed(batch)
        self._samples = None if samples is None else self._fixed(samples)
        if isinstance(batch, ResidentBatch) and samples is not None:
            self._samples = self._batch.index  # one copy serves both
            self._inputs.pop()
        self._resident = isinstance(batch, ResidentBatch)
        self._sums = _Sums(share.count)

        def work() -> tuple[MicroResult, Tensor | None]:
            result, norm = compute(self._batch, self._samples, share)
            self._sums.add(result)
            return result, norm

        self._graph, (result, self.norm) = graphs.capture(work)
        self._sums.clear()
        self.mean = result.mean
        self.counted = result.weight is not None
        self.grads = [parameter.grad for parameter in parameters]

    def replay(self, batch: Any, samples: Tensor | None) -> None:
        """Compute this batch; it must have the signature of the one that was recorded."""
        if self._resident:
            self._inputs[0].copy_(batch.index, non_blocking=True)
        else:
            for fixed, given in zip(self._inputs, leaves(batch), strict=False):
                fixed.copy_(given, non_blocking=True)
            if samples is not None:
                self._inputs[-1].copy_(samples, non_blocking=True)
        self.replays += 1
        self._graph.replay()

    def collect(self, metrics: MetricsCollector) -> None:
        """Hand over the sums of all replays since the last time."""
        if self.replays:
            self._sums.hand_over(metrics, self.replays)
            self.replays = 0

    def forget(self) -> None:
        """Drop the sums of replays that do not count."""
        self._sums.clear()
        self.replays = 0

    def _fixed(self, value: Any) -> Any:
        """The same structure around tensors that stay where they are."""
        if isinstance(value, ResidentBatch):
            return ResidentBatch(self._fixed(value.index), value.tensors, value._mgt_share)
        if isinstance(value, Tensor):
            fixed = torch.empty_like(value)
            fixed.copy_(value)
            self._inputs.append(fixed)
            return fixed
        if isinstance(value, tuple):
            parts = [self._fixed(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, list):
            return [self._fixed(part) for part in value]
        if isinstance(value, dict):
            return {key: self._fixed(part) for key, part in value.items()}
        return value


class _Sums:
    """Running sums of a captured micro-batch's loss and metrics, added up on the device.

    Numbers that are the same in every replay (the count of samples) are multiplied at the end.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pairs: dict[str, tuple[_Sum, _Sum]] = {}

    def add(self, result: MicroResult) -> None:
        """Part of the recording: add what this micro-batch gave."""
        if result.weight is None:
            count = float(self._count)
            self._add("loss", result.mean, count, factor=count)
        else:
            self._add("loss", result.mean.double() * result.weight, result.weight)
        for name, (total, weight) in result.metrics.items():
            self._add(name, total, weight)

    def _add(self, name: str, total: Number, weight: Number, factor: float = 1.0) -> None:
        if name not in self._pairs:
            self._pairs[name] = _Sum(total, factor), _Sum(weight)
        for kept, value in zip(self._pairs[name], (total, weight), strict=True):
            kept.add(value)

    def hand_over(self, metrics: MetricsCollector, replays: int) -> None:
        for name, (total, weight) in self._pairs.items():
            metrics.add(name, total.take(replays), weight.take(replays))

    def clear(self) -> None:
        for pair in self._pairs.values():
            for kept in pair:
                kept.take(0)


class _Sum:
    """A sum on the device, or a number that each replay adds."""

    def __init__(self, like: Number, factor: float = 1.0) -> None:
        self._constant = 0.0 if isinstance(like, Tensor) else float(like)
        self._factor = factor
        self._tensor: Tensor | None = None
        if isinstance(like, Tensor):
            # Not zeroed here, where zeroing would be recorded, but after the recording.
            self._tensor = torch.empty((), dtype=torch.float64, device=like.device)

    def add(self, value: Number) -> None:
        if self._tensor is not None and isinstance(value, Tensor):
            self._tensor.add_(value.detach())

    def take(self, replays: int) -> Tensor | float:
        if self._tensor is None:
            return self._constant * replays
        taken = self._tensor * self._factor
        self._tensor.zero_()
        return taken


def leaves(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in a fixed order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from leaves(part)
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from leaves(part)


def signature(batch: Any) -> Any:
    """What two batches must share for one recording to serve both; None where it cannot be told."""
    try:
        return _signature(batch)
    except TypeError:
        return None


def _signature(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.shape, batch.stride(), batch.dtype
    if isinstance(batch, ResidentBatch):
        return "resident", batch.index.shape[0]
    if isinstance(batch, (list, tuple)):
        return type(batch).__name__, *map(_signature, batch)
    if isinstance(batch, dict):
        return tuple((key, _signature(part)) for key, part in batch.items())
    if isinstance(batch, (int, float, str, bool, type(None))):
        return batch
    raise TypeError(f"{type(batch).__name__} in a batch")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
