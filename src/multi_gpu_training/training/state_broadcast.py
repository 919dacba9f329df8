"""Sends the weights and optimizer state of one rank to ranks that are a step behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.state_dicts import load_optimizer_state, optimizer_state, pack, unpack
from multi_gpu_training.training.step_state import StepState


def broadcast_state(state: StepState, source: int, behind: bool) -> None:
    """Send the parameters and optimizer state of rank `source` to the ranks that are `behind`.
    Collective. Each rank keeps its own buffers and rates: the step's forward has already changed
    the buffers, and the schedule sets the rates when the step is counted."""
    placement, model, optimizer = state.placement, state.trained, state.optimizer
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
        theirs = {**optimizer_state(model, optimizer), "state": unpack(plain, received)}
        load_optimizer_state(model, optimizer, theirs, f"rank {source}")
