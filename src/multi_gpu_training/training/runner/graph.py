"""One micro-batch recorded as a CUDA graph, with the copies in and out of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from multi_gpu_training.data.batch import map_tensors
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.torch_internals import end_allocation_to_pool
from multi_gpu_training.training.metrics import MetricsCollector, Number
from multi_gpu_training.training.step import MicroResult

T = TypeVar("T")
MOST_SUMS = 64  # a total and a weight for each of 32 metrics
Compute = Callable[[Any, Tensor | None, Share], tuple[MicroResult, Tensor | None]]


class CaptureError(Exception):
    """A step could not be recorded; the message says why in a few words."""


class Replayable(Protocol):
    def replay(self) -> None: ...


class Graphs(Protocol):
    """Records work instead of doing it."""

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
        gc.disable()  # freeing objects may call into CUDA, which a recording forbids
        try:
            # Restrict only this thread's calls: pinning threads and NCCL's watchdog continue.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                # Ending the recording would fail too, and hide the original error.
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        except Exception as error:
            self._clean_up(graph)
            raise CaptureError(
                str(error) if type(error) is CaptureError else _first_line(error)
            ) from error
        finally:
            if collecting:
                gc.enable()
        return graph, outputs

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """A failed recording leaves the allocator and the generator in recording mode."""
        with contextlib.suppress(Exception):
            graph.capture_end()
        with contextlib.suppress(Exception):
            end_allocation_to_pool(self.device.index or 0, self.pool)
        torch.cuda.synchronize(self.device)
        # The random generator still believes it is being recorded: give it a fresh state.
        fresh = torch.Generator(device=self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        self.pool = torch.cuda.graph_pool_handle()


class CapturedMicro:
    """One micro-batch as a graph: inputs are copied in; sums of loss and metrics stay inside.

    grads: the parameters' gradients until the step is complete.
    ring: where the user's own batches are copied and kept; None for batches of our loaders.
    """

    def __init__(
        self,
        graphs: Graphs,
        compute: Compute,
        batch: Any,
        samples: Tensor | None,
        share: Share,
        parameters: list[Tensor],
        kept: int = 0,
    ) -> None:
        self.replays = 0
        self._inputs: list[Tensor] = []
        self._resident = isinstance(batch, ResidentBatch)
        self.ring = BatchRing(batch, kept) if kept and BatchRing.suits(batch) else None
        self._batch = self._fixed(batch) if self.ring is None else None
        self._samples = None if samples is None else self._fixed(samples)
        if self._resident and samples is not None:
            self._samples = self._inputs[0]  # one copy serves both
            self._inputs.pop()
        self._sums = _Sums(share.count, parameters[0].device)

        def work() -> tuple[MicroResult, Tensor | None]:
            given = self._batch if self.ring is None else self.ring.take()
            result, norm = compute(given, self._samples, share)
            self._sums.add(result)
            return result, norm

        self._graph, (result, self.norm) = graphs.capture(work)
        self._sums.clear()
        if self.ring is not None:
            self.ring.rewind()
        self.mean = result.mean
        # After the last micro-batch nobody needs them: their memory belongs to the recording.
        self.grads = [] if share.last else [parameter.grad for parameter in parameters]

    def replay(self, batch: Any, samples: Tensor | None) -> None:
        """Compute this batch, which must have the recorded signature."""
        if self._resident:
            self._inputs[0].copy_(batch.index, non_blocking=True)
        else:
            if self.ring is not None:
                self.ring.put(batch)
            else:
                for fixed, given in zip(self._inputs, leaves(batch), strict=False):
                    fixed.copy_(given, non_blocking=True)
            if samples is not None:
                self._inputs[-1].copy_(samples, non_blocking=True)
        self.replays += 1
        self._graph.replay()

    def collect(self, metrics: MetricsCollector) -> None:
        """Add the sums of all replays since the last call to `metrics`."""
        if self.replays:
            self._sums.hand_over(metrics, self.replays)
            self.replays = 0

    def forget(self) -> None:
        """Discard the sums of replays that do not count."""
        self._sums.clear()
        self.replays = 0

    def _fixed(self, value: Any) -> Any:
        """The same structure with tensors at fixed addresses."""
        if isinstance(value, ResidentBatch):
            return ResidentBatch(self._fixed(value.index), value.tensors, value.share)
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


class BatchRing:
    """The user's own batches since the last verified step, each in its own slot. The recorded step
    advances to the next slot by itself, and a rollback finds the earlier ones."""

    SPARE = 8  # slots for replays that only compare or time

    @staticmethod
    def suits(batch: Any) -> bool:
        # A slot is contiguous, and a step recorded with other strides may run other kernels.
        return not isinstance(batch, ResidentBatch) and all(
            tensor.is_contiguous() for tensor in leaves(batch)
        )

    def __init__(self, batch: Any, kept: int) -> None:
        self._like = batch
        self._kept = kept
        self._rings = [
            tensor.new_empty((kept + self.SPARE, *tensor.shape)) for tensor in leaves(batch)
        ]
        self._places = list(zip(*(ring.unbind() for ring in self._rings), strict=True))
        self._next = 0
        self._device_next = torch.zeros(1, dtype=torch.int64, device=self._rings[0].device)
        self.put(batch)

    def put(self, batch: Any) -> None:
        for place, given in zip(self._places[self._next], leaves(batch), strict=True):
            place.copy_(given, non_blocking=True)
        self._next += 1

    def take(self) -> Any:
        """Part of the recording: the next batch that was put in."""
        parts = iter([ring.index_select(0, self._device_next)[0] for ring in self._rings])
        self._device_next.add_(1)
        return map_tensors(self._like, lambda _: next(parts))

    def newest(self) -> KeptBatch:
        """The batch that was put in last."""
        return KeptBatch(self, self._next - 1)

    def batch(self, place: int) -> Any:
        parts = iter(self._places[place])
        return map_tensors(self._like, lambda _: next(parts))

    @property
    def full(self) -> bool:
        return self._next >= self._kept

    def rewind(self) -> None:
        """Start over: the kept batches are no longer needed."""
        self._next = 0
        self._device_next.zero_()


class KeptBatch(NamedTuple):
    """The slot of a batch in a ring."""

    ring: BatchRing
    place: int


def resolve_kept(batch: Any) -> Any:
    """The batch itself, read from its slot."""
    return batch.ring.batch(batch.place) if isinstance(batch, KeptBatch) else batch


class _Sums:
    """Running sums of a recorded micro-batch's loss and metrics, kept on the device.

    Numbers that are equal in every replay (the sample count) are multiplied at the end.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        # Allocate before the recording: inside it, this memory would be some it freed a moment
        # earlier, and every replay would write there first.
        self._slots = list(torch.zeros(MOST_SUMS, dtype=torch.float64, device=device).unbind())
        self._pairs: dict[str, tuple[_Sum, _Sum]] = {}

    def add(self, result: MicroResult) -> None:
        """Part of the recording: add the results of this micro-batch."""
        if result.weight is None:
            count = float(self._count)
            self._add("loss", result.mean, count, factor=count)
        else:
            self._add("loss", result.mean.double() * result.weight, result.weight)
        for name, (total, weight) in result.metrics.items():
            self._add(name, total, weight)

    def _add(self, name: str, total: Number, weight: Number, factor: float = 1.0) -> None:
        if name not in self._pairs:
            self._pairs[name] = self._sum(total, factor), self._sum(weight)
        for kept, value in zip(self._pairs[name], (total, weight), strict=True):
            kept.add(value)

    def _sum(self, like: Number, factor: float = 1.0) -> _Sum:
        if not isinstance(like, Tensor):
            return _Sum(None, float(like), factor)
        if not self._slots:
            raise CaptureError(f"it returns more than {MOST_SUMS // 2} metrics")
        return _Sum(self._slots.pop(), 0.0, factor)

    def hand_over(self, metrics: MetricsCollector, replays: int) -> None:
        for name, (total, weight) in self._pairs.items():
            metrics.add(name, total.take(replays), weight.take(replays))

    def clear(self) -> None:
        for pair in self._pairs.values():
            for kept in pair:
                kept.take(0)


class _Sum:
    """A sum on the device, or a number that each replay adds."""

    def __init__(self, tensor: Tensor | None, constant: float, factor: float) -> None:
        self._tensor = tensor
        self._constant = constant
        self._factor = factor

    def add(self, value: Number) -> None:
        if self._tensor is not None and isinstance(value, Tensor):
            self._tensor.add_(value.detach())

    def take(self, replays: int) -> Tensor | float:
        if self._tensor is None:
            return self._constant * replays
        taken = self._tensor * self._factor
        self._tensor.zero_()
        return taken


def leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in a fixed order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    tensors = []
    for part in batch if isinstance(batch, (list, tuple)) else ():
        if isinstance(part, Tensor):
            tensors.append(part)
        else:
            tensors += leaves(part)
    return tensors


def signature(batch: Any) -> Any:
    """What two batches must have in common to share a recording; None if a batch holds something
    that cannot be compared."""
    try:
        return _signature(batch)
    except TypeError:
        return None


def _signature(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.shape, batch.stride(), batch.dtype
    if isinstance(batch, ResidentBatch):
        return "resident", id(batch.tensors), batch.index.shape[0]  # it reads those tensors
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
