"""The loader of tensors that live on the GPU: a batch is a list of places, gathered there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data import default_collate as torch_collate

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.batch import attach
from multi_gpu_training.data.loader import Feeding, ShareLoader
from multi_gpu_training.data.order import (
    GlobalBatchSource,
    Share,
    ShuffledBatches,
    cut,
    derive_seed,
)
from multi_gpu_training.torch_internals import version


class ResidentBatch:
    """A micro-batch that is not gathered yet: where its samples lie on the device."""

    __slots__ = ("_mgt_share", "index", "tensors")

    def __init__(self, index: Tensor, tensors: tuple[Tensor, ...], share: Share) -> None:
        self.index = index
        self.tensors = tensors
        self._mgt_share = share

    @property
    def share(self) -> Share:
        return self._mgt_share

    def gather(self, index: Tensor) -> list[Tensor]:
        """What collating the samples at `index` would give."""
        return [tensor.index_select(0, index) for tensor in self.tensors]


# A micro-batch's position, chunk, own samples, samples of the step, whether it is the last, place.
Micro = tuple[int, int, int, int, bool, int]
# The micro-batches of an epoch, and this rank's samples in the order in which they are used, on the
# host and on the device.
EpochPlan = tuple[list[Micro], Tensor, Tensor]


class ResidentLoader(ShareLoader):
    """This rank's share of a TensorDataset whose tensors fit into the GPU's memory.

    The order of an epoch goes over the bus once; a step sends nothing.
    """

    def __init__(self, dataset: TensorDataset, source: GlobalBatchSource, feeding: Feeding) -> None:
        super().__init__(dataset, source, feeding)
        self._on_host = dataset.tensors
        self.tensors = tuple(tensor.to(feeding.device) for tensor in self._on_host)
        self._versions = [version(tensor) for tensor in self._on_host]
        self._cut: tuple[Any, tuple[list[Micro], Tensor]] | None = None
        self._ahead: tuple[Any, EpochPlan] | None = None  # what it depends on, and the plan

    def one_pass(self) -> Iterator[Any]:
        # A loop of the user's own augments by these numbers; in a step they lie on the device.
        for batch in self.batches(with_indices=True):
            yield attach(batch.gather(batch.index), batch.share)

    def fetched_here(self) -> Iterator[Any]:
        return self.batches()

    def batches(self, with_indices: bool = False) -> Iterator[ResidentBatch]:
        """The micro-batches of the epoch, gathered only where they are used."""
        feeding = self.feeding
        self.before_pass()
        self._take_changes()
        micros, mine, order = self._take_plan()
        sample_seed = derive_seed(feeding.seed, self.epoch)
        epoch, tensors, place = self.epoch, self.tensors, 0
        for position, chunk, size, window, last, at in micros:
            indices = tuple(mine[place : place + size].tolist()) if with_indices else ()
            share = Share(
                epoch, position, indices, size, window, chunk == 0, last, position, sample_seed
            )
            share.place = at
            if size or not feeding.evaluating:
                yield ResidentBatch(order[place : place + size], tensors, share)
            place += size
        if not feeding.evaluating:
            self.seek(self.epoch + 1)
            if type(self.source) is ShuffledBatches:  # a sampler of the user's may not draw early
                # The device is busy with the last steps now; once they are done it would wait.
                self._ahead = self._plan_depends_on(), self._plan_epoch()

    def _take_changes(self) -> None:
        """Bring what was written into the dataset's tensors since the last pass to the device."""
        for number, (there, here) in enumerate(zip(self.tensors, self._on_host, strict=True)):
            if there is not here and version(here) != self._versions[number]:
                there.copy_(here)  # in place: a recorded step reads it where it lies
                self._versions[number] = version(here)

    def _take_plan(self) -> EpochPlan:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self._plan_depends_on():
            return ahead[1]
        return self._plan_epoch()

    def _plan_depends_on(self) -> Any:
        feeding = self.feeding
        weights = None if feeding.weights is None else tuple(feeding.weights)
        place = self.epoch, self.start, feeding.seed
        return *place, feeding.micro_size, feeding.rank, feeding.ranks, weights

    def _plan_epoch(self) -> EpochPlan:
        feeding, source = self.feeding, self.source
        if type(source) is ShuffledBatches:
            order, sizes = source.order(feeding.seed, self.epoch), source.sizes
        else:
            batches = list(source.batches(feeding.seed, self.epoch))
            order, sizes = (
                torch.tensor([i for batch in batches for i in batch]),
                [*map(len, batches)],
            )
        micros, places = self._cut_up(sizes)
        mine = order.to(torch.int64) if len(places) == len(order) else order[places]
        return micros, mine, mine.to(feeding.device, non_blocking=True)

    def _cut_up(self, sizes: list[int]) -> tuple[list[Micro], Tensor]:
        """The micro-batches of an epoch of global batches of these sizes, and which of its samples
        are this rank's. Mostly the same as in the epoch before."""
        feeding = self.feeding
        depends_on = sizes, self._plan_depends_on()[1:]
        if self._cut is not None and self._cut[0] == depends_on:
            return self._cut[1]
        micros: list[Micro] = []
        places: list[int] = []
        before = 0
        for position, size in enumerate(sizes):
            chunks = max(1, -(-size // feeding.micro_size)) if position >= self.start else 0
            for chunk in range(chunks):
                first = chunk * feeding.micro_size
                count = min(feeding.micro_size, size - first)
                begin, end = cut(count, feeding.ranks, feeding.rank, feeding.weights)
                place, last = before + first + begin, chunk == chunks - 1
                places.extend(range(place, place + end - begin))
                micros.append((position, chunk, end - begin, size, last, place))
            before += size
        self._cut = depends_on, (micros, torch.tensor(places, dtype=torch.int64))
        return self._cut[1]


def fits_on_gpu(dataset: Dataset[Any], feeding: Feeding, config: MultiGPUConfig) -> bool:
    """Whether this dataset is to live on the GPU: plain tensors, no workers, memory enough."""
    if feeding.device.type != "cuda" or config.data_on_gpu is False or not config.fast_defaults:
        return False
    if type(dataset) is not TensorDataset or feeding.collate is not torch_collate:
        return False
    if all(tensor.device == feeding.device for tensor in dataset.tensors):
        return True
    needed = sum(tensor.numel() * tensor.element_size() for tensor in dataset.tensors)
    free, _ = torch.cuda.mem_get_info(feeding.device)
    budget = free / 4 if config.gpu_data_gb is None else config.gpu_data_gb * 2**30
    return needed <= budget
