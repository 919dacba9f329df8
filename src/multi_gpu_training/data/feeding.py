"""From a dataset or DataLoader as the user has it to this rank's loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from multi_gpu_training.data.loader import Feeding, ShareLoader
from multi_gpu_training.data.order import FormsBatches, GlobalBatchSource, ShuffledBatches
from multi_gpu_training.data.resident import ResidentLoader, fits_on_gpu
from multi_gpu_training.data.samplers import BatchSamplerBatches, SamplerBatches
from multi_gpu_training.data.stream import StreamLoader
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import DataError
from multi_gpu_training.torch_internals import asked_samples

Loader = ShareLoader | StreamLoader
Data = Dataset[Any] | DataLoader[Any]


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
    config: MultiGPUConfig, replicas: int, per_rank: int | None = None, full: int = 0
) -> BatchSizes:
    """Sizes for `replicas` model copies: ranks, or the GPUs of one DataParallel process.

    With `global_batch_size` the accumulation follows from what a GPU may hold (`batch_size`,
    where it was given), so that the step stays the same on any number of GPUs. So it does where
    `full` ranks make up the run and some of them are away.
    """
    limit = per_rank or config.batch_size
    accumulation = config.gradient_accumulation_steps
    if config.global_batch_size is None and full <= replicas:
        return BatchSizes(limit, accumulation, replicas, limit * accumulation * replicas)
    total = config.global_batch_size or limit * accumulation * full
    if total < replicas:
        raise DataError(
            f"global_batch_size={total} is smaller than world_size={replicas}; "
            f"use at least {replicas}, or fewer ranks"
        )
    if per_rank or "batch_size" in config.model_fields_set or full > replicas:
        accumulation = max(accumulation, -(-total // (limit * replicas)))
    accumulation = min(accumulation, total)
    return BatchSizes(-(-total // (accumulation * replicas)), accumulation, replicas, total)


def training_loader(
    data: Data, config: MultiGPUConfig, placement: Placement, replicas: int
) -> tuple[Loader, BatchSizes]:
    brought = data if isinstance(data, DataLoader) else None
    dataset = _dataset(data)
    # A DataLoader's batch size is what its author runs on one GPU, like batch_size.
    given = "batch_size" in config.model_fields_set
    its_own = brought.batch_size if brought is not None and not given else None
    sizes = batch_sizes(config, replicas, its_own, placement.identity.full_world_size)
    feeding = _feeding(brought, dataset, config, placement, sizes.micro)
    if isinstance(dataset, IterableDataset):
        steps = config.steps_per_epoch
        return StreamLoader(dataset, sizes.global_batch, feeding, steps), sizes
    samples = _length(dataset, "training")
    if config.steps_per_epoch is not None:
        raise DataError(
            f"steps_per_epoch={config.steps_per_epoch} is for streams, which have no length; "
            f"{type(dataset).__name__} has {samples} samples, and an epoch is one pass over them: "
            "drop it, or set max_steps"
        )
    source = _source(brought, dataset, samples, config, sizes)
    return _sized_loader(dataset, source, feeding, config, placement), sizes


def validation_loader(
    data: Data, config: MultiGPUConfig, placement: Placement, sizes: BatchSizes
) -> Loader:
    """Each sample once, in order; a rank without a share of a batch just does not see it."""
    brought = data if isinstance(data, DataLoader) else None
    dataset = _dataset(data)
    size = sizes.per_rank * sizes.ranks
    feeding = _feeding(brought, dataset, config, placement, size, evaluating=True)
    if isinstance(dataset, IterableDataset):
        return StreamLoader(dataset, size, feeding)
    source = ShuffledBatches(_length(dataset, "validation"), size, shuffle=False)
    return _sized_loader(dataset, source, feeding, config, placement)


def _sized_loader(
    dataset: Dataset[Any],
    source: GlobalBatchSource,
    feeding: Feeding,
    config: MultiGPUConfig,
    placement: Placement,
) -> ShareLoader:
    # On all ranks or on none: ranks with unequal GPUs must still agree on how steps are run.
    if placement.all_min(int(fits_on_gpu(dataset, feeding, config))):
        return ResidentLoader(dataset, source, feeding)  # type: ignore[arg-type]
    if config.data_on_gpu:
        raise DataError(
            f"data_on_gpu=true, but {type(dataset).__name__} cannot live on {feeding.device}: it "
            "takes a GPU, a TensorDataset without a collate_fn, and memory (gpu_data_gb)"
        )
    return ShareLoader(dataset, source, feeding)


def _source(
    brought: DataLoader[Any] | None,
    dataset: Any,
    samples: int,
    config: MultiGPUConfig,
    sizes: BatchSizes,
) -> GlobalBatchSource:
    total = sizes.global_batch
    if brought is None and isinstance(dataset, FormsBatches):
        return dataset.global_batches(total)
    if brought is None:
        return ShuffledBatches(samples, total, config.shuffle)
    if brought.batch_sampler is not None and type(brought.batch_sampler) is not BatchSampler:
        return BatchSamplerBatches(brought.batch_sampler)
    sampler = brought.sampler
    if type(sampler) is SequentialSampler:
        return ShuffledBatches(samples, total, shuffle=False)
    if type(sampler) is DistributedSampler:
        return ShuffledBatches(samples, total, sampler.shuffle)  # ours are exact shares of all
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and asked_samples(sampler) is None
    ):
        return ShuffledBatches(samples, total, shuffle=True)
    return SamplerBatches(sampler, total)


def _feeding(
    brought: DataLoader[Any] | None,
    dataset: Any,
    config: MultiGPUConfig,
    placement: Placement,
    micro_size: int,
    evaluating: bool = False,
) -> Feeding:
    def setting(name: str) -> Any:
        """The config's where it was set, else that of the DataLoader the user brought."""
        given = brought is None or name in config.model_fields_set
        return getattr(config if given else brought, name)

    workers = setting("num_workers")
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
    )


def _dataset(data: Data) -> Dataset[Any]:
    if isinstance(data, DataLoader):
        return data.dataset
    if isinstance(data, IterableDataset) or hasattr(data, "__getitem__"):
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
            f"the {purpose} dataset {name} has no length; give it __len__, or make it a torch "
            "IterableDataset to read it as a stream"
        ) from None
    if samples == 0:
        raise DataError(
            f"the {purpose} dataset {name} has 0 samples; check its path and its filters"
        )
    return samples
