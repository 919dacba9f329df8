"""The loader of datasets with a length: each rank's share of every global batch."""

from __future__ import annotations

import atexit
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from torch.utils.data import _utils as worker_utils
from torch.utils.data import default_collate as torch_collate

from multi_gpu_training.data.batch import attach, head, to_device
from multi_gpu_training.data.order import (
    GlobalBatchSource,
    Share,
    ShuffledBatches,
    derive_seed,
    seed_everything,
    shares,
)
from multi_gpu_training.data.prefetch import on_device
from multi_gpu_training.distributed.cleanup import die_with_parent, end_workers, for_one_process

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Feeding:
    """How a loader of one rank works; the same on every rank but for `rank` and `device`.

    weights: relative share of the batch per rank, in whole numbers; None: equal.
    evaluating: empty shares are left out, and every pass is the same, whatever the epoch.
    """

    micro_size: int
    seed: int
    rank: int = 0
    ranks: int = 1
    weights: tuple[int, ...] | None = None
    device: torch.device = CPU
    collate: Collate = torch_collate
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    evaluating: bool = False


class ShareLoader:
    """Iterates over this rank's micro-batches of one epoch, then moves on to the next epoch.

    `seek(epoch, start)` says where the next iteration begins; nothing before it is loaded.
    """

    def __init__(self, dataset: Dataset[Any], source: GlobalBatchSource, feeding: Feeding) -> None:
        self.dataset = dataset
        self.source = source
        self.feeding = feeding
        self.epoch = 0
        self.start = 0
        self._template: Any = None
        self._fetch = _Fetch(dataset, feeding.collate, feeding.num_workers == 0)
        if self._fetch.tensors is not None and feeding.device.type == "cpu":
            # One index gathers a batch of tensors; processes would only carry it about.
            feeding = replace(
                feeding, num_workers=0, prefetch_factor=None, persistent_workers=False
            )
        self._loader = _data_loader(self._fetch, _Plan(self), feeding)

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        return len(self.source)

    def __len__(self) -> int:
        """Micro-batches in an epoch, for this rank."""
        micro = self.feeding.micro_size
        if isinstance(self.source, ShuffledBatches):
            full, rest = divmod(self.source.samples, self.source.batch_size)
            return full * -(-self.source.batch_size // micro) + -(-rest // micro)
        batches = self.source.batches(self.feeding.seed, self.epoch)
        return sum(max(1, -(-len(batch) // micro)) for batch in batches)

    def seek(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start

    def set_shares(self, **how: Any) -> None:
        """Cut batches otherwise from the next pass on: other `weights`, or another `rank`."""
        self.feeding = replace(self.feeding, **how)

    def plan(self) -> Iterator[Share]:
        feeding = self.feeding
        found = shares(
            self.source,
            feeding.micro_size,
            feeding.seed,
            self.epoch,
            feeding.rank,
            feeding.ranks,
            self.start,
            feeding.weights,
        )
        return (share for share in found if share.count) if feeding.evaluating else found

    def __iter__(self) -> Iterator[Any]:
        for share, batch in on_device(self.host_batches(), self.feeding.device):
            yield attach(batch, share)
        if not self.feeding.evaluating:
            self.seek(self.epoch + 1)

    def host_batches(self) -> Iterator[tuple[Share, Any]]:
        for share, batch in self._loader:
            if share.count:
                self._template = (share, batch)
                yield share, batch
            else:
                yield share, self.stand_in_on_host(share, 0)

    @property
    def gathers(self) -> bool:
        """Whether a batch is one gather from tensors in memory: workers would not help."""
        return self._fetch.tensors is not None

    def stand_in(self, share: Share) -> Any:
        """A sample for a rank whose share is empty but whose model must run all the same."""
        return to_device(self.stand_in_on_host(share, 1), self.feeding.device)

    def stand_in_on_host(self, share: Share, count: int) -> Any:
        if self._template is None:
            first = next(iter(next(iter(self.source.batches(self.feeding.seed, share.epoch)))))
            sample = replace(share, indices=(first,), count=1)
            self._template = (sample, self._fetch[sample][1])
        return head(self._template[1], count)


class _Plan(Sampler[Share]):
    def __init__(self, loader: ShareLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Share]:
        return self.loader.plan()


class _Fetch(Dataset[Any]):
    """Turns a Share into a batch. Each sample's randomness is keyed by (seed, epoch, sample)."""

    def __init__(self, dataset: Dataset[Any], collate: Collate, in_main_process: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.in_main_process = in_main_process
        # Plain tensors know no randomness: one gather gives what collating would.
        self.tensors = (
            dataset.tensors if type(dataset) is TensorDataset and collate is torch_collate else None
        )

    def __getitem__(self, share: Share) -> tuple[Share, Any]:
        if not share.indices:
            return share, None
        if self.tensors is not None:
            index = torch.tensor(share.indices)
            return share, [tensor[index] for tensor in self.tensors]
        if self.in_main_process:
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            try:
                return share, self._collated(share)
            finally:
                torch.set_rng_state(states[0])
                random.setstate(states[1])
                np.random.set_state(states[2])
        return share, self._collated(share)

    def _collated(self, share: Share) -> Any:
        samples = []
        for index in share.indices:
            seed_everything(derive_seed(share.sample_seed, index))
            samples.append(self.dataset[index])
        seed_everything(share.key)
        return self.collate(samples)


class WorkerStart:
    """Runs first in a loader worker. Signals are the rank's to handle: a worker that dies of the
    group's SIGTERM would take the rank down before it has saved."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then
        for_one_process()

    def __call__(self, worker: int) -> None:
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def wait_for_no_worker() -> None:
    """A run that ends does not wait 5 s and again 5 s for a batch that is being read: workers are
    killed when their rank exits."""
    worker_utils.MP_STATUS_CHECK_INTERVAL = 0.05


def as_is(item: Any) -> Any:
    return item


def _data_loader(fetch: _Fetch, plan: _Plan, feeding: Feeding) -> DataLoader[Any]:
    if feeding.num_workers:
        atexit.unregister(end_workers)
        atexit.register(end_workers)
    return DataLoader(
        fetch,
        sampler=plan,
        batch_size=None,
        collate_fn=as_is,
        num_workers=feeding.num_workers,
        pin_memory=feeding.pin_memory,
        prefetch_factor=feeding.prefetch_factor,
        persistent_workers=feeding.persistent_workers,
        worker_init_fn=WorkerStart(feeding.worker_init_fn) if feeding.num_workers else None,
        # Without its own generator the loader would draw from the training's random numbers.
        generator=torch.Generator(),
    )
