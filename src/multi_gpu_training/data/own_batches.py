"""The place of a loader in a training whose loop makes its own batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from multi_gpu_training.data.batch import attach, head, rows, tensors_of, to_device
from multi_gpu_training.data.loader import Feeding
from multi_gpu_training.data.order import Share, cut
from multi_gpu_training.data.passes import EpochLoader
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import DataError


class OwnBatches(EpochLoader):
    """Gives no batches; knows how many steps the user calls an epoch, if they say so."""

    dataset = None
    evaluating = False

    def __init__(self, feeding: Feeding, steps_per_epoch: int | None = None) -> None:
        super().__init__()
        self.feeding = feeding
        self.steps = steps_per_epoch
        self._template: Any = None

    def one_pass(self) -> Iterator[Any]:
        raise DataError(
            "this training has no dataset: your loop makes its batches. Give setup_training or "
            "prepare a dataset to iterate over a loader"
        )

    def set_shares(self, **how: Any) -> None:
        self.feeding = replace(self.feeding, **how)

    def fetched_here(self) -> Iterator[Any]:
        return self.one_pass()

    def stand_in(self, share: Share) -> tuple[Any, int]:
        """A sample of the newest batch that was shared out."""
        return to_device(self._template, self.feeding.device), 1

    def keep_template(self, sample: Any) -> None:
        self._template = sample


def shard(batch: Any, size: int, share: Share, placement: Placement) -> tuple[Any, Any, Share]:
    """This rank's rows of a batch of `size` samples that all ranks have made alike, on its device
    and carrying a share like `share`; one sample; that share. A rank for which there is no row gets
    the sample, to compute on, with a share of nothing."""
    if not any(size in tensor.shape for tensor in tensors_of(batch)):
        raise DataError(f"no tensor of this batch has {size} rows to share out over the ranks")
    begin, end = cut(size, placement.dp_size, placement.dp_rank)
    sample = head(batch, 1, size)
    part = rows(batch, size, begin, end) if end > begin else head(batch, 1, size)
    whole = size if share.first and share.last else 0  # else it is learned with the gradients
    share = replace(share, count=end - begin, window_count=whole)
    return attach(to_device(part, placement.device), share), sample, share
