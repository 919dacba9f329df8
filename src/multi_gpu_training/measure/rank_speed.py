"""How fast one rank computes alone, and how much fits into it: forward and backward of a batch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from multi_gpu_training.data.batch import map_tensors, share_of, tensors_of
from multi_gpu_training.data.feeding import Loader
from multi_gpu_training.errors import DataError
from multi_gpu_training.measure.memory_model import LARGEST_BATCH, MemoryModel, with_margin
from multi_gpu_training.training.probe import untouched
from multi_gpu_training.training.step_state import StepState

PASSES = 6  # the fastest counts: whatever else runs on a machine only makes a pass longer
LONG_ENOUGH_S = 0.5  # short passes are repeated, so that a busy moment does not cover them all
MOST_PASSES = 60


@dataclass(frozen=True)
class RankSpeed:
    """Forward and backward of `count` samples took `seconds`; at most `limit` fit (None: any)."""

    count: int
    seconds: float
    limit: int | None = None

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.count / max(self.seconds, 1e-9)


class Probe:
    """Computes one batch again and again, at any size, without talking to other ranks.

    Gradients are asked for past `backward()`: neither DDP nor `.grad` hears of them.
    """

    def __init__(self, state: StepState, batch: Any) -> None:
        self.state = state
        share = share_of(batch)
        assert share is not None
        self.batch = batch
        self.size = share.count
        self.micro = share.window_count
        firsts = {tensor.shape[:1] for tensor in tensors_of(batch) if tensor.ndim}
        self.cuttable = firsts == {(self.size,)}
        self._parameters = [p for p in state.trained.parameters() if p.requires_grad]

    def measure(self, count: int) -> RankSpeed:
        """The fastest of a few passes over `count` samples, or over as many as fit."""
        held = self._largest(count)
        measured = self._measured(held)
        if held == count:
            return measured
        return replace(measured, limit=with_margin(held))

    def _largest(self, count: int) -> int:
        """`count`, or the largest number of samples below that fits, to an eighth of it."""
        if self._fits(count):
            return count
        fits, too_many = 0, count
        while too_many - fits > max(1, fits // 8):
            middle = (fits + too_many) // 2
            if self.cuttable and self._fits(middle):
                fits = middle
            else:
                too_many = middle
        if fits == 0:
            raise DataError(
                f"memory is short: forward and backward of one sample do not fit, {count} were "
                "asked for; use a smaller model, or use_gradient_checkpointing"
                if self.cuttable
                else f"memory is short: a batch of {self.size} samples does not fit; lower "
                "batch_size",
                code="MGT603",
            )
        return fits

    def _fits(self, count: int) -> bool:
        try:
            with untouched(self.state):
                self._pass(*self._resized(count), count)
            return True
        except torch.OutOfMemoryError:
            pass
        self.clean()  # outside of the handler: the error holds on to the memory
        return False

    def _measured(self, count: int) -> RankSpeed:
        device = self.state.placement.device
        # A batch that cannot be cut is taken whole: time follows the number of samples.
        factor = 1.0 if self.cuttable else count / self.size
        batch, samples = self._resized(count)
        limit = None
        cuda = device.type == "cuda"
        with untouched(self.state):
            if cuda:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device) if cuda else 0
            seconds = self._fastest(batch, samples, count)
        if cuda:
            used = (torch.cuda.max_memory_allocated(device) - before) * factor
            limit = max(count, self._room(used / count))
        return RankSpeed(count, seconds * factor, limit)

    def _resized(self, count: int) -> tuple[Any, torch.Tensor | None]:
        """The batch with `count` samples, and numbers for the randomness of augmentations."""
        whole = count == self.size or not self.cuttable
        batch = self.batch if whole else resized(self.batch, self.size, count)
        if self.state.augment is None:
            return batch, None
        held = count if self.cuttable else self.size
        return batch, torch.arange(held, device=self.state.placement.device)

    def _pass(self, batch: Any, samples: torch.Tensor | None, count: int) -> None:
        prepared = self.state.prepare(batch, samples)
        result = self.state.step_module.forward(prepared, count, count, 1)
        torch.autograd.grad(result.scaled, self._parameters, allow_unused=True)

    def _fastest(self, batch: Any, samples: torch.Tensor | None, count: int) -> float:
        times: list[float] = []
        while len(times) < PASSES or (sum(times) < LONG_ENOUGH_S and len(times) < MOST_PASSES):
            times.append(self._timed(batch, samples, count))
        return min(times)

    def _timed(self, batch: Any, samples: torch.Tensor | None, count: int) -> float:
        start = time.perf_counter()
        self._pass(batch, samples, count)
        if self.state.placement.device.type == "cuda":
            torch.cuda.synchronize(self.state.placement.device)
        return time.perf_counter() - start

    def _room(self, sample_bytes: float) -> int:
        """Samples that fit beside what is there now and the optimizer's state still to come."""
        device = self.state.placement.device
        held = torch.cuda.memory_allocated(device)
        unused = torch.cuda.mem_get_info(device)[0]
        available = unused + torch.cuda.memory_reserved(device)
        if not self.state.optimizer.state:
            # Adam and its like keep two tensors for each weight.
            held += 2 * sum(p.numel() * p.element_size() for p in self._parameters)
        return share_limit(held, sample_bytes, available)

    def clean(self) -> None:
        """Give back the memory that passes took and nobody needs any more."""
        gc.collect()
        if self.state.placement.device.type == "cuda":
            torch.cuda.empty_cache()


def share_limit(held_bytes: float, sample_bytes: float, available_bytes: float) -> int:
    """The most samples of a rank that holds so much already and can have so much in all."""
    model = MemoryModel.from_parts(held_bytes, max(sample_bytes, 1.0))
    largest = model.largest_batch(available_bytes)
    return LARGEST_BATCH if largest is None else largest


def first_batch(loader: Loader) -> Any:
    """The first share of rank 0 in this epoch: the same samples on every rank, so that long
    samples on one of them do not look like a slow GPU. The loader stands where it stood."""
    feeding, epoch, start = loader.feeding, loader.epoch, loader.start
    loader.seek(epoch)
    loader.set_shares(rank=0, weights=None)
    batches: Iterator[Any] = iter(loader)
    try:
        return next(batches)
    finally:
        close: Callable[[], None] | None = getattr(batches, "close", None)
        if close is not None:
            close()
        loader.seek(epoch, start)
        loader.set_shares(rank=feeding.rank, weights=feeding.weights)


def resized(batch: Any, size: int, count: int) -> Any:
    """`count` samples made from a batch of `size`: its first ones, or all of them and again."""

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] != size:
            return tensor
        return tensor[torch.arange(count, device=tensor.device) % size]

    return map_tensors(batch, pick)
