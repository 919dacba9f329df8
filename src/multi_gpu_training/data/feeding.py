"""From a dataset or DataLoader as the user has it to this rank's loader."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import default_collate as torch_collate

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.items import ItemLoader
from multi_gpu_training.data.loader import Feeding, ShareLoader
from multi_gpu_training.data.order import (
    FirstBatches,
    FormsBatches,
    GlobalBatchSource,
    ShuffledBatches,
)
from multi_gpu_training.data.own_batches import OwnBatches
from multi_gpu_training.data.rank_agreement import check_same_data
from multi_gpu_training.data.resident import ResidentLoader, fits_on_gpu
from multi_gpu_training.data.sample_count import BatchSizeFn
from multi_gpu_training.data.samplers import BatchSamplerBatches, SamplerBatches
from multi_gpu_training.data.shard_sources import is_hugging_face, shuffle_state
from multi_gpu_training.data.sharded_stream import ShardedStream
from multi_gpu_training.data.stream import StreamLoader
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.torch_internals import asked_samples

Loader = ShareLoader | StreamLoader | OwnBatches
Data = Dataset[Any] | DataLoader[Any]
# What is validated on: one set, or several by name.
ValData = Data | Mapping[str, Data]
ValLoaders = Loader | dict[str, Loader]


def is_named(data: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether these are several sets by name. A dict with numbers for keys is one dataset."""
    return isinstance(data, Mapping) and all(isinstance(name, str) for name in data)


@dataclass(frozen=True)
class BatchSizes:
    """per_rank x accumulation x ranks = global_batch, short where that does not divide."""

    per_rank: int
    accumulation: int
    ranks: int
    global_batch: int

    @property
    def micro(self) -> int:
        """Samples of a micro-batch over all ranks."""
        return -(-self.global_batch // self.accumulation)


def batch_sizes(
    config: MultiGPUConfig,
    replicas: int,
    per_rank: int | None = None,
    full: int = 0,
    whole: int | None = None,
) -> BatchSizes:
    """Sizes for `replicas` model copies: ranks, or the GPUs of one DataParallel process.

    With `global_batch_size` the accumulation follows from what a GPU may hold (`batch_size`,
    where it was given), so that the step stays the same on any number of GPUs. So it does where
    `full` ranks make up the run and some of them are away, and where a batch sampler gives
    global batches of `whole` samples.
    """
    limit = per_rank or config.batch_size
    accumulation = config.gradient_accumulation_steps
    if config.global_batch_size is None and whole is None and full <= replicas:
        return BatchSizes(limit, accumulation, replicas, limit * accumulation * replicas)
    total = whole or config.global_batch_size or limit * accumulation * full
    if total < replicas and whole is None:
        raise DataError(
            f"global_batch_size={total} is smaller than world_size={replicas}; "
            f"use at least {replicas}, or fewer ranks",
            code="MGT302",
        )
    if per_rank or "batch_size" in config.model_fields_set or full > replicas:
        accumulation = max(accumulation, -(-total // (limit * replicas)))
    accumulation = min(accumulation, total)
    return BatchSizes(-(-total // (accumulation * replicas)), accumulation, replicas, total)


def training_loader(
    data: Data | None,
    config: MultiGPUConfig,
    placement: Placement,
    replicas: int,
    batch_size_fn: BatchSizeFn | None = None,
) -> tuple[Loader, BatchSizes]:
    if data is None:
        return _own_batches_loader(config, placement, replicas, batch_size_fn)
    brought = data if isinstance(data, DataLoader) else None
    dataset = _dataset(data)
    sizes = _sizes(brought, config, placement, replicas)
    feeding = _feeding(brought, dataset, config, placement, sizes, batch_size_fn)
    if isinstance(dataset, IterableDataset):
        _settle_stream(dataset, placement)
        steps = config.steps_per_epoch
        size = 1 if feeding.items else sizes.global_batch
        return StreamLoader(dataset, size, feeding, steps), sizes
    check_same_data(dataset, "training dataset", placement)
    source = _training_source(brought, dataset, config, sizes, feeding)
    return _sized_loader(dataset, source, feeding, config, placement), sizes


def _training_source(
    brought: DataLoader[Any] | None,
    dataset: Any,
    config: MultiGPUConfig,
    sizes: BatchSizes,
    feeding: Feeding,
) -> GlobalBatchSource:
    """The global batches of an epoch over a dataset that has a length."""
    samples = _length(dataset, "training dataset")
    if config.steps_per_epoch is not None:
        raise DataError(
            f"steps_per_epoch={config.steps_per_epoch} is for streams, which have no length; "
            f"{type(dataset).__name__} has {samples} samples, and an epoch is one pass over them: "
            "drop it, or set max_steps"
        )
    source: GlobalBatchSource
    if brought is not None:
        source = _brought_source(brought, samples, sizes.global_batch, feeding)
    elif isinstance(dataset, FormsBatches):
        source = dataset.global_batches(sizes.global_batch)
    else:
        source = ShuffledBatches(samples, sizes.global_batch, config.shuffle)
    if feeding.unit > 1 and len(source) == 0:
        raise DataError(
            f"drop_last=True leaves no step: the DataLoader gives fewer than {feeding.unit} "
            "samples, one global batch; use a smaller batch, or drop_last=False",
            code="MGT302",
        )
    return source


def count_steps(
    data: Data | None, config: MultiGPUConfig, placement: Placement, replicas: int
) -> int | None:
    """Steps in an epoch over `data`; None for a stream, unless the config says it."""
    if data is None or isinstance(_dataset(data), IterableDataset):
        return config.steps_per_epoch
    brought, dataset = data if isinstance(data, DataLoader) else None, _dataset(data)
    sizes = _sizes(brought, config, placement, replicas)
    feeding = _feeding(brought, dataset, config, placement, sizes, None)
    return len(_training_source(brought, dataset, config, sizes, feeding))


def _sizes(
    brought: DataLoader[Any] | None, config: MultiGPUConfig, placement: Placement, replicas: int
) -> BatchSizes:
    # A DataLoader's batch size is what its author runs on one GPU, like batch_size.
    given = "batch_size" in config.model_fields_set
    its_own = brought.batch_size if brought is not None and not given else None
    full = placement.identity.full_world_size
    return batch_sizes(config, replicas, its_own, full, _own_batch_size(brought, config))


def _own_batches_loader(
    config: MultiGPUConfig,
    placement: Placement,
    replicas: int,
    batch_size_fn: BatchSizeFn | None,
) -> tuple[Loader, BatchSizes]:
    """Nobody knows how large batches will be that the user's loop makes, unless the config says."""
    known = {"batch_size", "global_batch_size"} & config.model_fields_set
    sizes = BatchSizes(0, config.gradient_accumulation_steps, replicas, 0)
    if known:
        sizes = _sizes(None, config, placement, replicas)
    elif config.lr_scaling != "none":
        raise ConfigError(
            f"lr_scaling={config.lr_scaling} multiplies the rate by the batch size, which is "
            "unknown without a dataset; set batch_size, or drop lr_scaling"
        )
    feeding = _feeding(None, None, config, placement, sizes, batch_size_fn)
    return OwnBatches(feeding, config.steps_per_epoch), sizes


def validation_loader(
    data: Data,
    config: MultiGPUConfig,
    placement: Placement,
    sizes: BatchSizes,
    training: Loader | None = None,
    batch_size_fn: BatchSizeFn | None = None,
    *,
    limit: int | None = None,
    purpose: str = "validation dataset",
    in_order: bool = False,
) -> Loader:
    """Each sample once, in order; a rank without a share of a batch just does not see it. Of a
    DataLoader, the samples that its sampler gives. `training`: the loader beside this one.

    limit: only so many global batches, the same samples on any number of ranks. in_order: what a
    DataLoader shuffles comes in the dataset's order. purpose: names the data in errors.
    """
    if not sizes.global_batch:
        sizes = _sizes(None, config, placement, sizes.ranks)
    brought = data if isinstance(data, DataLoader) else None
    dataset: Any = _dataset(data)
    feeding = _feeding(brought, dataset, config, placement, sizes, batch_size_fn, evaluating=True)
    if isinstance(dataset, IterableDataset):
        _settle_stream(dataset, placement)
        if training is not None and training.dataset is dataset:
            dataset = copy.copy(dataset)  # set_epoch must not reach a training pass half done
        size = feeding.micro_size if limit is None else sizes.global_batch
        return StreamLoader(dataset, 1 if feeding.items else size, feeding, limit=limit)
    check_same_data(dataset, purpose, placement)
    samples = _length(dataset, purpose)
    # With sync_bn, a batch may be normalised as a whole: then which samples it has must not depend
    # on the ranks.
    whole = limit is not None or config.sync_bn
    size = sizes.global_batch if whole else feeding.micro_size
    source: GlobalBatchSource = ShuffledBatches(samples, size, shuffle=False)
    if brought is not None:
        source = _brought_source(brought, samples, size, feeding)
    if in_order and isinstance(source, ShuffledBatches):
        source = ShuffledBatches(samples, source.batch_size, False, feeding.unit)
    return _sized_loader(dataset, source, feeding, config, placement, limit)


def _settle_stream(dataset: Any, placement: Placement) -> None:
    """Let the ranks find out together how long the shards of a stream are, and that they all read
    the same order. Collective."""
    if isinstance(dataset, ShardedStream):
        dataset.settle(placement.dp_rank, placement.dp_size, placement.gather_json)
    elif is_hugging_face(dataset):
        states = placement.gather_json(shuffle_state(dataset))
        if any(state != states[0] for state in states):
            raise DataError(
                "stream.shuffle() without a seed draws a different order on every rank, so samples "
                "would come twice or never; use shuffle(seed=N), or "
                "ShardedStream.from_datasets(stream) without .shuffle()",
                code="MGT303",
            )


def _sized_loader(
    dataset: Dataset[Any],
    source: GlobalBatchSource,
    feeding: Feeding,
    config: MultiGPUConfig,
    placement: Placement,
    limit: int | None = None,
) -> ShareLoader:
    if isinstance(source, (SamplerBatches, BatchSamplerBatches)):
        _check_same_order(source, feeding.seed, placement)
    if limit is not None:
        source = FirstBatches(source, limit)
    if feeding.items:
        return ItemLoader(dataset, source, feeding)
    # On all ranks or on none: ranks with unequal GPUs must still agree on how steps are run.
    if placement.all_min(int(fits_on_gpu(dataset, feeding, config))):
        return ResidentLoader(dataset, source, feeding)  # type: ignore[arg-type]
    if config.data_on_gpu:
        raise DataError(
            f"data_on_gpu=true, but {type(dataset).__name__} cannot live on {feeding.device}: it "
            "takes a GPU, a TensorDataset without a collate_fn, and memory (gpu_data_gb)"
        )
    return ShareLoader(dataset, source, feeding)


# What a DataLoader brings


def _own_batches(brought: DataLoader[Any] | None) -> Any:
    """The batch sampler that the user gave; torch makes one itself out of a batch_size."""
    return None if brought is None or brought.batch_size is not None else brought.batch_sampler


def _own_batch_size(brought: DataLoader[Any] | None, config: MultiGPUConfig) -> int | None:
    """The size of a batch sampler's batches, each of which is a global batch. A plain one is
    only a size and an order: there `global_batch_size` wins."""
    sampler = _own_batches(brought)
    if type(sampler) is BatchSampler and config.global_batch_size is not None:
        return None
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _brought_source(
    brought: DataLoader[Any],
    samples: int,
    size: int,
    feeding: Feeding,
) -> GlobalBatchSource:
    """The batches of a DataLoader, in global batches of `size`."""
    own = _own_batches(brought)
    if own is not None and type(own) is not BatchSampler:
        _refuse_part_of_a_rank(own)
        return BatchSamplerBatches(own)
    sampler = brought.sampler if own is None else own.sampler
    size = 1 if feeding.items else size
    if type(sampler) is DistributedSampler:
        # Ours are exact shares of all.
        return ShuffledBatches(samples, size, sampler.shuffle, feeding.unit)
    _refuse_part_of_a_rank(sampler)
    # Others than torch's own, and those over a part of the dataset, are asked for their order.
    if type(sampler) is SequentialSampler and len(sampler) == samples:
        return ShuffledBatches(samples, size, False, feeding.unit)
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and asked_samples(sampler) is None
        and len(sampler) == samples
    ):
        return ShuffledBatches(samples, size, True, feeding.unit)
    return SamplerBatches(sampler, size, feeding.unit)


def _refuse_part_of_a_rank(sampler: Any) -> None:
    """A sampler that gives each rank its own part, which the ranks would share out once more."""
    inner = getattr(sampler, "sampler", None)
    for one in (sampler, inner):
        parts = getattr(one, "num_replicas", None)
        if isinstance(parts, int) and parts > 1:
            raise DataError(
                f"{type(one).__name__} gives a rank only its part of the data (num_replicas="
                f"{parts}), and the manager shares batches over the ranks itself: give the "
                "sampler that one process would use, or num_replicas=1, rank=0",
                code="MGT303",
            )


def _check_same_order(
    source: SamplerBatches | BatchSamplerBatches, seed: int, placement: Placement
) -> None:
    """Refuse a sampler that draws another order on every rank: samples would be seen twice or
    never. Collective."""
    orders = placement.gather_json(source.rehearse(seed))
    if len(set(orders)) > 1:
        raise DataError(
            f"{type(source.sampler).__name__} draws {len(set(orders))} different orders on "
            f"{len(orders)} ranks, but the ranks share out one. Let it draw from a generator that "
            "it keeps as an attribute, from the global ones, or by set_epoch(epoch), and leave "
            "sharing over the ranks to the manager",
            code="MGT303",
        )


def _drop_unit(brought: DataLoader[Any] | None, sizes: BatchSizes, evaluating: bool) -> int:
    """With drop_last, the samples that must be there for a batch: of a step in training, of the
    DataLoader's own batch in validation. Else 1."""
    if brought is None:
        return 1
    own = _own_batches(brought)
    if type(own) is BatchSampler:
        return (own.batch_size if evaluating else sizes.global_batch) if own.drop_last else 1
    if own is not None or not brought.drop_last:
        return 1
    return (brought.batch_size or 1) if evaluating else sizes.global_batch


def _feeding(
    brought: DataLoader[Any] | None,
    dataset: Any,
    config: MultiGPUConfig,
    placement: Placement,
    sizes: BatchSizes,
    batch_size_fn: BatchSizeFn | None,
    evaluating: bool = False,
) -> Feeding:
    def setting(name: str) -> Any:
        """The config's where it was set, else that of the DataLoader the user brought."""
        given = brought is None or name in config.model_fields_set
        return getattr(config if given else brought, name)

    workers = setting("num_workers")
    items = brought is not None and brought.batch_size is None and brought.batch_sampler is None
    micro_size = sizes.per_rank * sizes.ranks if evaluating else sizes.micro
    if "batch_size" not in config.model_fields_set and (
        items or (_own_batches(brought) is not None and sizes.accumulation == 1 and not evaluating)
    ):
        micro_size = sys.maxsize  # nobody said how much a GPU may hold at a time
    return Feeding(
        micro_size=micro_size,
        seed=config.seed,
        rank=placement.dp_rank,
        ranks=placement.dp_size,
        device=placement.device,
        collate=(
            brought.collate_fn
            if brought is not None
            else getattr(dataset, "collate", torch_collate)
        ),
        num_workers=workers,
        pin_memory=config.pin_memory and placement.device.type == "cuda",
        prefetch_factor=(setting("prefetch_factor") or 2) if workers else None,
        persistent_workers=setting("persistent_workers") and workers > 0,
        worker_init_fn=brought.worker_init_fn if brought is not None else None,
        evaluating=evaluating,
        unit=_drop_unit(brought, sizes, evaluating),
        items=sizes.accumulation if items else 0,
        batch_size_fn=batch_size_fn,
    )


def _dataset(data: Data) -> Dataset[Any]:
    if isinstance(data, DataLoader):
        changed = type(data).__iter__ is not DataLoader.__iter__
        if changed and not type(data).__module__.startswith("torchdata."):
            raise DataError(
                f"{type(data).__name__} has its own __iter__, which the manager would bypass: it "
                "reads the dataset itself, to split batches over the ranks. Do that work in the "
                "dataset, in collate_fn or in augment, and pass a plain DataLoader",
                code="MGT303",
            )
        return data.dataset
    if isinstance(data, Mapping) and 0 not in data:  # datasets are numbered from 0
        names = ", ".join(map(repr, list(data)[:5]))
        raise DataError(
            f"{type(data).__name__} is not a dataset: it holds {names}; give one of them, such as "
            "data['train']"
        )
    if isinstance(data, IterableDataset) or (
        hasattr(data, "__getitem__") and not isinstance(data, str | bytes)
    ):
        return data
    raise DataError(
        f"{type(data).__name__} is not a dataset: give an object with __len__ and __getitem__, a "
        "torch IterableDataset, or a DataLoader"
    )


def _length(dataset: Any, purpose: str) -> int:
    name = type(dataset).__name__
    try:
        samples = len(dataset)
    except TypeError:
        raise DataError(
            f"the {purpose} {name} has no length; give it __len__, or make it a torch "
            "IterableDataset to read it as a stream"
        ) from None
    if samples == 0:
        raise DataError(
            f"the {purpose} {name} has 0 samples; check its path and its filters", code="MGT302"
        )
    return samples


def place_after_resume(
    loader: Loader, position: int, saved: int, size: int, epoch_is_done: bool, steps: int | None
) -> int:
    """Where an epoch goes on whose checkpoint stands at `position`, in global batches of `saved`
    samples and an epoch of `steps` of them (None: not known), with batches of `size` now."""
    source = getattr(loader, "source", None)
    if epoch_is_done:
        return position if loader.steps is None else loader.steps
    if isinstance(source, (SamplerBatches, ShuffledBatches)) or isinstance(loader, StreamLoader):
        if loader.feeding.items or saved == size or position == 0:
            return position
        seen = position * saved
        if seen % size == 0:
            return seen // size
        raise ConfigError(
            f"the checkpoint is {seen} samples into an epoch, which "
            f"global_batch_size={size} does not divide; continue with "
            f"global_batch_size={saved}, as it was, or from the end of an epoch",
            code="MGT703",
        )
    # Batches that a batch sampler or the dataset itself forms: positions count those.
    changed = steps is not None and loader.steps != steps
    if not isinstance(source, BatchSamplerBatches):  # for which the size means nothing
        changed = changed or saved != size
    if changed and position:
        was = f"{steps} batches" if steps is not None else f"batches of {saved}"
        raise ConfigError(
            f"the checkpoint is at step {position} of an epoch of {was}; with "
            f"global_batch_size={size} this {type(loader.dataset).__name__} forms other batches "
            f"({loader.steps} an epoch): continue with global_batch_size={saved} and the batch "
            "sampler as it was, or from the end of an epoch",
            code="MGT703",
        )
    return position
