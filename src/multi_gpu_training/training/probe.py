"""Compute with a model and leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multi_gpu_training.distributed.batchnorm import SyncBatchNorm
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.state_dicts import random_state, set_random_state
from multi_gpu_training.training.step_state import StepState


@contextmanager
def untouched(state: StepState) -> Iterator[None]:
    """Compute in training mode on this rank alone; then restore buffers, generators and modes."""
    model, device = state.trained, state.placement.device
    random = random_state(device)
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    norms = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    alone = Placement(state.placement.identity, device)
    present, state.attendance.present = state.attendance.present, True
    state.modes.enter_training()
    for norm in norms:
        norm.placement = alone
    try:
        yield
    finally:
        for norm in norms:
            norm.placement = state.placement
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, tensor, kept in buffers:
                tensor.copy_(kept)
                setattr(module, name, tensor)  # put the same tensor back if forward replaced it
        state.attendance.present = present
        set_random_state(random, device)
