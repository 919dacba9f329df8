"""Predictions and evaluations on several ranks: every input once, results in the order of the
inputs, and the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.order import cut
from multi_gpu_training.delivery.loaded_model import LoadedModel
from multi_gpu_training.distributed.placement import Placement, place
from multi_gpu_training.errors import DataError
from multi_gpu_training.launch.launcher import ranks_for, start_ranks_if_needed
from multi_gpu_training.recipes.pipeline import Result


@contextmanager
def ranks(num_gpus: int = -1, device: str = "auto") -> Iterator[Placement]:
    """Start this command once per rank where that is asked for, and join the others. -1 is every
    GPU; without GPUs, N means N ranks on the CPU."""
    count = ranks_for(num_gpus, device=device)
    alone = num_gpus == -1 and count == 1
    config = MultiGPUConfig(
        device=device, max_restarts=0, **({} if alone else {"world_size": count})
    )
    start_ranks_if_needed(config)
    placement = place(config)
    try:
        yield placement
    finally:
        placement.close()


def predict_on_ranks(
    loaded: LoadedModel,
    raws: Sequence[Any],
    placement: Placement,
    task: str | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> list[Result]:
    """One result per input, in their order, on every rank. Collective.

    An input that cannot be used has the result {"error": ...}; if none can be, that is a
    DataError on every rank.
    """
    chosen, size = loaded.task(task), batch_size or loaded.pipeline.batch_size
    blocks = -(-len(raws) // size)
    # Whole blocks: a batch holds the same samples on any number of ranks, so that its outputs are
    # the same to the last bit.
    mine: list[Result] = []
    for block in range(*cut(blocks, placement.dp_size, placement.dp_rank)):
        first = block * size
        mine += _block(loaded, raws[first : first + size], chosen, size, first, options)
    found = [result for part in placement.gather_json(mine) for result in part]
    problems = [result["error"] for result in found if "error" in result]
    if problems and len(problems) == len(found):
        raise DataError(list(dict.fromkeys(problems))[:10])
    return found


def _block(
    loaded: LoadedModel,
    raws: Sequence[Any],
    task: str,
    size: int,
    first: int,
    options: dict[str, Any],
) -> list[Result]:
    perform = loaded.pipeline.perform
    try:
        return list(perform(task, loaded.model, raws, size, first=first, **options))
    except DataError as error:
        if len(raws) == 1:
            return [{"error": "; ".join(error.problems)}]
    parts = (  # one by one, to find out which it is
        _block(loaded, raws[i : i + 1], task, size, first + i, options) for i in range(len(raws))
    )
    return [result for part in parts for result in part]
