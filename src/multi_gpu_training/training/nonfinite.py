"""Looks for NaN and infinity on the device, without waiting for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOOKED_AT = (torch.float32, torch.float16, torch.float64)  # types that torch's kernel takes


def flag_nonfinite(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to one where any element is not finite; else it stays."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        values = plain_values(tensor)
        by_type.setdefault(values.dtype, []).append(values)
    for kind, same in by_type.items():
        if kind not in LOOKED_AT:
            same = [torch.stack(torch._foreach_norm(same)).float()]
        torch._amp_foreach_non_finite_check_and_unscale_(same, flag, one)


def largest_elements(tensors: list[Tensor]) -> list[Tensor]:
    """The largest element of each; not finite where one of them is not."""
    return list(torch._foreach_norm([t for t in tensors if t.numel()], math.inf))


class Readback:
    """Numbers of the device, brought to the host without waiting for them."""

    def __init__(self, device: torch.device, count: int) -> None:
        cuda = device.type == "cuda"
        self._host = torch.zeros(count, pin_memory=cuda)
        self._event = torch.cuda.Event() if cuda else None

    def ask(self, *numbers: Tensor) -> None:
        for place, number in zip(self._host.unbind(), numbers, strict=False):
            place.copy_(number, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self) -> list[float]:
        """What was asked for last; those that were not are 0. Waits if that was just now."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._host.tolist()
        return found


def plain_values(tensor: Tensor) -> Tensor:
    """What a sparse or complex tensor holds, as real numbers."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
