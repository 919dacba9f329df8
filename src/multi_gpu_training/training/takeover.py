"""Weights and optimizer state of a rank that has finished a step, for those that have not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multi_gpu_training.state_dicts import load_optimizer_state, optimizer_state, pack, unpack

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer


def take_over(trainer: MultiGPUTrainer, source: int, behind: bool) -> None:
    """Give the ranks that are `behind` the parameters and optimizer state of rank `source`.
    Collective. Buffers and rates stay each rank's own: a forward that is done changed the
    buffers, and the schedule sets the rates when the step is counted."""
    placement, model, optimizer = trainer.placement, trainer.model, trainer.optimizer
    mine = placement.dp_rank == source
    tensors: dict[str, Tensor] = {}
    plain: Any = pack(optimizer_state(model, optimizer)["state"], tensors) if mine else None
    facts = {name: [list(t.shape), str(t.dtype), t.is_cuda] for name, t in tensors.items()}
    plain, facts = placement.gather_json([plain, facts])[source]
    for parameter in model.parameters():
        sent = parameter.detach().contiguous()
        placement.broadcast_tensors([sent], source)
        if behind:
            with torch.no_grad():
                parameter.copy_(sent)
    received = {}
    for name, (shape, dtype, on_gpu) in facts.items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        room = torch.empty(shape, dtype=kind, device=placement.device if on_gpu else "cpu")
        received[name] = room.copy_(tensors[name]) if mine else room
        placement.broadcast_tensors([received[name]], source)
    if behind:
        state = {**optimizer_state(model, optimizer), "state": unpack(plain, received)}
        load_optimizer_state(model, optimizer, state, f"rank {source}")
