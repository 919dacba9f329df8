"""training_mode=auto: choose one device, a copy per rank, or shards, by what fits into memory."""

from __future__ import annotations

import psutil
import torch
from torch import nn

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.distributed.placement import Placement

# Fraction of a device's memory; the rest is for activations, whose size is unknown here.
_FOR_STATE = 0.7


def choose_mode(model: nn.Module, placement: Placement) -> tuple[TrainingMode, str]:
    """The mode for this model on these ranks, and a line that says why. Collective.

    It counts weights, gradients and Adam's two moments; a lighter optimizer only leaves more
    room.
    """
    if placement.group is None:
        return TrainingMode.SINGLE, "training_mode=auto: single, as there is one rank"
    ranks = placement.dp_size
    needed = sum((4 if p.requires_grad else 1) * p.nbytes for p in model.parameters())
    memory = min(placement.gather_json(_free_bytes(placement)))
    state = f"weights, gradients and Adam's moments take {_gb(needed)}"
    room = f"{_gb(memory)} that each of {ranks} ranks has"
    if needed <= _FOR_STATE * memory:
        return TrainingMode.DISTRIBUTED_DATA_PARALLEL, (
            f"training_mode=auto: distributed_data_parallel; {state} of the {room}"
        )
    short = needed / ranks > _FOR_STATE * memory
    warning = "; even in parts that may be too much: use more ranks" if short else ""
    return TrainingMode.FULLY_SHARDED, (
        f"training_mode=auto: fully_sharded; {state}, more than {_FOR_STATE:.0%} of the "
        f"{room}{warning}"
    )


def _free_bytes(placement: Placement) -> float:
    if placement.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(placement.device)
        return free + torch.cuda.memory_reserved(placement.device)
    # The ranks of a machine share its memory.
    return psutil.virtual_memory().available / placement.identity.local_world_size


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
