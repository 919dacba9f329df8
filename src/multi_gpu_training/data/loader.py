"""The loader of datasets with a length: each rank's share of every global batch."""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from torch.utils.data import _utils as worker_utils
from torch.utils.data import default_collate as torch_collate

from multi_gpu_training.data.batch import attach, emptied, stand_in_of, to_device
from multi_gpu_training.data.generators import global_generators_kept, own_generators, seed_all
from multi_gpu_training.data.order import (
    GlobalBatchSource,
    Share,
    ShuffledBatches,
    derive_seed,
    seed_everything,
    shares,
)
from multi_gpu_training.data.passes import EpochLoader
from multi_gpu_training.data.prefetch import on_device
from multi_gpu_training.data.sample_count import BatchSizeFn, fits, rows_of
from multi_gpu_training.data.samplers import BatchSamplerBatches, SamplerBatches
from multi_gpu_training.distributed.cleanup import die_with_parent, end_workers, for_one_process
from multi_gpu_training.errors import DataError

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Feeding:
    """How a loader of one rank works; the same on every rank but for `rank` and `device`.

    weights: relative share of the batch per rank, in whole numbers; None: equal.
    evaluating: empty shares are left out, and every pass is the same, whatever the epoch.
    unit: a stream leaves out what does not fill a batch of this size at its end (`drop_last`).
    items: each item of the dataset is a ready batch, cut into at least this many micro-batches.
    batch_size_fn: the user's count of the samples in a batch.
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
    unit: int = 1
    items: int = 0
    batch_size_fn: BatchSizeFn | None = None


class ShareLoader(EpochLoader):
    """Iterates over this rank's micro-batches of one epoch, then moves on to the next epoch.

    `seek(epoch, start)` says where the next iteration begins; nothing before it is loaded.
    """

    def __init__(self, dataset: Dataset[Any], source: GlobalBatchSource, feeding: Feeding) -> None:
        super().__init__()
        self.dataset = dataset
        self.source = source
        # Without a sampler, the samples are counted once: schedules and a resume rely on it.
        self._counted = len(dataset) if isinstance(source, ShuffledBatches) else None  # type: ignore[arg-type]
        self.feeding = feeding
        self.before_pass: Callable[[], None] = lambda: None  # looks at the data, should they change
        self._template: Any = None  # (samples in it, batch) on the host, for empty shares
        self._fetch = self.make_fetch(feeding.num_workers == 0)
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
        micro, source = self.feeding.micro_size, self.source
        if isinstance(source, (ShuffledBatches, SamplerBatches)):
            full, rest = divmod(source.drawn_samples, source.batch_size)
            return full * -(-source.batch_size // micro) + -(-rest // micro)
        if isinstance(source, BatchSamplerBatches):
            lengths = source.batch_lengths(self.feeding.seed, self.epoch)
        else:
            lengths = [len(batch) for batch in source.batches(self.feeding.seed, self.epoch)]
        return sum(max(1, -(-length // micro)) for length in lengths)

    def make_fetch(self, in_main_process: bool) -> Fetch:
        """What turns a share into a batch."""
        return Fetch(self.dataset, self.feeding.collate, in_main_process)

    @property
    def evaluating(self) -> bool:
        return self.feeding.evaluating

    def set_shares(self, **how: Any) -> None:
        """Share out batches by other `weights`, or for another `rank`, from the next pass on."""
        self.feeding = replace(self.feeding, **how)

    def plan(self) -> Iterator[Share]:
        feeding = self.feeding
        self._refuse_other_length()
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

    def _refuse_other_length(self) -> None:
        """Raise if the dataset has grown or shrunk since the run was set up."""
        had = self._counted
        has = None if had is None else len(self.dataset)  # type: ignore[arg-type]
        if has != had:
            raise DataError(
                f"the dataset had {had} samples when the run was set up, and has {has} now; keep "
                "its length, or give a DataLoader with a sampler that says which samples an epoch "
                "has (the sampler's length may change)"
            )

    def one_pass(self) -> Iterator[Any]:
        self.before_pass()
        for share, batch in on_device(self.host_batches(), self.feeding.device):
            yield attach(batch, share)
        if not self.feeding.evaluating:
            self.seek(self.epoch + 1)

    def host_batches(
        self, fetched: Iterable[tuple[Share, Any]] | None = None
    ) -> Iterator[tuple[Share, Any]]:
        """What was fetched, by default by the workers, with something of the right form for an
        empty share."""
        for share, batch in started(self._loader) if fetched is None else fetched:
            if share.count:
                self._template = (share.count, batch)
                yield share, batch
            elif not self.feeding.evaluating:
                yield share, emptied(self.stand_in_on_host(share)[0])

    def fetched_here(self) -> Iterator[Any]:
        """The same micro-batches, without workers and without moving on to the next epoch."""
        fetch = self.make_fetch(True)
        for share, batch in self.host_batches(fetch[share] for share in self.plan()):
            yield attach(to_device(batch, self.feeding.device), share)

    refetches = True  # whether `fetch_again` can make any part of a share into a batch

    def fetch_again(self, share: Share) -> Any:
        """The samples of a share once more, collated in this process."""
        fetch = Fetch(self.dataset, self.feeding.collate, True)
        return to_device(fetch[share][1], self.feeding.device)

    @property
    def gathers(self) -> bool:
        """Whether a batch is one gather from tensors in memory: workers would not help."""
        return self._fetch.tensors is not None

    def stand_in(self, share: Share) -> tuple[Any, int]:
        """Samples for a rank whose share is empty but whose model must run all the same, and how
        many there are."""
        batch, size = self.stand_in_on_host(share)
        return to_device(batch, self.feeding.device), size

    def stand_in_on_host(self, share: Share) -> tuple[Any, int]:
        if self._template is None:
            for index in chain.from_iterable(self.source.batches(self.feeding.seed, share.epoch)):
                found, batch = self._fetch[replace(share, indices=(index,), count=1, left_out=0)]
                if found.count:  # the collate_fn may drop it
                    self._template = (1, batch)
                    break
            else:
                raise DataError("collate_fn dropped every sample of the dataset", code="MGT302")
        size, batch = self._template
        return stand_in_of(batch, size)


class _Plan(Sampler[Share]):
    def __init__(self, loader: ShareLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Share]:
        return self.loader.plan()


class Fetch(Dataset[Any]):
    """Turns a Share into a batch. Each sample's randomness is keyed by (seed, epoch, sample)."""

    def __init__(self, dataset: Dataset[Any], collate: Collate, in_main_process: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.in_main_process = in_main_process
        self._own: tuple[int, list[Any]] | None = None  # the dataset's generators, in an epoch
        self._ready: bool | None = None  # whether it gives ready batches; None: not yet tried
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
        if self._own is None or self._own[0] != share.epoch:
            # Once an epoch, and in the process that uses them: a worker may make its own.
            self._own = (share.epoch, own_generators(self.dataset))
        if self.in_main_process:
            with global_generators_kept(self._own[1]):
                return self.collated(share)
        return self.collated(share)

    def collated(self, share: Share) -> tuple[Share, Any]:
        """The share and its batch. A collate_fn may leave samples out, even all."""
        if self._fetches_batches(share):
            batch = self.dataset.__getitems__(list(share.indices))  # type: ignore[attr-defined]
            return share, self.collate(batch)
        samples = [self.sample(share, index) for index in share.indices]
        seed_everything(share.key)
        return collated(self.collate, samples, share)

    def _fetches_batches(self, share: Share) -> bool:
        """Whether the dataset's `__getitems__` returns ready batches rather than lists of samples,
        for a collate_fn that passes them on. Randomness then belongs to the share."""
        if self._ready is None:
            several = getattr(self.dataset, "__getitems__", None)
            self._ready = False
            if several is not None and self.collate is not torch_collate:
                with global_generators_kept():
                    one = several(list(share.indices[:1]))
                self._ready = not (isinstance(one, (list, tuple)) and len(one) == 1)
        if self._ready:
            seed_everything(share.key)
        return self._ready

    def sample(self, share: Share, index: int) -> Any:
        seed = derive_seed(share.sample_seed, index)
        seed_everything(seed)
        if self._own is not None:
            seed_all(self._own[1], seed)
        try:
            return self.dataset[index]
        except NotImplementedError:  # torch's loader prefers __getitems__, too
            several = getattr(self.dataset, "__getitems__", None)
            if several is None:
                raise
            return several([index])[0]
        except StopIteration:  # `for` would take it for the end of the epoch
            raise DataError(
                f"sample {index} of {type(self.dataset).__name__} raised StopIteration; a dataset "
                "gives every sample that its length promises, or is a torch IterableDataset",
                code="MGT302",
            ) from None


def collated(collate: Collate, samples: list[Any], share: Share) -> tuple[Share, Any]:
    """A batch of samples and its share, which counts only those that the collate_fn kept.

    A dataset says None for what it cannot read, and the collate_fn drops it. Other drops are seen
    where the tensors of a batch agree on fewer rows. An empty share has no batch.
    """
    if collate is torch_collate:
        return share, collate(samples)
    there = [sample is not None for sample in samples]
    kept = sum(there)
    if kept < len(samples):
        indices = tuple(i for i, is_there in zip(share.indices, there, strict=True) if is_there)
        share = replace(share, indices=indices, count=kept, left_out=len(samples) - kept)
        if not kept:
            return share, None
    try:
        batch = collate(samples)
    except Exception as error:
        error.add_note(
            f"collate_fn got the {len(samples)} samples of this rank's part of a batch. If it "
            "leaves out all of them, let the dataset return None for what it leaves out: such a "
            "rank then waits for the others"
        )
        raise
    rows = None if fits(batch, kept) else rows_of(batch)
    if rows is not None and 0 < rows < kept:
        share = replace(share, count=rows, left_out=len(samples) - rows)
    return share, batch


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
        show = sys.excepthook

        def without_hang_ups(kind: Any, error: BaseException, trace: Any) -> None:
            # A rank that stops no longer takes the batch that a thread here hands over.
            hung_up = isinstance(error, ConnectionError | EOFError)
            if not (hung_up and threading.current_thread() is not threading.main_thread()):
                show(kind, error, trace)

        sys.excepthook = without_hang_ups
        if self.then is not None:
            self.then(worker)


def wait_for_no_worker() -> None:
    """A run that ends does not wait 5 s and again 5 s for a batch that is being read: workers are
    killed when their rank exits."""
    worker_utils.MP_STATUS_CHECK_INTERVAL = 0.05


def as_is(item: Any) -> Any:
    return item


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's iterator. Where workers are spawned, as on macOS, they get a pickled dataset."""
    try:
        return iter(loader)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if not loader.num_workers or multiprocessing.get_start_method() == "fork":
            raise
        raise DataError(
            f"num_workers={loader.num_workers}: the dataset or its collate_fn cannot be sent to a "
            f"worker process ({error}); use functions of a module instead of lambdas and local "
            "functions, or num_workers=0"
        ) from error


def _data_loader(fetch: Fetch, plan: _Plan, feeding: Feeding) -> DataLoader[Any]:
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
